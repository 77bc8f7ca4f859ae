"""What one call of restore() asks for, checked.

Not here: how it is done (call), which step is meant (choice), what patterns mean
(format/selection), what a prefix is (tensors/transfer).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from statehold.checkpoint.restore.choice import Choice
from statehold.errors import UsageError, shown
from statehold.format.selection import Selection
from statehold.options.paths import check_step


@dataclass(frozen=True, slots=True)
class Request:
    """selection: None is the prefix that the model shares with the step. source: another run, whose
    step is read; None is the run itself."""

    choice: Choice
    selection: Selection | None
    source: str | None = None


def requested(
    choice: Choice, source: str | os.PathLike[str] | None, prefix: bool, selection: Selection
) -> Request:
    """The arguments of Checkpointer.restore() as one value. Raises UsageError."""
    named = None if source is None else check_step(source, "the source")
    if named is not None and not named.is_newest and choice != Choice():
        raise UsageError(
            "a step is given twice",
            facts={"source": os.fspath(source or ""), "also given": "step, best or tag"},
            hint="leave one of them out",
        )
    if not isinstance(prefix, bool):
        raise UsageError("prefix is True or False", facts={"got": shown(prefix)})
    if prefix and (selection.has_patterns or not selection.strict or selection.cast):
        raise UsageError(
            "prefix=True chooses what is restored, so only, skip, rename, strict and cast cannot",
            hint="restore twice: once with prefix=True, and once with what else you need",
        )
    chosen = choice if named is None or named.is_newest else Choice.of(named)
    return Request(chosen, None if prefix else selection, None if named is None else named.run)
