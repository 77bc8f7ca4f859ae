"""How often a step should go to each level: the intervals that waste the least time.

Owns: the best intervals of levels from their costs, and the rates of the failures that need them.
Invariants: costs are in seconds, rates in failures a second of the whole job. Pure.
Not here: the cost of a save (checkpoint/cadence/costs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

# -- intervals -------------------------------------------------------------------------------------
# A level costs `cost_s` each time a step goes there. A failure that needs the level costs, on
# average, half of its interval once more. For one level, Young (1974): the best interval is sqrt(2
# cost mtbf). Daly (2006, equation 37) adds the terms that matter if a save is not short compared
# with the time between failures. For several levels, Benoit, Cavelan, Le Fevre, Robert and Sun
# ("Towards Optimal Multi-Level Checkpointing", IEEE TC 66(7), 2017) have this result. To first
# order each level has its own such interval, from its own cost and the rate of the failures that
# need it. The waste is the sum of sqrt(2 cost rate).
#
# Added here, all of it exact for that sum of convex terms:
# - A level gets only steps of the level before it. If a farther level wants more, the two are
#   joined into one level with the sum of their costs and rates, until the intervals grow with the
#   distance.
# - Intervals are whole steps, and each is a multiple of the one before it.
# - No interval is shorter than the level can sustain (`busy_s`), or longer than a day.
# - A level with a given cadence keeps it, and the intervals of the nearer levels do not exceed it.
#
# Restarts, and the time until a step is committed, cost the same at all intervals. They count in
# the waste, and not in the choice.

INTERVAL_S_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class LevelCost:
    """A level, as far as intervals need it.

    cost_s: the time that training loses with each step. rate: failures a second that need the
        level.
    busy_s: how long a save or copy takes. restart_s: how long a restart from the level takes.
    fixed_s: the interval, if the user gave it.
    """

    cost_s: float
    rate: float
    busy_s: float = 0.0
    restart_s: float = 0.0
    fixed_s: float | None = None


def young_s(cost_s: float, rate: float) -> float:
    """The best interval to first order; infinite without failures."""
    return math.sqrt(2 * cost_s / rate) if rate > 0 else math.inf


def best_s(cost_s: float, rate: float) -> float:
    """The best interval, minus the time of the save itself: Daly's equation 37."""
    if rate <= 0:
        return math.inf if cost_s > 0 else 0.0
    share = cost_s * rate / 2  # of the time between failures
    if share >= 1:
        return 1 / rate
    return young_s(cost_s, rate) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def waste(level: LevelCost, interval_s: float) -> float:
    """The share of the time lost to a level with this interval.

    It is lost to saving, and to repeating the work since the last step at the level.
    """
    return loss(level, interval_s) + level.rate * (level.busy_s + level.restart_s)


def loss(level: LevelCost | _Group, interval_s: float) -> float:
    """The part of the waste that depends on the interval."""
    return level.cost_s / interval_s + level.rate * interval_s / 2


def choose(levels: Sequence[LevelCost], step_s: float) -> list[int]:
    """The interval of each level, in steps of `step_s` seconds."""
    intervals: list[int] = []
    begin = 0
    while begin < len(levels):
        fixed_s = levels[begin].fixed_s
        if fixed_s is not None:
            intervals.append(max(1, round(fixed_s / step_s)))
            begin += 1
            continue
        end = _end_of_run(levels, begin)
        limit_s = next((each.fixed_s for each in levels[end:] if each.fixed_s), INTERVAL_S_MAX)
        for group in _groups(levels[begin:end]):
            below = max(intervals, default=1)
            steps = _steps(group, step_s, below, limit_s)
            intervals += [steps] * group.levels
        begin = end
    return intervals


@dataclass(frozen=True, slots=True)
class _Group:
    """Levels that get the same steps."""

    levels: int
    cost_s: float
    rate: float
    busy_s: float

    @property
    def best_s(self) -> float:
        return max(best_s(self.cost_s, self.rate), self.busy_s)

    def joined(self, other: _Group) -> _Group:
        return _Group(
            self.levels + other.levels,
            self.cost_s + other.cost_s,
            self.rate + other.rate,
            max(self.busy_s, other.busy_s),
        )


def _end_of_run(levels: Sequence[LevelCost], begin: int) -> int:
    """The end of the levels, from `begin` on, whose interval is chosen."""
    found = (i for i in range(begin, len(levels)) if levels[i].fixed_s is not None)
    return next(found, len(levels))


def _groups(levels: Sequence[LevelCost]) -> list[_Group]:
    """Levels joined until the best intervals grow with the distance (pool adjacent violators)."""
    groups: list[_Group] = []
    for level in levels:
        groups.append(_Group(1, level.cost_s, level.rate, level.busy_s))
        while len(groups) > 1 and groups[-1].best_s <= groups[-2].best_s:
            last = groups.pop()
            groups.append(groups.pop().joined(last))
    return groups


def _steps(group: _Group, step_s: float, below: int, limit_s: float) -> int:
    """The best multiple of `below` steps, the interval of the level before it."""
    unit_s = below * step_s
    wanted_s = min(group.best_s, limit_s)
    low = max(1, int(wanted_s / unit_s))
    times = min(low, low + 1, key=lambda n: loss(group, n * unit_s))
    if times * unit_s > limit_s:
        times = low
    return below * max(times, math.ceil(group.busy_s / unit_s))


# -- rates of failure ------------------------------------------------------------------------------
# Published figures behind the defaults: 419 unexpected interruptions in 54 days on 16,384 GPUs,
# eight in a node (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.4). That is one in
# 264 days of a node. Of them 98 were software, dependencies, the network or unknown (table 5: 54 +
# 2 + 35 + 7). They count here as losses of a process. The other 321 (GPUs, hosts and their
# maintenance) count as losses of a node.
#
# Assumed, because there are no published figures:
# - Any job, however small, ends once a day for reasons unrelated to its nodes, such as its own
#   bugs, its memory, or an operator.
# - A cluster is lost once in a year, however many nodes the job has.
# - One of a hundred restarts finds a damaged or missing nearest copy.


DAY_S = 86_400.0
_INTERRUPTIONS, _OF_PROCESSES = 419, 98
_DAYS, _NODES = 54, 16_384 // 8

NODE_MTBF_S = _DAYS * _NODES / _INTERRUPTIONS * DAY_S
JOB_MTBF_S = DAY_S
CLUSTER_MTBF_S = 365 * DAY_S
BAD_COPIES = 0.01


class Loss(IntEnum):
    """The loss that a failure causes.

        PROCESS   the training process: a bug, no memory left, a link that is down; not its host
        NODE      a node, with its memory and its disk
        CLUSTER   all nodes at once, with what they share: a file system, a site

    Each loss includes the ones before it.
    """

    PROCESS = 0
    NODE = 1
    CLUSTER = 2


@dataclass(frozen=True, slots=True)
class FailureRates:
    """Failures a second of a job, by loss."""

    process: float
    node: float
    cluster: float

    def of(self, loss: Loss) -> float:
        return (self.process, self.node, self.cluster)[loss]


def rates_of(nodes: int, node_mtbf_s: float | None = None) -> FailureRates:
    """The rates of a job on so many nodes. node_mtbf_s: the mean time between failures of one
    node."""
    nodes_rate = nodes / (node_mtbf_s or NODE_MTBF_S)
    of_processes = _OF_PROCESSES / _INTERRUPTIONS
    return FailureRates(
        process=1 / JOB_MTBF_S + of_processes * nodes_rate,
        node=(1 - of_processes) * nodes_rate,
        cluster=1 / CLUSTER_MTBF_S,
    )


def rates_by_level(survived: Sequence[Loss], rates: FailureRates) -> list[float]:
    """For each level, nearest first, how often a restart needs it.

    A restart needs a level after failures that it survives and no nearer level survives, and if the
    nearer copies are bad. survived: the worst loss that each level survives. A loss that no level
        survives does not depend on the intervals.
    """
    needed = [0.0] * len(survived)
    for loss in Loss:
        nearest = next((i for i, each in enumerate(survived) if each >= loss), None)
        if nearest is not None:
            needed[nearest] += rates.of(loss)
    return [own + BAD_COPIES * sum(needed[:i]) for i, own in enumerate(needed)]
