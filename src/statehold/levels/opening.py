"""From what a user says of the levels to places that can be read and written.

Owns: where a level without a path is. Holds: no two levels are in one place.
Not here: what a level may say (specs), what a place does (places).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from statehold.errors import UsageError
from statehold.levels.memory import memory_root
from statehold.levels.places import CopyEngine, DirectoryPlace
from statehold.levels.specs import Directory, Level, Memory
from statehold.storage.store import Store

if TYPE_CHECKING:
    from statehold._core import Fs

__all__ = ["open_places"]


def open_places(
    levels: Sequence[Level],
    run: str,
    fs: Fs,
    buffer_bytes: int,
    *,
    reuse: bool,
    rank: int,
    world_size: int,
) -> list[DirectoryPlace]:
    """The levels of the run directory `run`, from the nearest on; nothing is made yet."""
    places: list[DirectoryPlace] = []
    roots: list[str] = []
    for level in levels:
        if not isinstance(level, Directory | Memory):
            raise UsageError("no such level yet", facts={"level": level.name})
        called = _called(level, run)
        # It may be reached through links; below it, nothing is one.
        root = os.path.realpath(called)
        _check_own(level, root, roots)
        store = Store(fs, root, keep=level.keep, reuse=reuse, rank=rank, world_size=world_size)
        engine = CopyEngine(fs, buffer_bytes)
        places.append(DirectoryPlace(level.name, store, called, fs, engine))
    return places


def _check_own(level: Level, root: str, roots: list[str]) -> None:
    """Steps of two levels in one directory would be each other's."""
    if root in roots:
        raise UsageError(
            "two levels are in one directory",
            facts={"level": level.name, "directory": root},
            hint="give one of them a path of its own",
        )
    roots.append(root)


def _called(level: Directory | Memory, run: str) -> str:
    """The directory of a level."""
    if level.path is not None:
        return os.path.abspath(os.fspath(level.path))
    return memory_root(run) if isinstance(level, Memory) else run
