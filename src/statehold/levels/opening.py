"""From what a user says of the levels to places that can be read and written.

Owns: where a level without a path is; the engine that copies between levels.
Not here: what a level may say (specs), what a place does (places).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import UsageError
from statehold.levels.memory import memory_root
from statehold.levels.places import DirectoryPlace
from statehold.levels.specs import Directory, Level, Memory
from statehold.storage.store import Store

if TYPE_CHECKING:
    from statehold._core import Engine, Fs

__all__ = ["CopyEngine", "open_places"]

# What copies take of the memory, however large the files are.
COPY_BUFFERS = 4


class CopyEngine:
    """The engine that copies to other levels, opened when there is something to copy: it has
    buffers of its own, so that a copy never takes those that a save waits for."""

    def __init__(self, fs: Fs, buffer_bytes: int) -> None:
        self._fs = fs
        self._buffer_bytes = buffer_bytes
        self._engine: Engine | None = None

    def __call__(self) -> Engine:
        if self._engine is None:
            staging = COPY_BUFFERS * self._buffer_bytes
            self._engine = _core.Engine(self._fs, staging, self._buffer_bytes, 1)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def open_places(
    levels: Sequence[Level],
    run: str,
    fs: Fs,
    engine: Callable[[], Engine],
    *,
    reuse: bool,
    rank: int,
    world_size: int,
) -> list[DirectoryPlace]:
    """The levels of the run directory `run`, from the nearest on; nothing is made yet."""
    places: list[DirectoryPlace] = []
    for level in levels:
        if not isinstance(level, Directory | Memory):
            raise UsageError("no such level yet", facts={"level": level.name})
        called = _called(level, run)
        # It may be reached through links; below it, nothing is one.
        root = os.path.realpath(called)
        store = Store(fs, root, keep=level.keep, reuse=reuse, rank=rank, world_size=world_size)
        places.append(DirectoryPlace(level.name, store, called, fs, engine))
    return places


def _called(level: Directory | Memory, run: str) -> str:
    """The directory of a level."""
    if level.path is not None:
        return os.path.abspath(os.fspath(level.path))
    return memory_root(run) if isinstance(level, Memory) else run
