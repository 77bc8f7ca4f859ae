"""What a disk may hold after the power went off: drawn from its log, by a volatile write cache.

A change that was answered before some flush was asked for is there if that flush was answered. Of
all other changes that were asked for, any may be there or not, whole or in part; those that are
there have come in the order in which they were asked for.

    none     nothing of what is not certain
    all      all of it
    prefix   the first of these changes
    subset   any of them
    torn     any of them, and of some only a part of their sectors
    certain  there was no change that is not certain

Pure: no disk is touched here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from powerloss.journal import Change, Journal

KINDS = ("none", "all", "prefix", "subset", "torn")
NEAR = 6  # records


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the disk that changed; data None: to zeros."""

    offset: int
    size: int
    data: memoryview | None


@dataclass(frozen=True, slots=True)
class State:
    """The disk after the power went off at the position `cut`: what was changed, in order."""

    cut: int
    kind: str
    pieces: tuple[Piece, ...]


def parted(journal: Journal, cut: int) -> tuple[list[Change], list[Change]]:
    """The changes that are certainly there if the power goes off at `cut`, and the others."""
    flushed = max((asked for asked, answered in journal.flushes if answered < cut), default=-1)
    certain, open_ = [], []
    for change in journal.changes:
        if change.asked < cut:
            is_certain = change.answered is not None and change.answered < flushed
            (certain if is_certain else open_).append(change)
    return certain, open_


def draw(journal: Journal, cut: int, kind: str, chance: random.Random, sector_bytes: int) -> State:
    """One of the states of this kind after a loss of power at `cut`."""
    certain, open_ = parted(journal, cut)
    if not open_:
        return State(cut, "certain", tuple(map(_whole, certain)))
    taken = _CHOICES[kind](open_, chance, sector_bytes)
    kept = [(change.asked, _whole(change)) for change in certain]
    kept += [(change.asked, piece) for change, piece in taken]
    return State(cut, kind, tuple(piece for _, piece in sorted(kept, key=lambda each: each[0])))


def moments(journal: Journal, marks: Sequence[int], count: int, chance: random.Random) -> list[int]:
    """Positions at which the power goes off: most of them while changes are open, others just when
    a flush was answered or a process noted a fact (`marks`), or a little beside that."""
    told = [mark for mark in marks if mark <= journal.records]
    answered = [at + 1 for _, at in journal.flushes]
    open_ = [cut for cut in range(journal.records + 1) if parted(journal, cut)[1]]
    found = []
    for _ in range(count):
        at = chance.choice(chance.choice([open_, open_, told, answered]) or [0])
        beside = chance.choice([0, 0, chance.randint(-NEAR, NEAR)])
        found.append(min(max(at + beside, 0), journal.records))
    return found


def overlapped(journal: Journal) -> int:
    """During how many flushes some change was under way that was asked for before."""
    return sum(
        any(
            each.asked < asked and (each.answered is None or each.answered > asked)
            for each in journal.changes
        )
        for asked, _ in journal.flushes
    )


Taken = Iterator[tuple[Change, Piece]]


def _whole(change: Change) -> Piece:
    return Piece(change.offset, change.size, change.data)


def _none(_changes: list[Change], _chance: random.Random, _sector: int) -> Taken:
    return iter(())


def _all(changes: list[Change], _chance: random.Random, _sector: int) -> Taken:
    return ((change, _whole(change)) for change in changes)


def _prefix(changes: list[Change], chance: random.Random, _sector: int) -> Taken:
    return ((change, _whole(change)) for change in changes[: chance.randint(0, len(changes))])


def _subset(changes: list[Change], chance: random.Random, _sector: int) -> Taken:
    part = chance.choice([0.1, 0.5, 0.9])
    return ((change, _whole(change)) for change in changes if chance.random() < part)


def _torn(changes: list[Change], chance: random.Random, sector: int) -> Taken:
    part = chance.choice([0.5, 0.9, 1.0])
    for change in changes:
        if chance.random() >= part:
            continue
        if change.data is None or change.size <= sector or chance.random() < 0.3:
            yield change, _whole(change)
        else:
            for piece in _sectors(change, chance, sector):
                yield change, piece


def _sectors(change: Change, chance: random.Random, sector: int) -> Iterator[Piece]:
    """Some of the sectors of a write: its first ones, its last ones, or any."""
    begins = range(0, change.size, sector)
    at = chance.randint(0, len(begins))
    style = chance.randrange(3)
    for index, begin in enumerate(begins):
        if (index < at, index >= at, chance.random() < 0.5)[style]:
            size = min(sector, change.size - begin)
            yield Piece(change.offset + begin, size, change.data[begin : begin + size])


_CHOICES: dict[str, Callable[[list[Change], random.Random, int], Taken]] = {
    "none": _none,
    "all": _all,
    "prefix": _prefix,
    "subset": _subset,
    "torn": _torn,
}
