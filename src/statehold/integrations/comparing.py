"""The names that an object of a framework has, against those of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from statehold.errors import StateMismatchError


def check_names(where: str, expected: Iterable[str], got: Iterable[Any]) -> None:
    """Raise StateMismatchError unless a step has the same names."""
    here, there = set(expected), set(got)
    if here == there:
        return
    facts = {
        "where": where,
        "only in this process": ", ".join(sorted(here - there)[:5]) or "nothing",
        "only in the step": ", ".join(sorted(there - here)[:5]) or "nothing",
    }
    raise StateMismatchError("the state and the step differ; nothing was changed", facts=facts)
