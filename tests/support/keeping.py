"""A second reading of the rules of Keep, one step at a time, for tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from statehold import Keep


@dataclass
class Said:
    """What a step says of itself."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


def expected(keep: Keep, run: Mapping[int, Said | None]) -> set[int]:
    """The steps that stay. run: what each step says; None: it cannot be read."""
    steps, found = sorted(run), set()
    asks = bool(keep.best) or "good" in keep.pinned
    for step in steps:
        said = run[step]
        newer = [each for each in steps if each > step]
        is_first = bool(keep.every) and step >= (keep.every or 0)
        for other in steps:
            is_first &= other >= step or other // (keep.every or 1) != step // (keep.every or 1)
        is_unknown = said is None and asks
        is_tagged = said is not None and "good" in said.tags and "good" in keep.pinned
        is_named = len(newer) < keep.last or is_first or step in keep.pinned or is_tagged
        if is_named or is_unknown or _is_best(keep, run, step):
            found.add(step)
    return found


def _is_best(keep: Keep, run: Mapping[int, Said | None], step: int) -> bool:
    said = run[step]
    if said is None or not math.isfinite(said.metrics.get("loss", math.nan)):
        return False
    return len(_better(keep, run, step)) < keep.best


def _better(keep: Keep, run: Mapping[int, Said | None], step: int) -> list[int]:
    sign = -1 if keep.mode == "max" else 1

    def rank(each: int) -> tuple[float, int]:
        said = run[each]
        value = said.metrics.get("loss", math.nan) if said else math.nan
        return (sign * value if math.isfinite(value) else math.inf), each

    return [each for each in run if rank(each) < rank(step)]
