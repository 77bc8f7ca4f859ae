"""Every state in which a crash can leave a recorded disk.

Before each change that was made while recording, the power goes off: `crash_states` gives the disks
that may be left then. All of them, where they are few; else the first of them (all that was not
synced is lost), the last (all is there), and as many drawn ones as there is room for. States that
look the same are given once. Where all of them take too long for the suite, a Sample takes one for
each moment, or for one moment of a few. The day chooses them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from support.in_memory import SimFs
from support.seeds import SEED


def crash_states(fs: SimFs, moment: int, most: int, seed: int) -> Iterator[SimFs]:
    """The disks that a crash just before recorded change `moment` may leave."""
    seen: set[tuple[tuple[str, bytes | None], ...]] = set()
    chance = random.Random(seed * 1_000_003 + moment)
    choices: list[int] | None = []
    for _ in range(most):
        if choices is None:
            return
        disk = fs.at_moment(moment)
        arities = disk.crash_as(choices)
        look = tuple(_look(disk, ""))
        if look not in seen:
            seen.add(look)
            yield disk
        choices = _next(choices, arities)
    # Too many to try them all: the rest is drawn.
    for index in range(most):
        disk = fs.at_moment(moment)
        disk.crash_as([4 if index == 0 else chance.randrange(3) for _ in range(100)])
        look = tuple(_look(disk, ""))
        if look not in seen:
            seen.add(look)
            yield disk


class Sample:
    """The states that are tried: all of them, or one for one of `among` moments."""

    def __init__(self, most: int, *, whole: bool, among: int = 1) -> None:
        self._most = most
        self._is_whole = whole
        self._among = among

    def of(self, fs: SimFs, moment: int, seed: int = 0) -> list[SimFs]:
        if not self._is_whole and (moment + seed + SEED) % self._among:
            return []
        states = list(crash_states(fs, moment, self._most, seed))
        chance = random.Random(f"{SEED} {seed} {moment}")
        return states if self._is_whole else [chance.choice(states)]


def _next(choices: list[int], arities: list[int]) -> list[int] | None:
    """The outcomes to try next; None after the last."""
    full = choices + [0] * (len(arities) - len(choices))
    while full:
        if full[-1] + 1 < arities[len(full) - 1]:
            return [*full[:-1], full[-1] + 1]
        full.pop()
    return None


def _look(disk: SimFs, path: str) -> Iterator[tuple[str, bytes | None]]:
    for name, is_dir in disk.listdir(path or "/"):
        inner = f"{path}/{name}"
        if is_dir:
            yield inner, None
            yield from _look(disk, inner)
        else:
            yield inner, disk.read_file(inner, 1 << 30)
