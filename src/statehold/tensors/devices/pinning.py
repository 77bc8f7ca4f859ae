"""Pinning: the engine's buffers, which a device reaches itself once they are pinned.

Invariants: a buffer is pinned when it is lent for the first time, in a call of its own. Pinning
makes memory present, and takes 0.2 s a gigabyte (H200), in which other threads launch nothing. A
pause after each buffer lets them; otherwise they wait for many buffers in a row. What is pinned is
unpinned before the engine gives the memory back. While a device may still write, nothing is: that
user holds the memory, and unpins it.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from statehold.process.warn import logger
from statehold.tensors.devices.backends import StreamBackend

PAUSE_S = 0.001  # for threads that wait for the driver's lock; a buffer of 16 MiB takes 3 ms


def mapped(nbytes: int) -> torch.Tensor:
    """Bytes of whole pages that are mapped for this tensor alone."""
    # Private: by default, the kernel makes no huge pages of shared memory.
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]  # keeps the memory


class Pinning:
    """The pinned buffers of one engine. Pinned for all devices, by the context of `device`."""

    def __init__(self, backend: StreamBackend, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._guard = threading.Lock()
        self._pinned: set[int] = set()  # the addresses of buffers
        self._may_pin = True
        # No lock: close() must not wait for a call of a driver that hangs.
        self._users: list[None] = []
        self._is_closed = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, close() unpins nothing. The end of the last use makes up for that."""
        self._users.append(None)
        try:
            yield
        finally:
            self._users.pop()
            if self._is_closed:
                self.close()

    def pin(self, buffer: torch.Tensor) -> None:
        """Pin a whole buffer, unless it is."""
        address = buffer.data_ptr()
        with self._guard:
            if not self._may_pin or address in self._pinned:
                return
            with self._backend.using(self._device):
                self._may_pin = self._backend.pin(address, buffer.nbytes)
            if self._may_pin:
                self._pinned.add(address)
                time.sleep(PAUSE_S)
            else:
                logger.warning("staging memory could not be pinned: device copies are slower")

    def close(self) -> None:
        """Unpin; every job has ended, but for those that use this. On any thread. A device that has
        failed reaches no memory any more, and may refuse to be entered: then there is nothing to
        undo."""
        self._is_closed = True
        if self._users or not self._pinned:
            return
        with suppress(RuntimeError), self._backend.using(self._device):
            while self._pinned:
                self._backend.unpin(self._pinned.pop())
