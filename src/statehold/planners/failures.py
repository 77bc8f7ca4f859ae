"""How often training fails, by the loss, and which level of a run a restart then needs.

    PROCESS   the training process: a bug, no memory left, a link that is down; its host is not lost
    NODE      a node, with its memory and its disk
    CLUSTER   all nodes at once, with what they share: a file system, a site

Published figures behind the defaults:
- nodes: 419 unexpected interruptions in 54 days on 16,384 GPUs, eight in a node (Llama Team, "The
  Llama 3 Herd of Models", 2024, section 3.3.4): one in 264 days of a node. Of them 98 were
  software, dependencies, the network or unknown (table 5: 54 + 2 + 35 + 7). They count here as
  losses of a process. The other 321 (GPUs, hosts and their maintenance) count as losses of a node.

Assumed, because there are no published figures:
- any job, however small, ends once a day for reasons unrelated to its nodes, such as its own bugs,
  its memory, or an operator;
- a cluster is lost once in a year, however many nodes the job has;
- one of a hundred restarts finds a damaged or missing nearest copy.

Invariants: rates are in failures a second, of the whole job. Pure.
Not here: the intervals that follow (intervals), the kinds of levels (levels/specs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

DAY_S = 86_400.0
_INTERRUPTIONS, _OF_PROCESSES = 419, 98
_DAYS, _NODES = 54, 16_384 // 8

NODE_MTBF_S = _DAYS * _NODES / _INTERRUPTIONS * DAY_S
JOB_MTBF_S = DAY_S
CLUSTER_MTBF_S = 365 * DAY_S
BAD_COPIES = 0.01


class Loss(IntEnum):
    """The loss that a failure causes; each loss includes the ones before it."""

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
