"""What a save holds: a function of rank, step and serial, different in every element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from powerloss.plans import Plan
from statehold import Checkpointer, Gated

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank has restored. restored: the step, as restore() says; step, serial: of which save
    it is, as it says itself; wrong: what in it is not of that save."""

    restored: int | None
    step: int | None
    serial: int | None
    wrong: list[str]


def content(plan: Plan, rank: int, step: int, serial: int) -> State:
    """What `rank` saves: "same" on all ranks alike, "own" on none."""
    base = step * 1009 + serial * 100_003
    state: State = {"rank": rank, "step": step, "serial": serial}
    for index, numel in enumerate(plan.numels):
        of_rank = base + index * 13
        name = f"same.{index}"
        if plan.ranks > 1 and index % 2 == 0:
            of_rank, name = of_rank + 7 * (rank + 1), f"own.{index}"
        state[name] = torch.arange(numel, dtype=torch.int32) * 31 + of_rank
    return state | (_rarely(serial) if plan.shares else {})


def _rarely(serial: int) -> State:
    """What changes with every sixth save, in parts that are large enough to be shared."""
    begin = serial // 6 * 1013
    return {
        f"{kind}.{index}": torch.arange(9000, dtype=torch.int32) * 7 + begin + index
        for kind in ("frozen", "loose")
        for index in range(4)
    }


def handed_over(state: State) -> State:
    """A state as it is saved: what is frozen changes only through the gate, so it is compared in
    place. The rest is copied before save() returns."""
    return {
        name: Gated(value) if name.startswith("frozen.") else value for name, value in state.items()
    }


def blank(plan: Plan) -> State:
    """A state into which a save is restored: nothing in it is of any save."""
    return {
        name: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else None
        for name, value in content(plan, 0, 0, 0).items()
    }


def differences(plan: Plan, rank: int, found: State) -> list[str]:
    """What in a restored state is not what `rank` had saved with its step and serial."""
    if not all(isinstance(found[name], int) for name in ("step", "serial")):
        return [f"step {found['step']!r}, serial {found['serial']!r}"]
    expected = content(plan, rank, found["step"], found["serial"])
    return [
        f"{name} is not that of step {found['step']}, serial {found['serial']}"
        for name, value in expected.items()
        if not (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        )
    ]


class Contents:
    """What the ranks of a job save and restore: contents as above."""

    def __init__(self, plan: Plan, ckpts: Sequence[Checkpointer]) -> None:
        self._plan, self._ckpts = plan, ckpts

    def state(self, rank: int, step: int, serial: int) -> State:
        return handed_over(content(self._plan, rank, step, serial))

    def restore(self, rank: int, step: int | None) -> Found:
        state = blank(self._plan)
        restored = self._ckpts[rank].restore(state, step)
        return Found(restored, state["step"], state["serial"], differences(self._plan, rank, state))

    def close(self) -> None:
        """There is nothing to close."""
