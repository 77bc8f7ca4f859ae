"""What a check finds: figures, each with what was expected of it and a verdict.

Invariants: only a value that was found is reached or missed. A value without an expectation is
measured. A check that cannot run here is skipped, one that raised or was stopped has failed; both
say why.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FAILED",
    "MEASURED",
    "MISSED",
    "REACHED",
    "SKIPPED",
    "WAITING",
    "Figure",
    "Value",
    "at_least",
    "at_most",
    "equal",
    "failed",
    "measured",
    "skipped",
    "waiting",
]

REACHED, MISSED, MEASURED = "reached", "missed", "measured"
SKIPPED, FAILED, WAITING = "skipped", "failed", "not run"

Value = float | str


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `value` is None where there is a reason instead."""

    name: str
    value: Value | None
    unit: str
    expected: str
    verdict: str
    reason: str = ""


def measured(name: str, value: Value, unit: str = "") -> Figure:
    return Figure(name, value, unit, "", MEASURED)


def at_most(name: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(name, value, unit, f"at most {limit:g}", _verdict(value <= limit))


def at_least(name: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(name, value, unit, f"at least {limit:g}", _verdict(value >= limit))


def equal(name: str, value: Value, *right: Value) -> Figure:
    """Reached if `value` is one of `right`."""
    return Figure(name, value, "", " or ".join(map(str, right)), _verdict(value in right))


def skipped(name: str, reason: str) -> Figure:
    return Figure(name, None, "", "", SKIPPED, reason)


def failed(name: str, reason: str) -> Figure:
    return Figure(name, None, "", "", FAILED, reason)


def waiting(name: str) -> Figure:
    return Figure(name, None, "", "", WAITING)


def _verdict(is_reached: bool) -> str:
    return REACHED if is_reached else MISSED
