"""What the steps of optimizers tell: which update through the gate, which memory only they change.

They also tell whether gradients wait for an update. A step does not hold gradients.

Owns: the memory of tensors that a state has without their optimizer, those of its state_dict().
Invariants: reads no memory of tensors, waits for no device, and keeps no gradient alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from statehold.tensors.columns import BATCH, storage_addresses
from statehold.tensors.composed import parts_of
from statehold.tensors.storable import ORDINARY, impl_of, is_storable, local_of, storage_of

_is_quantized, _is_nested = attrgetter("is_quantized"), attrgetter("is_nested")


class Stepping:
    """Which optimizers have stepped. Thread-safe; keeps none of them alive."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a signal handler may save inside
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def saw(self, optimizer: Optimizer) -> None:
        """`optimizer` is about to step."""
        with self._guard:
            self._seen.add(optimizer)

    def take(self) -> list[Optimizer]:
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
    def of(cls, stepping: Iterable[Optimizer]) -> Storages:
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


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def may_make(
    optimizer: Optimizer, parameter: torch.Tensor, shapes: Collection[tuple[int, ...]]
) -> bool:
    """Whether step() may keep tensors of these shapes for a parameter.

    Those of torch keep tensors of its shape, factors of them (Adafactor), or one row of all
    parameters (LBFGS). Of others nothing is known.
    """
    way, own = type(optimizer).step.__module__, tuple(parameter.shape)
    if way == "torch.optim.lbfgs":
        own = (sum(each.numel() * (1 + each.is_complex()) for each in parameters_of(optimizer)),)
    if own in shapes or not way.startswith("torch.optim."):
        return True
    with suppress(RuntimeError):  # they are no factors: somebody keeps something else there
        return torch.broadcast_shapes(*shapes) in (own, ())  # type: ignore[no-untyped-call]
    return True


def owned_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that only step() changes: the parameters and the state at its top level."""
    return [*parameters_of(optimizer), *_state_tensors(optimizer)]


def _state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors at the top level of the state of each parameter."""
    dicts = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = chain.from_iterable(state.values() for state in dicts)
    return [value for value in values if isinstance(value, torch.Tensor)]


# -- gradients -------------------------------------------------------------------------------------
# A gradient waits if it is another tensor than the one that the last step() of its optimizer used:
# zero_grad() drops that one, and the next backward() makes a new one. Gradients before the first
# step() are not seen, and neither are those that are zeroed in place. Gradients of some optimizers
# alone do not count: the loss of one model may also reach another, as in a GAN.


_PROBED_MAX = 64  # parameters that are looked at until one has a gradient


class _Used(NamedTuple):
    """A parameter, and its gradient that the last step() used.

    impl: what is behind the gradient (impl_of). storage: no other one has the same address while
    this refers to it. None if the gradient has none. A weak reference to the tensor itself would
    keep torch.utils.swap_tensors from exchanging it.
    """

    parameter: torch.Tensor
    impl: int
    storage: StorageWeakRef | None

    @classmethod
    def of(cls, parameter: torch.Tensor, gradient: torch.Tensor) -> _Used:
        local = local_of(gradient)
        storage = local.untyped_storage() if local.layout is torch.strided else None
        weak = None if storage is None else StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return cls(parameter, impl_of(gradient), weak)

    @property
    def has_another_gradient(self) -> bool:
        gradient = self.parameter.grad
        return gradient is not None and _Used.of(self.parameter, gradient)._key != self._key

    @property
    def _key(self) -> tuple[int, int]:
        return self.impl, 0 if self.storage is None else self.storage.cdata


class Gradients:
    """What each optimizer has used. Thread-safe: optimizers of other models step beside a save."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a signal handler may save inside
        self._used: weakref.WeakKeyDictionary[Optimizer, _Used] = weakref.WeakKeyDictionary()

    def saw(self, optimizer: Optimizer) -> None:
        """`optimizer` is about to step."""
        with self._guard:
            known = self._used.get(optimizer)
        probed = [known.parameter] if known is not None else []
        for parameter in (*probed, *islice(parameters_of(optimizer), _PROBED_MAX)):
            if (gradient := parameter.grad) is not None:
                with self._guard:
                    self._used[optimizer] = _Used.of(parameter, gradient)
                return

    def are_waiting(self) -> bool:
        """Whether every optimizer has gradients that it has not used."""
        with self._guard:
            used = list(self._used.values())
        return bool(used) and all(each.has_another_gradient for each in used)
