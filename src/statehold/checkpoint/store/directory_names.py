"""The names of directories in a run directory: what each is, and which attempt made it.

    step-000000000100                             a committed step
    step-000000000100.replaced                    counts as that step while it is missing
    step-000000000110.partial                     being written, by one rank
    step-000000000110.5f3a09c1-7.partial          by several: the attempt, as TOKEN-NUMBER
    step-000000000090.retired                     no longer kept
    step-...5f3a09c1-7.copy-0123456789abcdef.partial    a copy in the making (unfinished)

Not here: when they are made, hidden and deleted (store).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from statehold.checkpoint.store.replacing import REPLACED
from statehold.errors import InvariantError

COPY_DIGITS = 16
ATTEMPT = r"(?P<token>[0-9a-f]{8})-(?P<number>[0-9]{1,12})"
_COPY = rf"\.copy-[0-9a-f]{{{COPY_DIGITS}}}"
_NAMED = re.compile(rf"{ATTEMPT}(?:{_COPY})?")
_COMMITTED = re.compile(r"step-([0-9]{12})")
_STANDING = re.compile(rf"{_COMMITTED.pattern}(?:{re.escape(REPLACED)})?")
_ATTEMPTED = re.compile(rf"step-[0-9]{{12}}\.{ATTEMPT}\.partial")
_ENDED = re.compile(r"step-[0-9]{12}\.(?:partial|retired)")


class Attempt(NamedTuple):
    """One try of a job of several ranks to save a step."""

    token: str
    number: int


def step_of(name: str) -> int | None:
    """The step whose directory has this name once it is committed; None for any other name."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def standing_step_of(name: str) -> int | None:
    """The same, where the step may also have been hidden to be replaced."""
    match = _STANDING.fullmatch(name)
    return int(match[1]) if match else None


def is_leftover(name: str) -> bool:
    """Whether a directory of this name is of no use once its job has ended."""
    return _ENDED.fullmatch(name) is not None or attempt_of(name) is not None


def attempt_of(name: str) -> Attempt | None:
    """The attempt that writes this directory; None if no attempt is in its name."""
    match = _ATTEMPTED.fullmatch(name)
    return Attempt(match["token"], int(match["number"])) if match else None


def check_attempt(attempt: str) -> None:
    """Raise InvariantError unless it names an attempt at a save, or at a copy."""
    if _NAMED.fullmatch(attempt) is None:
        raise InvariantError("not a valid name of an attempt to save", facts={"got": repr(attempt)})
