"""Images of disks: sparse files. Only what was ever written is copied."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from powerloss.linux import punch
from powerloss.states import State

_BLOCK = 1 << 20


def copy(source: Path, target: Path) -> None:
    """A sparse file with the content of another."""
    target.unlink(missing_ok=True)
    with source.open("rb") as old, target.open("xb") as new:
        size = os.fstat(old.fileno()).st_size
        os.truncate(new.fileno(), size)
        begin = _data(old.fileno(), 0)
        while begin is not None:
            end = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            for at in range(begin, end, _BLOCK):
                os.pwrite(new.fileno(), os.pread(old.fileno(), min(_BLOCK, end - at), at), at)
            begin = _data(old.fileno(), end)


def apply(state: State, image: Path) -> None:
    """Make what was the disk before the log the disk of this state."""
    with image.open("r+b") as file:
        for piece in state.pieces:
            if piece.data is None:
                punch(file.fileno(), piece.offset, piece.size)
            else:
                os.pwrite(file.fileno(), piece.data, piece.offset)


def _data(fd: int, begin: int) -> int | None:
    """Where the next bytes are that are not a hole."""
    try:
        return os.lseek(fd, begin, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
