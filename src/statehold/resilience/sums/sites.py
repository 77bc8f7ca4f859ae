"""The gradient of one parameter as a flat tensor of real numbers in this rank's memory.

Invariants: a flat gradient has its elements in the order in which the parameter lies in memory, so
that it is a view wherever autograd follows the parameter's strides. That order, the number of
elements and their type depend on the parameter only: they are alike on all members.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from statehold.errors import UsageError
from statehold.tensors.storable import boxed, is_dtensor, local_of


class Site:
    """Where one parameter's gradient is taken from and put to."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.name = name
        self.param = param
        local = local_of(param)
        strides = local.stride()
        self._order = sorted(range(local.dim()), key=lambda dim: -strides[dim])
        self._shape = [local.shape[dim] for dim in self._order]
        gradient_dtype: torch.dtype = getattr(param, "grad_dtype", None) or param.dtype
        self._is_complex = gradient_dtype.is_complex
        self.dtype = gradient_dtype.to_real() if self._is_complex else gradient_dtype
        self.device = local.device
        self.numel = local.numel() * (2 if self._is_complex else 1)

    def take(self) -> Tensor | None:
        """The flat gradient, a view of p.grad where its layout allows; None if there is none."""
        grad = self.param.grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise UsageError(
                "a gradient is sparse; the replicas sum dense gradients only",
                facts={"parameter": self.name, "layout": grad.layout},
            )
        with torch.no_grad():
            flat = local_of(self._placed(grad)).detach().permute(self._order).reshape(-1)
            return torch.view_as_real(flat).reshape(-1) if self._is_complex else flat

    def _placed(self, grad: Any) -> Any:
        """The gradient, split over the ranks of the replica as the parameter is."""
        if not is_dtensor(grad) or grad.placements == self._box.placements:
            return grad
        return grad.redistribute(placements=self._box.placements)

    def give(self, flat: Tensor | None) -> None:
        """Make a flat gradient p.grad. It is not copied."""
        if flat is None:
            self.param.grad = None
            return
        if self._is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        inverse = [self._order.index(dim) for dim in range(len(self._order))]
        local = flat.view(self._shape).permute(inverse)
        self.param.grad = boxed(local, self._box) if is_dtensor(self.param) else local

    def put(self, flat: Tensor) -> None:
        """Copy a flat gradient into p.grad, whose memory is used again if its layout allows."""
        own = self.take()
        if own is not None and self._is_view(own):
            own.copy_(flat)
        else:
            self.give(flat.clone())

    def _is_view(self, flat: Tensor) -> bool:
        grad = self.param.grad
        return grad is not None and local_of(grad).data_ptr() == flat.data_ptr()

    @property
    def _box(self) -> Any:
        return self.param


def sites_of(params: Iterable[tuple[str, Tensor]]) -> list[Site]:
    """The sites of named parameters, each parameter once."""
    found: dict[int, Site] = {}
    for name, param in params:
        found.setdefault(id(param), Site(name, param))
    return list(found.values())
