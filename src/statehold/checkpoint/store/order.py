"""Steps are saved in order: the refusal of older steps, and the advice in the error.

Invariants: the advice never discards every step of a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from statehold.errors import StepOrderError, StorageError


def check_newest(
    run: str, step: int, known: Iterable[int | None], steps: Callable[[], Iterable[int]]
) -> None:
    """Refuse to save `step` if a newer one is known in the directory `run`.

    steps: lists the committed steps; called only for the message.
    """
    newest = max((n for n in known if n is not None), default=None)
    if newest is None or step >= newest:
        return
    hint = (
        f"did you forget restore()? restore(state) loads step {newest} and returns its number; "
        f"save greater steps from there. To train from the start again, give the Checkpointer "
        f"another "
        "run directory"
    )
    with contextlib.suppress(StorageError):
        older = max((each for each in steps() if each < step), default=None)
        if older is not None:  # a rewind to anything else could discard every step
            hint += (
                f". To continue from step {older}, call restore(state, step={older}) and "
                f"rewind({older}), which deletes all steps after {older}"
            )
    raise StepOrderError(
        f"step {step} is older than step {newest}, which is saved already",
        facts={"run": run},
        hint=hint,
    )
