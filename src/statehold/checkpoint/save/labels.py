"""What the caller of save() says about a step: metrics and tags, checked.

Invariants: what is accepted here can be written into a manifest, and read back the same. NaN and
infinity are values: a run may well have them. Nothing waits for a device.
Not here: their form in a manifest (format/about), the parent of the run (descent).
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statehold.errors import UsageError, shown
from statehold.format.about import NAMED, NAMES_MAX, About, is_name


def labels(metrics: Mapping[str, float] | None, tags: Sequence[str]) -> About:
    """What a manifest says of these. Raises UsageError."""
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise _refused("metrics must be a dict of names and numbers", metrics, '{"val_loss": 2.1}')
    if isinstance(tags, str) or not isinstance(tags, Sequence):
        raise _refused("tags must be a list of texts", tags, '["before-lr-drop"]')
    _check_names("metrics", metrics)
    _check_names("tags", tags)
    numbers_by_name = {name: _number(name, value) for name, value in metrics.items()}
    return About(metrics=numbers_by_name, tags=tuple(dict.fromkeys(tags)))


def _check_names(what: str, names: Iterable[object]) -> None:
    found = list(names)
    if len(found) > NAMES_MAX:
        facts = {"expected": f"at most {NAMES_MAX}", "got": len(found)}
        raise UsageError(f"a step has too many {what}", facts=facts)
    for name in found:
        if not is_name(name):
            facts = {"expected": f"{NAMED}", "got": shown(name)}
            raise UsageError(f"{what} need names", facts=facts)


def _number(name: str, value: Any) -> float:
    """The number. Tensors are refused, because reading one may wait for its device."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            facts = {"metric": name, "expected": "at most 1.8e308", "got": shown(value)}
            raise UsageError("a metric is too large for a float", facts=facts) from None
    facts = {"metric": name, "expected": "an int or a float", "got": shown(value)}
    hint = "pass value.item(), which waits for the device" if hasattr(value, "item") else None
    raise UsageError("a metric is not a number", facts=facts, hint=hint)


def _refused(summary: str, got: object, example: str) -> UsageError:
    return UsageError(summary, facts={"expected": f"such as {example}", "got": shown(got)})
