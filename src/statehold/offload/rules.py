"""The update rules: torch's fused kernels for the host, on spans of parameters.

Invariants: a rule calls the same kernel as the optimizer of torch with `fused=True`, with the same
arguments. So the bits are equal, because the kernel does not notice where a span is cut.
Not here: where the tensors come from (state), where spans are cut (subgroups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass
class Batch:
    """Spans of one parameter group in one subgroup: float32, element i of each list together.

    steps: how many updates the parameter has had, with this one.
    """

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    fields: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def part(self, wanted: Sequence[int]) -> Batch:
        """Some of the spans."""
        return Batch(
            [self.params[i] for i in wanted],
            [self.grads[i] for i in wanted],
            [self.steps[i] for i in wanted],
            {name: [tensors[i] for i in wanted] for name, tensors in self.fields.items()},
        )


class Rule(Protocol):
    """How a batch is updated, and which fields it keeps."""

    def fields(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names that torch gives to the state of a parameter of this group, without "step"."""

    @property
    def keeps_step(self) -> bool:
        """Whether torch keeps "step" with them."""

    def update(
        self, batch: Batch, group: Mapping[str, Any], grad_scale: torch.Tensor | None
    ) -> None:
        """Update parameters and fields in place. grad_scale: what gradients are divided by."""


class AdamRule:
    """Adam, and AdamW where the group says so."""

    keeps_step = True

    def fields(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        more = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *more)

    def update(
        self, batch: Batch, group: Mapping[str, Any], grad_scale: torch.Tensor | None
    ) -> None:
        beta1, beta2 = group["betas"]
        kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            batch.params,
            batch.grads,
            batch.fields["exp_avg"],
            batch.fields["exp_avg_sq"],
            batch.fields.get("max_exp_avg_sq", []),
            batch.steps,
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=None,
        )


class SgdRule:
    """SGD. The first update of a parameter sets its momentum, instead of changing it."""

    keeps_step = False

    def fields(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self, batch: Batch, group: Mapping[str, Any], grad_scale: torch.Tensor | None
    ) -> None:
        for is_first in (True, False):
            wanted = [i for i, step in enumerate(batch.steps) if (step.item() == 1) is is_first]
            if wanted:
                self._update(batch.part(wanted), group, grad_scale, is_first=is_first)

    def _update(
        self,
        batch: Batch,
        group: Mapping[str, Any],
        grad_scale: torch.Tensor | None,
        *,
        is_first: bool,
    ) -> None:
        torch._fused_sgd_(
            batch.params,
            batch.grads,
            batch.fields.get("momentum_buffer", []),
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=is_first,
            grad_scale=grad_scale,
            found_inf=None,
        )
