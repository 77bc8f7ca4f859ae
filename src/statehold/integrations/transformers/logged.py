"""The metrics of a step of the Trainer: the numbers that it has logged at this step.

Invariants: whatever a compute_metrics returns, no save fails because of it. What cannot be a metric
is left out.
Not here: which step is the best, which the Trainer decides by its own rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from statehold.format.about import NAMES_MAX, is_name

_FLOAT_BITS = 1024  # greater numbers are not floats


def logged_at(step: int, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers by their names, such as "eval_loss". history: TrainerState.log_history."""
    newest = takewhile(lambda entry: entry.get("step") == step, reversed(history))
    found = {name: value for entry in newest for name, value in entry.items() if name != "step"}
    fitting = [name for name, value in found.items() if is_name(name) and _is_number(value)]
    return {name: float(found[name]) for name in fitting[:NAMES_MAX]}


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and value.bit_length() < _FLOAT_BITS)
