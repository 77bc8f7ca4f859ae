"""Position: which step the live state is the beginning of (R15). An entry of the state.

    position.committed(step)   the members have committed it, and its update is due
    position.ended(step)       the loop has come to the end of its body
    position.go_back()         the loop was left: the step, without what is not in the weights

Between the commit of a step and the end of the loop's body, the state may be saved by hand, or the
body may be left by an exception. Then the update says what the state is: before it, that of the
step's beginning; after it, that of the next one. An optimizer says so by its hooks, because a fused
one changes parameters without moving a version counter. Where another than the state's updates,
version counters say so.

A body may update more: a second optimizer, a scheduler, averaged weights. Which of them each body
has updated so far is its habit. A body that is left when it has updated some of them, and not all
of its habit, leaves parts of two steps. A body without an update of an optimizer has no say in it:
a GradScaler has skipped it.

Invariants: `step` and the sums that it has with it fit the weights whenever somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from statehold.errors import StateMismatchError
from statehold.resilience.data.course import Course
from statehold.resilience.sums.interface import Sum
from statehold.tensors.kinds import parts
from statehold.tensors.storable import local_of, version_of


class Position:
    """params: what updates change. state: what a body may update."""

    def __init__(
        self, course: Course, sums: Sum, params: Sequence[Tensor], state: Mapping[str, Any]
    ) -> None:
        self._course = course
        self._sums = sums
        self._params = params
        self._step = 0
        self._state = sums.state_dict()  # of the sums, at the beginning of the step
        self._next: int | None = None
        self._versions = 0
        self._updating: set[int] = set()  # the optimizers whose step() is under way, or has raised
        self._has_failed = self._is_mixed = False
        updating = {id(each): each for _, each in parts(state)}
        optimizers = [each for each in updating.values() if _has_hooks(each)]
        self._updates: Counter[int] = Counter()
        self._counts: list[Callable[[], Any]] = [
            partial(self._updates.__getitem__, id(each)) for each in optimizers
        ]
        self._optimizers = set(range(len(self._counts)))
        self._counts += filter(None, map(_count_of, updating.values()))
        self._before_body: list[Any] | None = None
        self._habit: set[int] | None = None
        self._hooks = [each.register_step_pre_hook(self._before) for each in optimizers]
        self._hooks += [each.register_step_post_hook(self._after) for each in optimizers]

    @property
    def step(self) -> int:
        if self._next is not None and _versions_of(self._params) != self._versions:
            self.advance(self._next)
        return self._step

    @property
    def is_torn(self) -> bool:
        """Whether updates or a restore were left in their middle.

        Another try of an update would add to what was done.
        """
        return bool(self._updating) or self._has_failed or self._is_mixed

    def committed(self, step: int) -> None:
        self._next, self._versions = step + 1, _versions_of(self._params)
        self._before_body = self._counted()

    def ended(self, step: int) -> None:
        updated = self._updated()
        if updated & self._optimizers:
            self._habit = updated if self._habit is None else self._habit & updated
        self._before_body = None
        self.advance(step)

    def advance(self, step: int) -> None:
        self._step, self._next, self._state = step, None, self._sums.state_dict()

    def go_back(self) -> None:
        _ = self.step  # it may be found to have advanced
        updated = self._updated()
        self._is_mixed |= bool(updated) and not updated >= (self._habit or set())
        self._next = self._before_body = None
        self._sums.load_state_dict(self._state)

    def tear(self) -> None:
        """A restore was cut off: some of the state is that of another step."""
        self._has_failed = True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _counted(self) -> list[Any]:
        return [count() for count in self._counts]

    def _updated(self) -> set[int]:
        """What the body has updated so far, since the commit of its step."""
        if self._before_body is None:
            return set()
        pairs = zip(self._before_body, self._counted(), strict=True)
        return {index for index, (before, now) in enumerate(pairs) if before != now}

    def _before(self, optimizer: object, *_: object) -> None:
        self._has_failed |= id(optimizer) in self._updating
        self._updating.add(id(optimizer))

    def _after(self, optimizer: object, *_: object) -> None:
        self._updating.discard(id(optimizer))
        self._updates[id(optimizer)] += 1
        if self._next is not None and not self._updating:  # or one that steps inside another
            self.advance(self._next)

    def state_dict(self) -> dict[str, Any]:
        step = self.step  # first: it may be found to have advanced
        return {"step": step, "course": self._course.facts, "sums": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self._course.facts.items():
            if state["course"].get(name) != value:
                what = name if name == "seed" else f"number of {name}"
                raise StateMismatchError(
                    f"the saved run has another {what}",
                    facts={"expected": state["course"].get(name), "got": value},
                    hint="the order of the samples would change: go on with the saved numbers",
                )
        self._sums.load_state_dict(state["sums"])
        self.advance(int(state["step"]))
        self._updating.clear()
        self._has_failed = self._is_mixed = False
        self._before_body = None


def _has_hooks(each: object) -> bool:
    return isinstance(each, torch.optim.Optimizer) and hasattr(each, "_optimizer_step_pre_hooks")


def _count_of(each: object) -> Callable[[], Any] | None:
    """What has another value after each update of a scheduler or a module."""
    if isinstance(each, LRScheduler):
        return partial(_epochs, each)
    if isinstance(each, nn.Module):
        return lambda: _versions_of(chain(each.parameters(), each.buffers()))
    return None


def _versions_of(tensors: Iterable[Tensor]) -> int:
    return sum(version_of(local_of(each)) for each in tensors)


def _epochs(scheduler: Any) -> Any:
    """How far a scheduler is, and those that it has: ChainedScheduler does not count itself."""
    chained = list(map(_epochs, getattr(scheduler, "_schedulers", ())))
    return getattr(scheduler, "last_epoch", None), chained
