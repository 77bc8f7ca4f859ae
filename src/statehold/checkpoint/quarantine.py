"""Sets damaged steps aside that a restore has passed over: nobody takes them for steps then."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from statehold.errors import CorruptionError, RunBusyError, StorageError
from statehold.ranks.agreeing import everyone, together

if TYPE_CHECKING:
    from statehold.checkpoint.session import Session

__all__ = ["set_aside"]


def set_aside(
    session: Session,
    failed: Mapping[int, CorruptionError],
    confirmed: Collection[int],
    restored: int,
) -> None:
    """Keep the damaged steps where nobody takes them for steps; all ranks, before any goes on: it
    would find them newer than what it saves next. A step that is not `confirmed` stays: another
    job may be saving it again."""
    together(session.peers, lambda: session.promotions.wait(None))
    places = everyone(
        session.peers, lambda: [_quarantined(session, step, step in confirmed) for step in failed]
    )
    session.forget(failed)
    for (step, error), kept in zip(failed.items(), places[0], strict=True):
        text = f"step {step} is damaged; step {restored} was restored instead. "
        warnings.warn(
            f"{text}The damaged step was kept as {kept}.\n{error}", RuntimeWarning, stacklevel=3
        )


def _quarantined(session: Session, step: int, is_confirmed: bool) -> str:
    """Where the damaged step is now; where it was if the run is another job's, or not ours to
    change: the state is restored all the same."""
    if is_confirmed:
        with contextlib.suppress(RunBusyError, StorageError):
            return session.quarantine(step)
    return session.store.path(step)
