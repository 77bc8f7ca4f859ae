"""Checks that several settings need."""

from __future__ import annotations

from statehold.errors import UsageError, shown


def check_choice(name: str, got: object, choices: tuple[str, ...]) -> None:
    """Check that `got` is one of `choices`."""
    if got not in choices:
        raise UsageError(f"not a valid {name}", facts={"expected": ", ".join(choices), "got": got})


def check_count(name: str, got: object, most: int) -> None:
    """Check that `got` is None, or a number from 1 to `most`."""
    if got is not None and (type(got) is not int or not 1 <= got <= most):
        raise UsageError(f"{name} must be 1 to {most}", facts={"got": repr(got)})


def check_flag(name: str, got: object) -> None:
    """Check that `got` is True or False."""
    if type(got) is not bool:
        raise UsageError(f"{name} must be True or False", facts={"got": shown(got)})
