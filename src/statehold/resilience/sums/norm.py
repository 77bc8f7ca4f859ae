"""The global norm of gradients, with the same bits for any number of replicas and of threads.

Squares become integers, tensor by tensor, and are added as integers: no order matters. torch's own
norms depend on the number of threads, so replicas that were started in different ways could
clip in different ways.

The error: with `largest` the largest magnitude of a tensor with n elements, its sum of squares is
off by at most n * 2**-46 * largest**2, mostly by much less, because the roundings have either sign.
Several ranks hold one replica: each adds its parts of DTensors, and `gather` brings the sums of all
of them. Then the bits are the same for any number of replicas of that many ranks. With other
numbers of ranks in a replica the parts are others, so the last bits may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from statehold.resilience.sums.pieces import slices
from statehold.tensors.storable import is_dtensor, local_of

# The numbers that the ranks of this replica give, in the same order on all of them.
Gather = Callable[[float], Sequence[float]]

_LEAST = -1000  # 2**1000 is a float64
_PIECE_BITS = 16
_SQUARE_BITS = 62 - _PIECE_BITS


def global_norm(params: Iterable[Tensor], gather: Gather = lambda mine: [mine]) -> float:
    """The 2-norm of all gradients together."""
    whole: list[float] = []
    shared: list[float] = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if is_dtensor(grad):
            shared.append(_squares(local_of(grad)) / _holders(grad))
        else:
            whole.append(_squares(grad))
    return math.sqrt(_total([*gather(_total(shared)), *whole]))


@torch.no_grad()
def clip_by_norm(
    params: Iterable[Tensor], max_norm: float, gather: Gather = lambda mine: [mine]
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm."""
    params = list(params)
    norm = global_norm(params, gather)
    weight = max_norm / (norm + 1e-6)
    if not weight >= 1:  # NaN spreads to all gradients, as in torch
        for param in params:
            if param.grad is not None:
                local_of(param.grad).mul_(weight)
    return norm


def _holders(grad: Any) -> int:
    """How many ranks of the replica hold the same part."""
    return math.prod(
        grad.device_mesh.size(dim)
        for dim, placement in enumerate(grad.placements)
        if placement.is_replicate()
    )


def _squares(grad: Tensor) -> float:
    flat = grad.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.numel():
        return 0.0
    largest = torch.stack(torch.aminmax(flat)).double().abs().amax().item()
    if not 0 < largest < math.inf:
        return largest * largest
    exponent = max(math.frexp(largest)[1], _LEAST)
    total = 0
    for part in slices(flat):
        squares = flat[part].double().mul_(math.ldexp(1.0, -exponent)).square_()
        integers = squares.mul_(1 << _SQUARE_BITS).round_().long()
        rows = torch.tensor_split(integers, -(-len(integers) >> _PIECE_BITS))
        total += sum(torch.stack([row.sum() for row in rows]).tolist())
    return _scaled(float(total), 2 * exponent - _SQUARE_BITS)


def _scaled(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf


def _total(numbers: Sequence[float]) -> float:
    """Rounded once, in any order."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
