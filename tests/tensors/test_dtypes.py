"""Every dtype that both torch and safetensors have, in every shape of memory, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import statehold
from statehold.errors import StateMismatchError, UnsupportedValueError
from statehold.tensors import dtypes
from support.faults import DEADLINE_S, SMALL
from support.matching import MemoryStep, captured

HELD = sorted(dtypes._CODE_OF_DTYPE, key=str)
ALL = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with as many different bit patterns as fit."""
    whole = torch.empty(shape, dtype=dtype)
    count = whole.numel() * whole.element_size()
    values = torch.arange(count) % (2 if dtype is torch.bool else 251)
    return values.to(torch.uint8).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> list[int]:
    # Nothing is copied: before torch 2.10 packed numbers of four bits cannot be.
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def through_disk(directory: Path, saved: Any, live: Any) -> None:
    with statehold.Checkpointer(directory / "run", **SMALL) as ckpt:
        ckpt.save(1, {"t": saved}).wait("committed", DEADLINE_S)
        ckpt.restore({"t": live})


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (0, 3), (5,), (3, 4), (2, 1, 3)]
    shapes = shapes if dtype is not dtypes._PACKED else shapes[1:]
    saved = [filled(dtype, *shape) for shape in shapes]
    live = [torch.zeros_like(tensor.view(torch.uint8)).view(dtype) if tensor.dim() else
            torch.zeros((), dtype=dtype) for tensor in saved]  # fmt: skip
    places = [tensor.data_ptr() for tensor in live]
    through_disk(tmp_path, saved, live)
    assert [tensor.data_ptr() for tensor in live] == places
    for got, expected in zip(live, saved, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert raw(got) == raw(expected)


@pytest.mark.parametrize("dtype", [each for each in ALL if each not in HELD], ids=str)
def test_every_other_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        dtypes.code_of(dtype, "a.b")
    assert caught.value.facts == {"path": "a.b", "dtype": str(dtype).removeprefix("torch.")}
    assert caught.value.hint


@pytest.mark.parametrize("dtype", [torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_refused_dtypes_name_the_path(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        captured({"a": [{"b": torch.zeros(2, dtype=dtype)}]})
    assert caught.value.facts["path"] == "a.0.b"


def test_packed_shapes_count_values() -> None:
    packed = torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert captured({"t": packed})["t"].spec.shape == (3, 8)
    with pytest.raises(UnsupportedValueError):
        captured({"t": packed[0, 0]})


VIEWS = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[1:4, 2:7:2],
    "column": lambda t: t[:, 3],
    "offset": lambda t: t[2:],
    "permuted": lambda t: t.reshape(4, 3, 4).permute(2, 0, 1),
    "channels last": lambda t: t.reshape(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "scalar": lambda t: t[2, 5],
    "unfolded": lambda t: t.view(-1)[:40].unfold(0, 8, 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_saved_and_filled_through_their_strides(tmp_path: Path, name: str) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    around = torch.full((6, 8), -1.0)
    saved, live = VIEWS[name](base), VIEWS[name](around)
    before = live.data_ptr(), live.stride()
    through_disk(tmp_path, saved, live)
    assert (live.data_ptr(), live.stride()) == before
    assert torch.equal(live, saved)
    if live.untyped_storage().data_ptr() == around.untyped_storage().data_ptr():
        outside = torch.ones(6, 8, dtype=torch.bool)
        VIEWS[name](outside).fill_(False)
        assert bool((around[outside] == -1).all()), "bytes outside the view were touched"


def test_expanded_tensors_are_saved_whole_and_refused_as_targets(tmp_path: Path) -> None:
    saved, live = torch.arange(3.0).expand(4, 3), torch.zeros(4, 3)
    through_disk(tmp_path, saved, live)
    assert torch.equal(live, saved)
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        pytest.raises(StateMismatchError) as caught,
    ):
        ckpt.restore({"t": torch.zeros(3).expand(4, 3)})
    assert caught.value.facts["t"] == (
        "expected a tensor that can be written, got an expanded one: clone() it"
    )


def test_overlapping_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    live = torch.zeros(10)
    through_disk(tmp_path, [base[:6], base[4:]], [live[:6], live[4:]])
    assert torch.equal(live, base)


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    values = torch.randn(4, dtype=torch.complex64)
    saved = [values.conj(), values.conj().imag]
    assert saved[0].is_conj()
    assert saved[1].is_neg()
    live = [torch.zeros(4, dtype=torch.complex64), torch.zeros(4)]
    through_disk(tmp_path, saved, live)
    assert torch.equal(live[0], values.conj().resolve_conj())
    assert torch.equal(live[1], -values.imag)
    views = [torch.zeros(4, dtype=torch.complex64).conj(),
             torch.zeros(4, dtype=torch.complex64).conj().imag]  # fmt: skip
    MemoryStep({"t": saved}).restore({"t": views})
    assert torch.equal(views[0].resolve_conj(), values.conj().resolve_conj())
    assert torch.equal(views[1].resolve_neg(), -values.imag)


def test_numpy_arrays_and_scalars(tmp_path: Path) -> None:
    saved = {
        "array": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        "strided": numpy.arange(10)[::-2],
        "frozen": numpy.arange(3),
        "zero": numpy.array(4.5),
        "empty": numpy.empty((0, 2)),
        "scalar": numpy.float64(0.1),
        "flag": numpy.bool_(True),
        "date": numpy.datetime64("2026-11-21"),
    }
    saved["frozen"].flags.writeable = False
    live = {"array": numpy.zeros((2, 3), numpy.float32), "scalar": numpy.float64(0)}
    array = live["array"]
    through_disk(tmp_path, saved, live)
    assert live["array"] is array
    for name, value in saved.items():
        assert type(live[name]) is type(value)
        assert live[name].dtype == value.dtype
        assert numpy.array_equal(live[name], value)
    for bad in (numpy.array([object()]), numpy.array(["text"]), numpy.arange(2, dtype=">i4")):
        with pytest.raises(UnsupportedValueError) as caught:
            captured({"a": {"b": bad}})
        assert caught.value.facts["path"] == "a.b"


def test_values_of_torch(tmp_path: Path) -> None:
    saved = {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    live: dict[str, Any] = {}
    through_disk(tmp_path, saved, live)
    assert live == saved
    assert [type(value) for value in live.values()] == [type(value) for value in saved.values()]
