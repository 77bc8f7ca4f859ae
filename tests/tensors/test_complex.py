"""complex128, which safetensors cannot name: stored as pairs of float64, restored as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open

import statehold
from statehold.errors import StateMismatchError
from support.faults import SMALL
from support.matching import MemoryStep, captured, eager

SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (0, 2)]


def number(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("live", [True, False])
def test_tensors_and_arrays(shape: tuple[int, ...], live: bool) -> None:
    tensor, array = number(*shape), number(*shape).numpy()
    step = MemoryStep({"t": tensor, "a": array})
    found: dict[str, Any] = {"t": number(*shape) if live else None, "a": None}
    place = found["t"]
    step.restore(found)
    assert not live or found["t"] is place
    assert found["t"].dtype is torch.complex128
    assert torch.equal(found["t"], tensor)
    assert (found["a"].dtype, found["a"].shape) == (numpy.complex128, shape)
    assert numpy.array_equal(found["a"], array)


VIEWS = {
    "transposed": lambda t: t.T,
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: t.conj().imag.to(torch.complex128),
    "strided": lambda t: t[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view: Any) -> None:
    saved, live = view(number(4, 6)), view(number(4, 6))
    MemoryStep({"t": saved}).restore({"t": live})
    assert torch.equal(live.resolve_conj(), saved.resolve_conj())


def test_parameters_and_their_optimizer_are_lazy() -> None:
    module = torch.nn.Linear(3, 2, dtype=torch.complex128)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    assert not eager({"m": module, "o": optimizer})
    other = torch.nn.Linear(3, 2, dtype=torch.complex128)
    fresh = torch.optim.SGD(other.parameters(), 9.0, momentum=0.9)
    MemoryStep({"m": module, "o": optimizer}).restore({"m": other, "o": fresh})
    assert torch.equal(module.weight, other.weight)
    expected = optimizer.state[module.weight]["momentum_buffer"]
    assert torch.equal(fresh.state[other.weight]["momentum_buffer"], expected)


def test_changes_are_noticed_and_ties_kept() -> None:
    tensor = number(3)
    found = statehold.tensors.kinds.capture({"a": statehold.Gated(tensor), "b": tensor})
    assert [each.spec.name for each in found.tensors] == ["a"]
    assert found.tensors[0].address == tensor.data_ptr()
    tensor.add_(1)
    assert found.moved(eager=True) == "a"


def test_real_and_complex_do_not_fit() -> None:
    one, other = number(2), torch.ones(2, 2, dtype=torch.float64)
    for saved, live in ((one, other), (other, one)):
        with pytest.raises(StateMismatchError) as caught:
            MemoryStep({"t": saved}).prepare({"t": live})
        assert list(caught.value.facts) == ["t"]


def test_a_stock_reader_sees_pairs(tmp_path: Path) -> None:
    tensor = number(2, 3)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, {"t": tensor}).wait("committed")
    (file,) = (tmp_path / "run").glob("step-*/*.safetensors")
    with safe_open(file, "pt") as stock:
        assert torch.equal(torch.view_as_complex(stock.get_tensor("t")), tensor)
    found = {"t": None}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        got = ckpt.restore(found)
    assert got == 1
    assert torch.equal(found["t"], tensor)
    assert captured(found)["t"].spec.shape == (2, 3, 2)
