"""What files take on storage if a file may have several names, in several steps and runs.

Invariants: a file counts once, however many names it has. It is own to a set of directories if all
its names are in them; deleting these frees its bytes, and nothing else does.
Not here: which directories are steps (steps/store).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from statehold.steps.pool import POOL_NAME


@dataclass(frozen=True, slots=True)
class StepSizes:
    """bytes: of the files. own_bytes: of those that no other directory has. files: how many."""

    bytes: int
    own_bytes: int
    files: int

    @property
    def shared_bytes(self) -> int:
        """Of files that other directories have, too."""
        return self.bytes - self.own_bytes


def sizes(directories: Iterable[str], beside: Iterable[str] = ()) -> StepSizes:
    """The files below these directories. beside: directories whose names do not count as others."""
    directories = list(directories)
    found, names = dict[tuple[int, int], os.stat_result](), Counter[tuple[int, int]]()
    for status in files_below(directories):
        key = status.st_dev, status.st_ino
        found[key] = status
        names[key] += 1
    for status in files_below(set(beside).difference(directories)):
        names[status.st_dev, status.st_ino] += 1
    own = [each.st_size for key, each in found.items() if names[key] >= each.st_nlink]
    return StepSizes(sum(each.st_size for each in found.values()), sum(own), len(found))


def sizes_of_steps(run: str, directories: Iterable[str]) -> StepSizes:
    """The files of steps of a run; names that wait for its next save do not count as others."""
    return sizes(directories, [f"{run}/{POOL_NAME}"])


def files_below(directories: Iterable[str]) -> Iterator[os.stat_result]:
    """The status of each file, once for each of its names."""
    for directory in directories:
        for parent, _, names in os.walk(directory):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # its job retired it meanwhile
                    yield os.lstat(os.path.join(parent, name))
