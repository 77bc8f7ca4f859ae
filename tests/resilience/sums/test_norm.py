"""The global norm: near the true one, and the same bits for any number of threads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from statehold.resilience.sums.norm import clip_by_norm, global_norm


def params(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (100_003, 1, 0, 7)]
    for param in found[:-1]:
        param.grad = (torch.randn(param.shape, generator=made) * scale).to(dtype)
    return found


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_it_is_the_norm(scale: float) -> None:
    given = params(scale)
    grads = [each.grad.double() for each in given if each.grad is not None]
    squares = [value * value for grad in grads for value in grad.tolist()]
    assert global_norm(given) == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-12)


def test_threads_and_order_do_not_matter() -> None:
    given = params(dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found |= {global_norm(given), global_norm(given[::-1])}
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_clipping_is_that_of_torch() -> None:
    for max_norm in (0.5, 1e9):
        given, others = params(), params()
        norm = clip_by_norm(given, max_norm)
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(others, max_norm)), rel=1e-5)
        for one, other in zip(given, others, strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_spreads(value: float) -> None:
    given = params()
    assert given[1].grad is not None
    given[1].grad.fill_(value)
    assert not math.isfinite(clip_by_norm(given, 1.0))
    one, other = given[0].grad, given[1].grad
    assert one is not None
    assert other is not None
    assert other.isnan().all()
    assert one.isnan().all() if math.isnan(value) else not one.any()
