"""The memory that a study saves from and restores into.

Invariants: the kept memory is touched. It has huge pages if the kernel gives them, and bytes that
no storage can take for zeros. Restoring writes the same bytes into it again, so it never changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

_PATTERN_BYTES = 1 << 20


class MappedMemory:
    """So many bytes at `address`, seen as `view`."""

    def __init__(self, nbytes: int) -> None:
        # Private: shared memory has other, smaller pages, and slower faults.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(1, nbytes), flags=private)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def prefer_huge_pages(self) -> None:
        self._map.madvise(mmap.MADV_HUGEPAGE)


def kept(nbytes: int) -> MappedMemory:
    memory = MappedMemory(nbytes)
    with contextlib.suppress(OSError):  # a kernel without them: slower, for all strategies alike
        memory.prefer_huge_pages()
    pattern = os.urandom(_PATTERN_BYTES)
    for at in range(0, nbytes, _PATTERN_BYTES):
        part = memory.view[at : min(nbytes, at + _PATTERN_BYTES)]
        part[:] = pattern[: len(part)]
    return memory


def new(nbytes: int) -> MappedMemory:
    """As an allocator gives it: none of its pages exists yet."""
    return MappedMemory(nbytes)
