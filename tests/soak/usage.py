"""What a process holds, and whether that has grown.

Two gauges are exact: what malloc has handed out, and how many objects Python has; they show a leak
of 1 KiB a save within minutes, where the resident memory needs hours. The resident memory is
counted without the arenas of malloc. How much of them is free depends on which thread allocates
what in which order; where there are many arenas, that takes dozens of rounds to settle.
Descriptors, threads and names in /dev/shm may not grow at all.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

SETTLE_S = 10.0
# What may come and go: pages of libraries and of stacks, freed blocks in the caches of threads.
SLACK = {"rss_bytes": 24 << 20, "heap_bytes": 512 << 10, "objects": 4000}


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    rss_bytes: int
    heap_bytes: int
    objects: int
    descriptors: int
    threads: int
    shared: int

    @staticmethod
    def now() -> Usage:
        gc.collect()
        heap = _heap()
        return Usage(
            rss_bytes=_resident_pages() * os.sysconf("SC_PAGE_SIZE") - int(heap.arena),
            heap_bytes=int(heap.uordblks + heap.hblkhd),
            objects=sys.getallocatedblocks(),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shared=_shared(),
        )

    def __str__(self) -> str:
        return (
            f"{self.rss_bytes >> 20} MiB without arenas, {self.heap_bytes >> 10} KiB of heap, "
            f"{self.objects} objects, {self.descriptors} descriptors, {self.threads} threads, "
            f"{self.shared} in /dev/shm"
        )

    def growth_since(self, first: Usage) -> str:
        """What has grown beyond its slack, by name; empty when nothing has."""
        grown = [
            each.name
            for each in fields(self)
            if getattr(self, each.name) > getattr(first, each.name) + SLACK.get(each.name, 0)
        ]
        return f"{', '.join(grown)}: {first} -> {self}" if grown else ""


def settled(first: Usage, now: Callable[[], Usage] = Usage.now) -> Usage:
    """What is held now; what only looks grown, as a thread that is just ending, has time to go."""
    until = time.monotonic() + SETTLE_S
    usage = now()
    while usage.growth_since(first) and time.monotonic() < until:
        time.sleep(0.05)  # the kernel announces neither the end of a thread nor freed pages
        usage = now()
    return usage


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def _heap() -> _Mallinfo:
    """What malloc has from the system, and what of it was handed out and has not come back; zeros
    where the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return _Mallinfo()
    mallinfo.restype = _Mallinfo
    found: _Mallinfo = mallinfo()
    return found


def _shared() -> int:
    """Names in /dev/shm with the number of this process, and what it has mapped of /dev/shm."""
    try:
        names = os.listdir("/dev/shm")
    except FileNotFoundError:
        names = []
    own = [name for name in names if str(os.getpid()) in name]
    return len(own) + Path("/proc/self/maps").read_text().count(" /dev/shm/")
