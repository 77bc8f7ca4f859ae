"""The log of a block device: what was asked of it, and what it answered, in order.

    kind     u8: WRITE, ZERO (a discard), FLUSH or ANSWER
    number   u32: of the request; an ANSWER has that of what it answers
    offset   u64, size u32: the bytes of the device that a WRITE or ZERO is about
    data     `size` bytes, behind a WRITE

A position is a number of records: the power that goes off at position p has seen the first p. An
answer is in the log before whoever asked can know it. The recorder says in shared memory where it
is, so that another process can note what it has seen at which position.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import dataclass

WRITE, ZERO, FLUSH, ANSWER = range(4)
_HEAD = struct.Struct("<BIQI")
_COUNT = struct.Struct("<Q")


class Position:
    """How many records there are, for all processes that have inherited this."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)

    def set(self, records: int) -> None:
        _COUNT.pack_into(self._shared, 0, records)

    def get(self) -> int:
        return int(_COUNT.unpack_from(self._shared)[0])


class Recorder:
    """Appends to the log; thread-safe."""

    def __init__(self, path: str, position: Position) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._position = position
        self._records = 0
        self._requests = 0
        self._guard = threading.Lock()

    def asked(
        self, kind: int, offset: int = 0, size: int = 0, data: memoryview | None = None
    ) -> int:
        """A request came; returns its number."""
        with self._guard:
            number = self._requests
            self._requests += 1
            self._append(_HEAD.pack(kind, number, offset, size), data)
            return number

    def answered(self, number: int) -> None:
        """A request is about to be answered."""
        with self._guard:
            self._append(_HEAD.pack(ANSWER, number, 0, 0), None)

    def _append(self, head: bytes, data: memoryview | None) -> None:
        parts = [head] if data is None else [head, data]
        if os.writev(self._fd, parts) != sum(len(part) for part in parts):
            raise OSError("the log of the device was cut short")
        self._records += 1
        self._position.set(self._records)


@dataclass(frozen=True, slots=True)
class Change:
    """A WRITE or, with data None, a ZERO. asked, answered: positions; answered is None if never."""

    asked: int
    answered: int | None
    offset: int
    size: int
    data: memoryview | None


@dataclass(frozen=True, slots=True)
class Journal:
    """A whole log. flushes: (asked, answered) of those that were answered, oldest first."""

    changes: tuple[Change, ...]
    flushes: tuple[tuple[int, int], ...]
    records: int


def parse(log: bytes) -> Journal:
    """Read a log; a record that is cut off at its end was not made."""
    view, at, records = memoryview(log), 0, 0
    asked: dict[int, tuple[int, int, int, int, memoryview | None]] = {}
    answered: dict[int, int] = {}
    while at + _HEAD.size <= len(view):
        kind, number, offset, size = _HEAD.unpack_from(view, at)
        at += _HEAD.size
        data = view[at : at + size] if kind == WRITE else None
        if data is not None and len(data) < size:
            break
        at += size if kind == WRITE else 0
        if kind == ANSWER:
            answered[number] = records
        else:
            asked[number] = (records, kind, offset, size, data)
        records += 1
    changes = tuple(
        Change(place, answered.get(number), offset, size, data)
        for number, (place, kind, offset, size, data) in asked.items()
        if kind != FLUSH
    )
    flushes = tuple(
        sorted(
            (place, answered[number])
            for number, (place, kind, *_) in asked.items()
            if kind == FLUSH and number in answered
        )
    )
    return Journal(changes, flushes, records)
