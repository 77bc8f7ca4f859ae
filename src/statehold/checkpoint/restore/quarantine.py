"""Sets aside damaged steps that a restore has skipped, so that no reader takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from statehold.checkpoint.levels.levels import Levels
from statehold.errors import CorruptionError, RunBusyError, StorageError
from statehold.process.warn import warn_caller
from statehold.ranks.rounds import everyone, together


def set_aside(
    levels: Levels,
    failed: Mapping[int, CorruptionError],
    confirmed: Collection[int],
    restored: int,
) -> None:
    """Rename the damaged steps; all ranks, before any continues.

    Otherwise a rank would find them newer than its next save. A step that is not `confirmed` stays,
    because another job may be saving it again.
    """
    peers = levels.peers
    together(peers, lambda: levels.promotions.wait(None))
    places = everyone(
        peers, lambda: [_quarantined(levels, step, step in confirmed) for step in failed]
    )
    levels.forget(failed)
    for (step, error), kept in zip(failed.items(), places[0], strict=True):
        text = f"step {step} is damaged; step {restored} was restored instead. "
        warn_caller(f"{text}The damaged step was kept as {kept}.\n{error}")


def _quarantined(levels: Levels, step: int, is_confirmed: bool) -> str:
    """The new place of the damaged step.

    Its old place if the run belongs to another job or may not be changed: the state is still
    restored.
    """
    if is_confirmed:
        with contextlib.suppress(RunBusyError, StorageError):
            return levels.quarantine(step)
    return levels.store.path(step)
