"""Which optimizers update through the gate, and which memory only their step() changes.

That is asked of tensors that a state has without their optimizer, those of its state_dict().
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch

from statehold.tensors.columns import BATCH
from statehold.tensors.facts import storage_addresses
from statehold.tensors.storable import ORDINARY, is_storable, local_of, storage_of
from statehold.tensors.subclasses import parts_of

_is_quantized, _is_nested = attrgetter("is_quantized"), attrgetter("is_nested")


class Stepping:
    """Which optimizers have stepped. Thread-safe; keeps none of them alive."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a signal handler may save inside
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
            updated = list(parameters_of(optimizer))
            parameters |= storages(updated)
            gradients |= storages(each.grad for each in updated if each.grad is not None)
            state |= storages(_state_tensors(optimizer))
        return cls(frozenset(parameters), frozenset(state - parameters - gradients))


class Owners(NamedTuple):
    """Of a batch of tensors: which are an optimizer's of the state, which are state of one that has
    stepped, and the indices of the other parameters of such a one."""

    gated: list[bool]
    state: list[bool]
    parameters: list[int]


# Of tensors that a mark says it of.
MARKED = Owners([], [], [])


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the storages of those that a step can hold; 0 is no address."""
    given, found = list(tensors), set[int]()
    for begin in range(0, len(given), BATCH):
        found |= _storages(given[begin : begin + BATCH])
    return found - {0}


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    is_usual = ORDINARY.issuperset(map(type, tensors)) and not (
        any(map(_is_quantized, tensors)) or any(map(_is_nested, tensors))
    )
    if is_usual and (addresses := storage_addresses(tensors)) is not None:  # None: sparse
        return set(addresses)
    plain = (part for tensor in tensors for part in parts_of(tensor))
    return {storage_of(local_of(tensor)) for tensor in plain if is_storable(tensor)}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def owned_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that only step() changes: the parameters and the state at its top level."""
    return [*parameters_of(optimizer), *_state_tensors(optimizer)]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors at the top level of the state of each parameter."""
    dicts = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = chain.from_iterable(state.values() for state in dicts)
    return [value for value in values if isinstance(value, torch.Tensor)]
