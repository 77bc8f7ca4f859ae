"""A damaged file that several steps hold: named once, with all of them.

Invariants: only names and inodes are looked at. Steps are those of the run that has the file;
other runs, forked from it, may hold it, too, and are only counted.
Not here: what is damaged (checking), the output (verify).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from statehold.checkpoint.store.directories import step_of
from statehold.checkpoint.store.pool import POOL_NAME
from statehold.cli.checking import CheckReport

Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """file: its name in the first of the steps of `run`. elsewhere: how many names it has outside
    of the run."""

    run: str
    file: str
    steps: tuple[int, ...]
    elsewhere: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


class SharedDamage:
    """The damaged files with several names that were found in steps."""

    def __init__(self) -> None:
        self.files: dict[Inode, DamagedFile] = {}

    def add(self, report: CheckReport) -> set[str]:
        """Take the files of another step. Returns the names of those that were there already."""
        known = set()
        for name in {each.file for each in report.findings if each.file is not None}:
            path = f"{report.place.directory}/{name}"
            with contextlib.suppress(OSError):  # it is missing
                found = os.lstat(path)
                key = found.st_dev, found.st_ino
                if key in self.files:
                    known.add(name)
                elif found.st_nlink > 1:
                    self.files[key] = _held(os.path.dirname(report.place.directory), name, found)
        return known


def _held(run: str, name: str, found: os.stat_result) -> DamagedFile:
    steps, names = [], 0
    for folder in _folders(run):
        count = sum(1 for each in _files(folder) if os.path.samestat(each, found))
        step = step_of(os.path.basename(folder))
        if count and step is not None:
            steps.append(step)
        names += count
    return DamagedFile(run, name, tuple(sorted(steps)), max(0, found.st_nlink - names))


def _folders(run: str) -> Iterable[str]:
    with contextlib.suppress(OSError), os.scandir(run) as entries:
        return [
            each.path
            for each in entries
            if each.is_dir() and (each.name == POOL_NAME or each.name.startswith("step-"))
        ]
    return []


def _files(folder: str) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for each in entries:
            with contextlib.suppress(OSError):
                yield each.stat(follow_symlinks=False)
