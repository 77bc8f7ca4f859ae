"""Whether gradients wait for an update: a step does not hold them.

Invariants: reads no memory of tensors, waits for no device, and keeps no gradient alive. A gradient
waits if it is another tensor than the one that the last step() of its optimizer used: zero_grad()
drops that one, and the next backward() makes a new one.
Also here: which parameters need none.
Not seen: gradients before the first step(), and those that are zeroed in place. Gradients of some
optimizers alone do not count: the loss of one model may also reach another, as in a GAN.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from statehold.tensors.storable import ORDINARY, local_of

_PROBED_MAX = 64  # parameters that are looked at until one has a gradient


class _Used(NamedTuple):
    """A parameter, and its gradient that the last step() used."""

    parameter: torch.Tensor
    gradient: TensorWeakRef


class Gradients:
    """What each optimizer has used. For the thread that trains."""

    def __init__(self) -> None:
        self._used: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Used] = (
            weakref.WeakKeyDictionary()
        )

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""
        known = self._used.get(optimizer)
        probed = [known.parameter] if known is not None else []
        for parameter in (*probed, *_parameters(optimizer)):
            if (gradient := parameter.grad) is not None:
                self._used[optimizer] = _Used(parameter, TensorWeakRef(gradient))
                return

    def are_waiting(self) -> bool:
        """Whether every optimizer has gradients that it has not used."""
        used = list(self._used.values())
        return bool(used) and all(
            each.parameter.grad is not None and each.parameter.grad is not each.gradient()
            for each in used
        )


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
