"""Every dtype of torch is either stored bit for bit or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from statehold import header
from statehold.errors import UnsupportedValueError
from statehold.state.dtypes import code_of, dtype_of, stored_shape, torch_shape
from support.memory_store import raw, round_trip

ALL = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
STORED = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2",
    "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2",
}  # fmt: skip


def by_name(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


@pytest.mark.parametrize("name", ALL)
def test_a_dtype_is_stored_or_refused(name: str) -> None:
    dtype = by_name(name)
    if name.removeprefix("torch.") in STORED:
        assert dtype_of(code_of(dtype, "t"), "t") is dtype
        return
    with pytest.raises(UnsupportedValueError) as caught:
        code_of(dtype, "a.b")
    assert caught.value.facts == {"path": "a.b", "dtype": name.removeprefix("torch.")}


@pytest.mark.parametrize("shape", [(4, 6), (0, 2), (1,), ()])
@pytest.mark.parametrize("name", sorted(STORED))
def test_bits_make_the_round_trip(name: str, shape: tuple[int, ...]) -> None:
    dtype = by_name(name)
    if not shape and name.startswith("float4"):
        return  # refused: see below
    tensor, live = of_bits(dtype, shape, 1), of_bits(dtype, shape, 2)
    step = round_trip({"t": tensor}, {"t": live})
    assert raw(live) == raw(tensor)
    spec = step.capture.tensors[0].spec
    assert header.bytes_of(spec.dtype, spec.shape) == spec.nbytes


def of_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits: NaNs, infinities and subnormals included."""
    blank = torch.empty(shape, dtype=dtype)
    high = 2 if dtype is torch.bool else 256
    make = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, high, (blank.nbytes,), dtype=torch.uint8, generator=make)
    return bits.view(dtype).reshape(shape)


def test_packed_values_are_counted_one_by_one() -> None:
    dtype = torch.float4_e2m1fn_x2
    assert stored_shape(dtype, (3, 4), "t") == (3, 8)
    assert torch_shape(dtype, (3, 8)) == (3, 4)
    with pytest.raises(UnsupportedValueError):
        stored_shape(dtype, (), "t")


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2", "nonsense"])
def test_codes_that_torch_lacks_are_refused(code: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        dtype_of(code, "a.b")
    assert caught.value.facts["path"] == "a.b"


def test_hints_tell_what_to_store_instead() -> None:
    for dtype, words in {torch.complex128: "view_as_real", torch.qint8: "int_repr"}.items():
        with pytest.raises(UnsupportedValueError) as caught:
            code_of(dtype, "t")
        hint: Any = caught.value.hint
        assert words in hint
