"""Whether gradients wait for an update: a step does not hold them.

Invariants: reads no memory of tensors, waits for no device, and keeps no gradient alive. A gradient
waits if it is another tensor than the one that the last step() of its optimizer used: zero_grad()
drops that one, and the next backward() makes a new one.
Also here: which parameters need none.
Not seen: gradients before the first step(), and those that are zeroed in place. Gradients of some
optimizers alone do not count: the loss of one model may also reach another, as in a GAN.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from statehold.tensors.storable import ORDINARY, local_of

_PROBED_MAX = 64  # parameters that are looked at until one has a gradient


class _Used(NamedTuple):
    """A parameter, and its gradient that the last step() used.

    impl: what is behind the gradient (`_cdata`). storage: no other one has the same address while
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
        return cls(parameter, gradient._cdata, weak)

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
        self._used: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Used] = (
            weakref.WeakKeyDictionary()
        )

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""
        with self._guard:
            known = self._used.get(optimizer)
        probed = [known.parameter] if known is not None else []
        for parameter in (*probed, *_parameters(optimizer)):
            if (gradient := parameter.grad) is not None:
                with self._guard:
                    self._used[optimizer] = _Used.of(parameter, gradient)
                return

    def are_waiting(self) -> bool:
        """Whether every optimizer has gradients that it has not used."""
        with self._guard:
            used = list(self._used.values())
        return bool(used) and all(each.has_another_gradient for each in used)


def frozen_in(state: object) -> set[int]:
    """The addresses of parameters in the modules of a state that need no gradient."""
    if isinstance(state, torch.nn.Module):
        frozen = (local_of(each) for each in state.parameters() if not each.requires_grad)
        return {each.data_ptr() for each in frozen if type(each) in ORDINARY}
    if isinstance(state, Mapping):
        return set[int]().union(*map(frozen_in, state.values()))
    if isinstance(state, list | tuple):
        return set[int]().union(*map(frozen_in, state))
    return set()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return islice(parameters, _PROBED_MAX)
