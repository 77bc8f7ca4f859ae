"""Position: which step the live state is the beginning of (R15). An entry of the state.

    position.committed(step)   the members have committed it, and its update is due
    position.advance(step)     the loop has come to the end of its body
    position.go_back()         the loop was left: the step, without what is not in the weights

Between the commit of a step and the end of the loop's body, the state may be saved by hand, or the
body may be left by an exception. Then the update says what the state is: before it, that of the
step's beginning; after it, that of the next one. An optimizer says so by its hooks, because a fused
one changes parameters without moving a version counter. Where another than the state's updates,
version counters say so.

Invariants: `step` and the sums that it has with it fit the weights whenever somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from statehold.errors import StateMismatchError
from statehold.resilience.data.course import Course
from statehold.resilience.sums.interface import Sum
from statehold.tensors.storable import local_of


class Position:
    """params: what updates change. updating: where the optimizers are."""

    def __init__(
        self, course: Course, sums: Sum, params: Sequence[Tensor], updating: Iterable[object]
    ) -> None:
        self._course = course
        self._sums = sums
        self._params = params
        self._step = 0
        self._state = sums.state_dict()  # of the sums, at the beginning of the step
        self._next: int | None = None
        self._versions = 0
        self._is_updating = self._has_failed = False
        self._hooks = [
            hook
            for each in updating
            if isinstance(each, torch.optim.Optimizer)
            and hasattr(each, "_optimizer_step_pre_hooks")
            for hook in (
                each.register_step_pre_hook(self._before),
                each.register_step_post_hook(self._after),
            )
        ]

    @property
    def step(self) -> int:
        if self._next is not None and self._moved() != self._versions:
            self.advance(self._next)
        return self._step

    @property
    def is_torn(self) -> bool:
        """Whether an update was left in its middle. Another try would add to what it has done."""
        return self._is_updating or self._has_failed

    def committed(self, step: int) -> None:
        self._next, self._versions = step + 1, self._moved()

    def advance(self, step: int) -> None:
        self._step, self._next, self._state = step, None, self._sums.state_dict()

    def go_back(self) -> None:
        _ = self.step  # it may be found to have advanced
        self._next = None
        self._sums.load_state_dict(self._state)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _moved(self) -> int:
        return sum(local_of(each)._version for each in self._params)

    def _before(self, *_: object) -> None:
        self._has_failed |= self._is_updating
        self._is_updating = True

    def _after(self, *_: object) -> None:
        self._is_updating = False
        if self._next is not None:
            self.advance(self._next)

    def _facts(self) -> dict[str, int]:
        course = self._course
        return {
            "samples": course.size,
            "batch": course.batch,
            "microbatches": course.microbatches,
            "seed": course.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        step = self.step  # first: it may be found to have advanced
        return {"step": step, "course": self._facts(), "sums": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self._facts().items():
            if state["course"].get(name) != value:
                raise StateMismatchError(
                    f"the saved run has another number of {name}"
                    if name != "seed"
                    else "the saved run has another seed",
                    facts={"expected": state["course"].get(name), "got": value},
                    hint="the order of the samples would change: go on with the saved numbers",
                )
        self._sums.load_state_dict(state["sums"])
        self.advance(int(state["step"]))
        self._is_updating = self._has_failed = False
