"""Which optimizers update through the gate, and which memory only their step() changes.

That is asked of tensors that a state has without their optimizer, those of its state_dict().
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from statehold.tensors import optimizers
from statehold.tensors.storable import is_storable, local_of, storage_of
from statehold.tensors.subclasses import parts_of


class Stepping:
    """Which optimizers have stepped. Thread-safe; keeps none of them alive."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""
        with self._guard:
            self._seen.add(optimizer)

    def take(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped since the last call."""
        with self._guard:
            seen = list(self._seen)
            self._seen.clear()
        return seen


@dataclass(frozen=True, slots=True)
class Storages:
    """The addresses of the storages of optimizers.

    parameters: what the optimizers update. state: what they keep for that, at the top level, where
    it has memory of its own: only their step() changes it. An optimizer may keep a parameter or a
    gradient itself (`state["previous"] = p.grad`); others change those.
    """

    parameters: frozenset[int]
    state: frozenset[int]

    @classmethod
    def of(cls, stepping: Iterable[torch.optim.Optimizer]) -> Storages:
        parameters, gradients, state = set[int](), set[int](), set[int]()
        for optimizer in stepping:
            updated = [each for group in optimizer.param_groups for each in group["params"]]
            parameters |= storages(updated)
            gradients |= storages(each.grad for each in updated if each.grad is not None)
            state |= storages(optimizers.state_tensors(optimizer))
        return cls(frozenset(parameters), frozenset(state - parameters - gradients))


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the storages of those that a step can hold; 0 is no address."""
    plain = (part for tensor in tensors for part in parts_of(tensor))
    return {storage_of(local_of(tensor)) for tensor in plain if is_storable(tensor)} - {0}
