"""What happened in a run, and at which position of the disk's log: what the oracle knows.

A process that saves notes each fact with the position that the log had then. It notes what it
begins before it begins, and what statehold reports after the report. So a disk whose power went off
at position p has seen nothing that was begun later than p, and keeps all that was reported up to p.

    begin    a save of `step` with `serial` by `ranks` ranks may be there
    promise  it was reported as committed
    doubt    a rewind to `step` was begun: newer steps of saves before `serial` may be there or not
    forget   that rewind has ended: they may not be there
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from powerloss.journal import Position
from sim.oracle import Oracle


@dataclass(frozen=True, slots=True)
class Fact:
    """places: names of the directories of steps that it is about. at: a position of the log."""

    at: int
    what: str
    places: tuple[str, ...]
    step: int
    serial: int
    ranks: int = 1

    def told(self, oracle: Oracle) -> None:
        if self.what == "begin":
            oracle.begin(self.step, self.serial, self.ranks)
        elif self.what == "promise":
            oracle.promise(self.step, self.serial)
        elif self.what == "doubt":
            oracle.doubt(self.step, self.serial)
        else:
            oracle.forget(self.step, self.serial)


class History:
    """Notes facts in a file, in any number of processes and threads."""

    def __init__(self, path: Path, position: Position) -> None:
        self.path = path
        self._position = position
        path.write_bytes(b"")

    def note(
        self, what: str, places: Iterable[str], step: int, serial: int, ranks: int = 1
    ) -> None:
        fact = Fact(self._position.get(), what, tuple(places), step, serial, ranks)
        line = json.dumps(asdict(fact)).encode() + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def facts(self) -> list[Fact]:
        """All of them, oldest first."""
        return facts_of(json.loads(line) for line in self.path.read_bytes().splitlines())


def facts_of(documents: Iterable[dict[str, Any]]) -> list[Fact]:
    found = [Fact(**{**each, "places": tuple(each["places"])}) for each in documents]
    return sorted(found, key=lambda fact: fact.at)


def known_at(facts: Sequence[Fact], cut: int) -> list[Fact]:
    """What was known when the power went off at position `cut`, as what was before all else."""
    return [
        Fact(0, fact.what, fact.places, fact.step, fact.serial, fact.ranks)
        for fact in facts
        if fact.at <= cut
    ]


def oracles(facts: Sequence[Fact], keeps: dict[str, int | None]) -> dict[str, Oracle]:
    """What each place must hold, by its name; `keeps`: how many steps it keeps."""
    found = {place: Oracle(keep) for place, keep in keeps.items()}
    for fact in facts:
        for place in fact.places:
            fact.told(found[place])
    return found
