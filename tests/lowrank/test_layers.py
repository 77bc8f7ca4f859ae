"""LowRankLinear: its product, its start, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from statehold.errors import UsageError
from statehold.lowrank import LowRankLinear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_product_is_that_of_the_factors(bias: bool, activation: str | None) -> None:
    torch.manual_seed(0)
    layer = LowRankLinear(12, 20, 5, bias=bias, activation=activation, dtype=torch.float64)
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    middle = x @ layer.a.T
    middle = functional.silu(middle) if activation else middle
    expected = middle @ layer.b.T + (layer.bias if layer.bias is not None else 0)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-14)
    assert [name for name, _ in layer.named_parameters()] == ["a", "b", *["bias"] * bias]
    assert (layer.a.shape, layer.b.shape) == ((5, 12), (20, 5))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_pair_is_compiled_exported_and_scripted_as_a_whole(activation: str | None) -> None:
    layer, x = LowRankLinear(16, 16, 4, bias=True, activation=activation), torch.ones(2, 16)
    programs = [torch.export.export(layer, (x,), strict=each).module() for each in (True, False)]
    made = [torch.compile(layer, fullgraph=True, backend="eager"), torch.jit.script(layer)]
    for each in (*made, torch.jit.trace(layer, (x,)), *programs):
        torch.testing.assert_close(each(x), layer(x))


def test_the_start_is_as_published() -> None:
    torch.manual_seed(0)
    layer = LowRankLinear(512, 1536, 128, bias=True)
    deviation = 128**-0.25 * (512 + 1536) ** -0.25
    for factor in (layer.a, layer.b):
        assert factor.std().item() == pytest.approx(deviation, rel=0.02)
        assert factor.mean().item() == pytest.approx(0, abs=deviation / 50)
    assert layer.bias is not None
    assert not layer.bias.any()


def test_a_truncated_svd_is_the_nearest_pair() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 24, dtype=torch.float64)
    layer = LowRankLinear.from_linear(linear, 6, start="svd")
    assert layer.activation is None
    left, values, right = torch.linalg.svd(linear.weight)
    nearest = left[:, :6] @ values[:6].diag() @ right[:6]
    torch.testing.assert_close((layer.b @ layer.a).detach(), nearest.detach())
    assert layer.bias is not None
    assert torch.equal(layer.bias, linear.bias)
    # Both factors have the same share of the singular values.
    torch.testing.assert_close(layer.a.norm(dim=1), layer.b.norm(dim=0))


def test_a_pair_keeps_dtype_device_and_what_is_frozen() -> None:
    frozen = nn.Linear(16, 16, dtype=torch.bfloat16, device="meta").requires_grad_(False)
    layer = LowRankLinear.from_linear(frozen, 4)
    assert {(each.dtype, each.device.type, each.requires_grad) for each in layer.parameters()} == {
        (torch.bfloat16, "meta", False)
    }
    assert "in_features=16, out_features=16, rank=4, bias=True, activation=silu" in repr(layer)
    assert isinstance(copy.deepcopy(layer), LowRankLinear)


def test_a_bias_that_trains_beside_a_frozen_weight_still_does() -> None:
    linear = nn.Linear(16, 16)
    linear.weight.requires_grad_(False)
    layer = LowRankLinear.from_linear(linear, 4)
    trained = {name for name, each in layer.named_parameters() if each.requires_grad}
    assert trained == {"bias"}


@pytest.mark.parametrize(
    ("sizes", "activation", "why"),
    [
        ((8, 8, 0), "silu", "rank"),
        ((8, 8, 5), "silu", "twice the rank"),
        ((8, 100, 5), "silu", "twice the rank"),
        ((8, 8, 2.0), "silu", "rank"),
        ((8, 8, True), "silu", "rank"),
        ((8, 8, 2), "gelu", "activation"),
    ],
)
def test_sizes_that_are_refused(sizes: tuple[int, int, int], activation: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LowRankLinear(*sizes, activation=activation)
