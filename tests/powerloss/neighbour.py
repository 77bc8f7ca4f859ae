"""Another program on the same disk: it writes, and sometimes syncs, a file of its own.

With it, writes are under way whenever a save asks for a flush, and flushes come that no save has
asked for.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from powerloss.linux import die_with_parent

_BLOCK = 4096
_BLOCKS = 64
_PAUSE_S = 0.002
_SYNCS = 0.03  # after which part of its writes


@contextmanager
def neighbour(root: Path, seed: int) -> Iterator[None]:
    """It is at work below `root` until the block is left."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            _write(root / "neighbour", random.Random(seed))
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _write(path: Path, chance: random.Random) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, _BLOCK * _BLOCKS)
    page = mmap.mmap(-1, _BLOCK)
    while True:
        page[:8] = chance.randbytes(8)
        os.pwrite(fd, page, _BLOCK * chance.randrange(_BLOCKS))
        if chance.random() < _SYNCS:
            os.fdatasync(fd)
        time.sleep(_PAUSE_S * chance.random())  # else the log is full of it
