"""Exit codes: 0 and 1 answer the question; the others say why there is no answer."""

from __future__ import annotations

from collections.abc import Iterable

from statehold.errors import (
    CorruptionError,
    RunBusyError,
    StateholdError,
    StepNotFoundError,
    UsageError,
)
from statehold.reading.places import NotFoundError

YES, NO, USAGE, NOT_FOUND, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 130
# As a shell counts a death by SIGPIPE: the reader of stdout went before the end.
CLOSED_PIPE = 141

TEXT = """\
exit codes:
  0  yes: intact, equal, done           3  no such run, step or tensor
  1  no: damaged, different             4  no answer: refused, busy, or a newer format
  2  the command cannot be understood   130  interrupted; 141  stdout was closed
"""


def code_at_levels(states: Iterable[str], *, is_damaged: bool) -> int:
    """The exit code of a command that has looked at levels in these states (levels.FoundLevel)."""
    if is_damaged:
        return NO
    return FAILED if "unreadable" in states else YES


def code_of(error: StateholdError) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, StepNotFoundError | NotFoundError):
        return NOT_FOUND
    if isinstance(error, CorruptionError):
        return NO
    # A user who has to wait for another job has made no mistake.
    is_mistake = isinstance(error, UsageError) and not isinstance(error, RunBusyError)
    return USAGE if is_mistake else FAILED
