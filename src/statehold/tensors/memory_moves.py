"""What takes the memory of a tensor away although the tensor lives, seen before it happens.

torch replaces the memory of a storage when the storage is resized (`untyped_storage().resize_()`,
as systems that offload parameters do), and when it moves into shared memory (`share_memory_()`, a
queue of torch.multiprocessing). It frees the old memory at once. Who still copies from there reads
what others have written since, or ends the process by a segmentation fault.

A thread may take memory away while another one looks for tensors to copy. So a move is noted first,
and only then asked about: noted() shows it to a capture that was too early for the question.

Invariants: no lock is held while somebody waits. A forked child asks nobody.
Not seen: operators that resize in C++, such as Tensor.resize_() to more elements.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from statehold.tensors.wrapping import Wrapping

# Called with a storage whose memory is about to go.
Action = Callable[[torch.UntypedStorage], None]

_action: Action | None = None
_captures: tuple[list[int], ...] = ()


def put_on(action: Action) -> None:
    """Call `action` before a storage loses its memory, on the thread where that happens."""
    global _action
    _action = action
    _wrapping.put_on()


def take_off() -> None:
    """Call nothing any more."""
    global _action
    _action = None
    _wrapping.take_off()


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """The storages, by `_cdata`, that lose their memory meanwhile, on any thread. The numbers of
    storages that nobody keeps may be those of others later."""
    global _captures
    moved: list[int] = []
    _captures = (*_captures, moved)
    try:
        yield moved
    finally:
        _captures = tuple(each for each in _captures if each is not moved)


def _ahead(call: Callable[[], Any], storage: Any) -> Any:
    action = _action
    if action is not None:
        for moved in _captures:
            moved.append(storage._cdata)
        action(storage)
    return call()


def _forget() -> None:
    global _action, _captures
    _action, _captures = None, ()


os.register_at_fork(after_in_child=_forget)

_NAMES = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
_wrapping = Wrapping(torch.UntypedStorage, dict.fromkeys(_NAMES, _ahead))
