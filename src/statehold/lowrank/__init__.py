"""Linear layers as pairs of factors with an activation between.

    y = activation(x a^T) b^T + bias        a: (rank, in)    b: (out, rank)

The narrow product in the middle is the bottleneck: all that a pair moves and keeps is that wide
(CoLA, arXiv 2502.10940).

Invariants: a pair of a layer has its dtype, device and bias, and is as frozen as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from statehold.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LowRankLinear"]

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor] | None] = {
    "silu": functional.silu,
    None: None,
}
Start = Literal["published", "svd"]


class LowRankLinear(nn.Module):
    """A linear layer as a pair of factors.

    Args:
        in_features: of the input.
        out_features: of the output.
        rank: of the pair, at most half of either.
        bias: whether a bias is added.
        activation: "silu", or None for a plain product of two factors.
        device: where the factors are.
        dtype: what they are.

    Raises:
        UsageError: a size makes no sense; the error says which.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = False,
        activation: str | None = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features, out_features, rank)
        if activation not in ACTIVATIONS:
            facts = {"expected": "'silu' or None", "got": shown(activation)}
            raise UsageError("the activation of a pair is not known", facts=facts)
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.activation = activation
        given: dict[str, Any] = {"device": device, "dtype": dtype}
        self.a = nn.Parameter(torch.empty(rank, in_features, **given))
        self.b = nn.Parameter(torch.empty(out_features, rank, **given))
        self.bias: nn.Parameter | None
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, **given)) if bias else None
        )
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rank: int,
        *,
        activation: str | Literal["of the start"] | None = "of the start",
        start: Start = "published",
    ) -> LowRankLinear:
        """A pair in place of `linear`.

        start: "published" draws the factors; "svd" is the nearest product to the weight, without an
        activation unless one is given.
        """
        if activation == "of the start":
            activation = "silu" if start == "published" else None
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, rank, bias=bias is not None,
            activation=activation, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        if start == "svd":
            made._take(weight, bias)
        elif start != "published":
            facts = {"expected": "'published' or 'svd'", "got": shown(start)}
            raise UsageError("the start of a pair is not known", facts=facts)
        made.requires_grad_(weight.requires_grad)
        return made

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors as published: randn * rank**-0.25 * (in + out)**-0.25."""
        deviation = (self.rank * (self.in_features + self.out_features)) ** -0.25
        for factor in (self.a, self.b):
            nn.init.normal_(factor, std=deviation)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def _take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Both factors get the roots of the largest singular values."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
        roots = values[: self.rank].sqrt()
        self.a.copy_(roots[:, None] * right[: self.rank])
        self.b.copy_(left[:, : self.rank] * roots)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.activated(functional.linear(x, self.a)), self.b, self.bias)

    def activated(self, bottleneck: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation]
        return bottleneck if activation is None else activation(bottleneck)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}, activation={self.activation}"
        )


def check_sizes(in_features: int, out_features: int, rank: int, **where: str) -> None:
    """Raises UsageError unless a pair of this rank is smaller than the layer."""
    if type(rank) is not int or rank < 1:
        facts = {**where, "expected": "a whole number from 1 on", "got": shown(rank)}
        raise UsageError("the rank of a pair makes no sense", facts=facts)
    if min(in_features, out_features) < 2 * rank:
        expected = f"in and out of at least twice the rank: {2 * rank}"
        facts = {**where, "expected": expected, "got": f"{in_features} and {out_features}"}
        raise UsageError("a layer is too small for a pair of this rank", facts=facts)
