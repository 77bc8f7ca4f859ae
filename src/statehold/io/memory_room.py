"""The room that files take in memory: weighed before a file is made there.

A file on tmpfs is charged to the control group of the process that makes it. Where the group, or
the host, has no memory left, the kernel kills a process instead of refusing the file. So the limits
of process/host_memory count as much as the size of the file system.
Invariants: a part of the free memory stays free, for training and for staging buffers that no save
has needed yet. Ranks that make files of a save at the same time come to the same answer, because
each counts what the others are about to take. A file that has its pages already is not weighed.
Not here: the limits (process/host_memory), space on a disk (the file system says it).
"""

from __future__ import annotations

import errno
import os
import re

from statehold._core import File, Fs
from statehold.errors import NoSpaceError
from statehold.io.mounts import mount_of
from statehold.process.host_memory import Room, available, ranks_on_host
from statehold.units import GiB

_MEMORY_KINDS = ("tmpfs", "ramfs")
_KEPT_BYTES = GiB  # as much as staging memory takes at first (io/runtime)
_KEPT_SHARE = 8
_BLOCK_BYTES = 512  # of st_blocks
_RANK = re.compile(r"rank-[0-9]{5}")


def open_file(
    fs: Fs,
    path: str,
    nbytes: int,
    *,
    reuse: bool = False,
    mapped: bool = False,
    ranks: int = 1,
) -> File:
    """fs.open_write, for a file of one of `ranks` that each make one as large beside it.

    Raises NoSpaceError if the file is to be in memory, and too little would be left.
    """
    if fs.backend != "sim" and is_memory(path):
        weigh(path, nbytes, reuse=reuse, ranks=ranks)
    return fs.open_write(path, nbytes, reuse, mapped=mapped)


def is_memory(path: str) -> bool:
    """Whether files at this path are memory."""
    return mount_of(path).kind in _MEMORY_KINDS


def spare_memory() -> Room:
    """The memory that files may take: half of little, and all but an eighth of much."""
    room = available()
    stays = min(room.nbytes // 2, max(_KEPT_BYTES, room.nbytes // _KEPT_SHARE))
    return Room(room.nbytes - stays, room.limit)


def free_bytes(directory: str) -> int:
    """What this user may still write there. Memory counts only as far as files may take it."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    return min(free, spare_memory().nbytes) if is_memory(directory) else free


def weigh(path: str, nbytes: int, *, reuse: bool, ranks: int) -> None:
    """Raise NoSpaceError if a file in memory would take too much; see open_file."""
    nbytes -= _taken(path) if reuse else 0
    if nbytes <= 0:
        return
    others = min(ranks, ranks_on_host(ranks)) - 1
    # What they have taken is no longer free. It is looked at first: a file that grows meanwhile
    # makes the answer more careful.
    awaited = max(0, others * nbytes - _beside(path)) if others else 0
    room = spare_memory()
    if nbytes + awaited > room.nbytes:
        raise NoSpaceError(
            "a file in memory would take memory that this host or its control group lacks",
            errno=errno.ENOSPC,
            path=path,
            facts={
                "expected": f"{nbytes + awaited} bytes, for {others + 1} ranks",
                "got": f"{room.nbytes} bytes of what is {room.limit}",
            },
            hint="raise the memory limit of the job, or keep fewer steps in memory",
        )


def _beside(path: str) -> int:
    """The bytes of files that other ranks have made for the same save."""
    folder, name = os.path.split(path)
    before, rank = _RANK.split(name)[0], _RANK.search(name)
    with os.scandir(folder) as entries:
        others = [each for each in entries if each.name.startswith(f"{before}rank-")]
        return sum(_taken(each.path) for each in others if rank and rank[0] not in each.name)


def _taken(path: str) -> int:
    try:
        return os.stat(path).st_blocks * _BLOCK_BYTES
    except OSError:  # not there, or another rank has removed it
        return 0
