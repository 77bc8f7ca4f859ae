"""The list of all checks, in the order in which they run: a run that is cut off has the first ones.

What no reading could settle comes first. Ceilings come next, because ratios need them. Then comes
what missed its target on the last device (results/2026-11-26-h200). What must be right takes
seconds, and was right. Peers are last.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu import ceilings, facts, graphs, memory, order
from bench.gpu.saving import FEW, MANY, restores, saves
from bench.gpu.steps import SLOW_DOWN, steps
from bench.gpu.task import Check
from bench.gpu.unsettled import unsettled

__all__ = ["CHECKS", "Entry"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A check.

    deadline_s: after which its process is stopped. peer: the library that it measures, if that is
    another one. needs: the checks whose figures it divides by.
    """

    run: Check
    deadline_s: float = 60.0
    peer: str = ""
    needs: tuple[str, ...] = ()


SPEED_S = 180.0
CEILINGS = ("transfers", "disk")


CHECKS = {
    "facts": Entry(facts.device_facts),
    "unsettled": Entry(unsettled),
    "transfers": Entry(ceilings.transfers),
    "disk": Entry(ceilings.disk, 90.0),
    "pinning": Entry(ceilings.pinning),
    "save-few": Entry(saves(FEW, "given"), SPEED_S, needs=CEILINGS),
    "steps": Entry(steps("given", "statehold", SLOW_DOWN), SPEED_S),
    "restore": Entry(restores, SPEED_S, needs=CEILINGS),
    "save-many": Entry(saves(MANY, "given"), SPEED_S, needs=CEILINGS),
    "fingerprints": Entry(order.fingerprints_on_a_side_stream),
    "replay": Entry(graphs.replay_while_saving),
    "capture": Entry(graphs.captured_while_saving),
    "two-streams": Entry(order.two_optimizers_on_two_streams),
    "memory": Entry(memory.device_memory),
    "scaler": Entry(order.save_with_a_scaler),
    "dropped": Entry(memory.dropped),
    "contexts": Entry(memory.contexts),
    "save-few-chosen": Entry(saves(FEW, "chosen"), SPEED_S, needs=CEILINGS),
    "save-many-chosen": Entry(saves(MANY, "chosen"), SPEED_S, needs=CEILINGS),
    "dcp-thread": Entry(steps("dcp-thread", "DCP, thread", None), SPEED_S, "dcp-thread"),
    "dcp-process": Entry(steps("dcp-process", "DCP, process", None), SPEED_S, "dcp-process"),
}
