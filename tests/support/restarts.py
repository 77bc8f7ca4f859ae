"""What restarts from checkpoints cost: closed forms beside those of intervals.

mu is the mean time between failures of the job. C is the time of a save. After a failure the job is
down for D, and reads the checkpoint for R. T is the period from one save to the next, with the save
in it.

    first_order_s   Daly (2006): T = sqrt(2 (mu + D + R) C) + C
    expected_s      (mu + D) e^(R/mu) (e^(T/mu) - 1) work / (T - C): exact for exponential failures
                    (Aupy, Robert, Vivien, Zaidouni, "Checkpointing algorithms and fault
                    prediction", 2013, section 2)
    exact_s         the T that minimizes it: C + mu (1 + W(-e^(-1 - C/mu))); D and R do not matter
    waste           C/T + (1 - C/T) (D + R + T/2) / mu, to first order (the same paper)
    multilevel_waste  sum of sqrt(2 rate C) over levels (Benoit et al., IEEE TC 66(7), 2017)

Young's interval and Daly's equation 37 are in intervals, without the time of the save.

Invariants: times are in seconds, rates in failures a second. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from statehold.errors import UsageError
from statehold.planners.intervals import LevelCost, young_s


def first_order_s(save_s: float, mtbf_s: float, down_s: float = 0.0, read_s: float = 0.0) -> float:
    """Daly's first order, with the save. Its error grows with save_s / mtbf_s."""
    return young_s(save_s, 1 / (mtbf_s + down_s + read_s)) + save_s


def exact_s(save_s: float, mtbf_s: float) -> float:
    """The period that minimizes `expected_s`, by bisection to 1e-12 of it."""
    # x is the work of a period over mtbf_s: (1 - x) e^x falls from 1 to 0, and meets e^(-C/mu).
    target = math.exp(-save_s / mtbf_s)
    low, high = 0.0, 1.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - middle) * math.exp(middle) > target else (low, middle)
    return save_s + mtbf_s * high


def expected_s(
    work_s: float, period_s: float, save_s: float, mtbf_s: float, down_s: float, read_s: float
) -> float:
    """The mean time of `work_s` with exponential failures, which may also hit saves and reads."""
    if period_s <= save_s:
        facts = {"expected": f"more than {save_s:g} s, a save", "got": f"{period_s:g} s"}
        raise UsageError("a period has no time for work", facts=facts)
    attempts = (mtbf_s + down_s) * math.exp(read_s / mtbf_s) * math.expm1(period_s / mtbf_s)
    return attempts * work_s / (period_s - save_s)


def waste(
    period_s: float, save_s: float, mtbf_s: float, down_s: float = 0.0, read_s: float = 0.0
) -> float:
    """The share of the time that is lost, to first order in period_s / mtbf_s."""
    saving = save_s / period_s
    return saving + (1 - saving) * (down_s + read_s + period_s / 2) / mtbf_s


def multilevel_waste(levels: Sequence[LevelCost]) -> float:
    """The share that levels lose with the best pattern, to first order. Restarts are not in it."""
    return sum(math.sqrt(2 * each.rate * each.cost_s) for each in levels)
