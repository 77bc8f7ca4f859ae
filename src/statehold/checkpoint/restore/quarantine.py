"""Sets damaged steps aside that a restore has passed over: nobody takes them for steps then."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from statehold.errors import CorruptionError, RunBusyError, StorageError
from statehold.ranks.agreeing import everyone, together

if TYPE_CHECKING:
    from statehold.checkpoint.levels.levels import Levels

__all__ = ["set_aside"]

# The warning names the line that called restore(): over RestoreCalls, Session and Checkpointer.
_CALLS_ABOVE = 5


def set_aside(
    levels: Levels,
    failed: Mapping[int, CorruptionError],
    confirmed: Collection[int],
    restored: int,
) -> None:
    """Keep the damaged steps where nobody takes them for steps; all ranks, before any goes on: it
    would find them newer than what it saves next. A step that is not `confirmed` stays: another
    job may be saving it again."""
    peers = levels.peers
    together(peers, lambda: levels.promotions.wait(None))
    places = everyone(
        peers, lambda: [_quarantined(levels, step, step in confirmed) for step in failed]
    )
    levels.forget(failed)
    for (step, error), kept in zip(failed.items(), places[0], strict=True):
        text = f"step {step} is damaged; step {restored} was restored instead. "
        warnings.warn(
            f"{text}The damaged step was kept as {kept}.\n{error}",
            RuntimeWarning,
            stacklevel=_CALLS_ABOVE,
        )


def _quarantined(levels: Levels, step: int, is_confirmed: bool) -> str:
    """Where the damaged step is now; where it was if the run is another job's, or not ours to
    change: the state is restored all the same."""
    if is_confirmed:
        with contextlib.suppress(RunBusyError, StorageError):
            return levels.quarantine(step)
    return levels.store.path(step)
