"""Another run as the source of a restore: its steps, which are only read.

Invariants: no lock is taken, and nothing of the run changes: its job may go on. A step that it
retires, or saves again, during the restore is noticed as in a run of one's own.
Not here: a run that begins with a step of another as its own (checkpoint/levels/forking).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from statehold.checkpoint.levels.nearest import Nearest
from statehold.checkpoint.levels.places import CopyEngine, DirectoryPlace, StoreSite
from statehold.checkpoint.store.store import Store
from statehold.errors import UsageError
from statehold.format.about import check_origin
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.levels import Levels

_BUFFER_BYTES = 4 * MiB  # of copies, which nobody makes


def steps_of(fs: Fs, run: str) -> Nearest:
    """The steps in the directory of a run."""
    store = Store(fs, run, reuse=False)
    engine = CopyEngine(fs, _BUFFER_BYTES)
    return Nearest([DirectoryPlace(StoreSite("source", store, run, fs, engine, yields=False))], run)


def check_source(source: str | None, levels: Levels) -> None:
    """Raises UsageError if the source is the run itself, or no step can record its path."""
    if source is None:
        return
    check_origin(source)
    if os.path.realpath(source) == os.path.realpath(levels.run):
        raise UsageError(
            "the source of a restore is another run",
            facts={"run": levels.run},
            hint="leave source out; step= is a step of the run itself",
        )
