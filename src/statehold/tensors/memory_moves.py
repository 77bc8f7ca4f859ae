"""What takes the memory of a tensor away although the tensor lives, seen before it happens.

torch replaces the memory of a storage when the storage is resized (`untyped_storage().resize_()`,
as systems that offload parameters do), and when it moves into shared memory (`share_memory_()`, a
queue of torch.multiprocessing). It frees the old memory at once. Who still copies from there reads
what others have written since, or ends the process by a segmentation fault.

Invariants: nothing moves while steady() is held. Nobody is asked about storages without memory.
Not seen: operators that resize in C++, such as Tensor.resize_() to more elements.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from statehold.tensors.wrapping import Wrapping

# Called with the address of memory that is about to go, and its bytes.
Action = Callable[[int, int], None]

_guard = threading.RLock()  # what is done with steady() held may move memory itself
_action: Action | None = None


def put_on(action: Action) -> None:
    """Call `action` before a storage loses its memory."""
    global _action
    _action = action
    _wrapping.put_on()


def take_off() -> None:
    """Call nothing any more."""
    global _action
    _action = None
    _wrapping.take_off()


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """No storage loses its memory meanwhile, on any thread but this one."""
    with _guard:
        yield


def _ahead(call: Callable[[], Any], storage: Any) -> Any:
    if _action is None:
        return call()
    with _guard:
        memory = _memory_of(storage)
        if memory is not None:
            _action(*memory)
        return call()


def _memory_of(storage: Any) -> tuple[int, int] | None:
    """None: it has none, or is a stand-in, such as those of torch.compile."""
    try:
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return None
    return (address, nbytes) if address and isinstance(nbytes, int) else None


_NAMES = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
_wrapping = Wrapping(torch.UntypedStorage, dict.fromkeys(_NAMES, _ahead))
