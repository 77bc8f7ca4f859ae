"""What a batch of tensors shows tells them apart, however it is read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any

import pytest
import torch

from statehold import _core
from statehold.errors import UnsupportedValueError
from statehold.tensors import columns, dtypes

needs_exchange = pytest.mark.skipif(columns.EXCHANGE is None, reason="torch before 2.10")


@pytest.fixture(params=[pytest.param("exchange", marks=needs_exchange), "descriptors"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "descriptors":
        monkeypatch.setattr(columns, "EXCHANGE", None)


def shown(*tensors: torch.Tensor) -> columns.Facts:
    reading = columns.read(list(tensors))
    assert reading is not None
    return reading.facts


def views() -> list[list[torch.Tensor]]:
    """Lists of tensors, no two of which are equal in shapes, strides and dtypes."""
    of = torch.arange(24.0)
    return [
        [of],
        [of.view(4, 6)],
        [of.view(6, 4)],
        [of.view(4, 6).t()],
        [of.view(1, 24)],
        [of.int()],
        [of[0]],
        [of[:1]],
        [of[:2], of[:3]],
        [of[:3], of[:2]],
        [of[:6].view(2, 3), of[:4]],
        [of[:2], of[:12].view(3, 4)],
    ]


@pytest.mark.usefixtures("way")
def test_equal_facts_are_those_of_equal_tensors() -> None:
    found = [shown(*each) for each in views()]
    assert found == [shown(*each) for each in views()]
    assert all(one != other for one, other in combinations(found, 2))


def held_dtypes() -> Iterator[torch.dtype]:
    """The dtypes of torch that a step can hold."""
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        with suppress(UnsupportedValueError):
            dtypes.code_of(dtype, "")
            yield dtype


@pytest.mark.usefixtures("way")
def test_each_dtype_is_told_apart() -> None:
    found = [shown(torch.empty(2, dtype=kind)) for kind in held_dtypes()]
    assert len(found) >= 19
    assert all(one != other for one, other in combinations(found, 2))


@pytest.mark.usefixtures("way")
def test_addresses_are_those_of_the_elements() -> None:
    of = torch.arange(24.0)
    tensors = [of[3:], of, of[5], of[:0]]
    reading = columns.read(tensors)
    assert reading is not None
    assert reading.live.addresses == [each.data_ptr() for each in tensors]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "odd",
    [
        torch.eye(2).to_sparse(),
        torch._neg_view(torch.ones(2)),
    ],
    ids=["sparse", "negative"],
)
def test_a_batch_with_an_odd_tensor_has_no_reading(odd: torch.Tensor) -> None:
    assert columns.read([torch.ones(2), odd]) is None


def test_what_the_exchange_cannot_describe_is_read_by_descriptors() -> None:
    tensors = [torch.ones(2), torch.ones(2, device="meta")]
    assert shown(*tensors).shapes == [(2,), (2,)]


@needs_exchange
def test_only_tensors_have_forms() -> None:
    with pytest.raises(RuntimeError):
        _core.read_forms([object()], columns.EXCHANGE)
    with pytest.raises(ValueError, match="PyCapsule"):
        _core.read_forms([], object())


class Table(ctypes.Structure):
    """The begin of DLPack's table."""

    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p))


def capsule_of(table: Table) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(ctypes.addressof(table), b"dlpack_exchange_api", None)


@needs_exchange
def test_a_table_of_another_version_is_not_used() -> None:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensors = [torch.ones(2, 3)]
    later = Table(2, 0, get(columns.EXCHANGE, b"dlpack_exchange_api"))
    assert _core.read_forms(tensors, capsule_of(later)) == _core.read_forms(
        tensors, columns.EXCHANGE
    )
    alone = Table(2, 0, None)
    with pytest.raises(RuntimeError, match="version 1"):
        _core.read_forms(tensors, capsule_of(alone))


def test_members_are_read_object_by_object() -> None:
    tensors = [torch.ones(2), torch.eye(3)]
    readers = [torch.Tensor.ndim, torch.Tensor.dim, len]
    assert _core.read_members(tensors, readers) == [[1, 2], [1, 2], [2, 3]]
    assert _core.read_members([], readers) == [[], [], []]
    with pytest.raises(TypeError):
        _core.read_members([torch.ones(2), 3], readers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_elements_are_read_where_they_are(dtype: torch.dtype) -> None:
    numbers = torch.arange(5, dtype=dtype)
    addresses = [numbers[at].data_ptr() for at in (3, 0, 3)]
    copy = _core.read_elements(addresses, dtype.itemsize)
    assert torch.frombuffer(copy, dtype=dtype).tolist() == [3, 0, 3]
    with pytest.raises(ValueError, match="address 0"):
        _core.read_elements([0], 4)
