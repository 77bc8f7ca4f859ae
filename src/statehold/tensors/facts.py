"""What many tensors show, read column by column: no Python between one tensor and the next.

Owns: the reads that decide a tensor's spec, strides and ties, for a batch of tensors at once.
Invariants: equal facts, at equal names and places, give equal specs and strides. A batch in which
any tensor is out of the ordinary has no reading, and is looked at one tensor at a time.
Not here: what follows from a reading, and what is remembered of it (found).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch

from statehold._core import read_forms
from statehold.tensors.storable import ORDINARY, devices_of, is_dtensor

_version, _impl = attrgetter("_version"), attrgetter("_cdata")
_dtype, _local = attrgetter("dtype"), attrgetter("_local_tensor")
_size, _stride = torch.Tensor.size, torch.Tensor.stride
_data_ptr, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_neg
_storage, _storage_ptr = torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr
# All that decides where a DTensor lies.
_layout = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta")
# C functions that torch offers to others from 2.10 on. One call says what four of Python say, which
# would also make an object of each size.
EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


class Facts(NamedTuple):
    """What decides specs and strides. The first three are equal exactly when these are, and have no
    other form to rely on. devices: as devices_of() says. layouts: those of DTensors, None for each
    other tensor; no list at all where there is no DTensor."""

    shapes: Any
    strides: Any
    dtypes: Any
    devices: list[int]
    layouts: list[Any]


class BatchFacts(NamedTuple):
    """A batch as it is now. tensors: of DTensors what they hold here; wrappers: DTensors, else
    None; the others are the columns of these names (CapturedTensor). places: what two tensors share
    when they may be one: addresses, and the ids of DTensors."""

    facts: Facts
    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    impls: list[int]
    versions: list[int]
    addresses: list[int]
    wrappers: list[torch.Tensor | None]
    places: list[int]


def read(values: list[Any]) -> BatchFacts | None:
    """What a batch shows; None unless all of it are ordinary tensors, or DTensors of such."""
    wrappers: list[Any] = [None] * len(values)
    tensors, layouts = values, list[Any]()
    try:
        if not ORDINARY.issuperset(map(type, values)):
            if not all(type(value) in ORDINARY or is_dtensor(value) for value in values):
                return None
            wrappers = [None if type(value) in ORDINARY else value for value in values]
            layouts = [None if value is None else layout_of(value) for value in wrappers]
            tensors = [value if type(value) in ORDINARY else _local(value) for value in values]
            if not ORDINARY.issuperset(map(type, tensors)):
                return None  # under way from a collective, or made of others
        shown = None
        if EXCHANGE is not None:
            with suppress(RuntimeError, BufferError):  # some kinds of tensors are not in it
                shown = read_forms(tensors, EXCHANGE)
        shapes, strides, dtypes, addresses = shown or _described(tensors)
        facts = Facts(shapes, strides, dtypes, devices_of(tensors), layouts)
        if any(map(_is_neg, tensors)):
            return None
        versions = list(map(_version, tensors))
        storages = list(map(_storage, tensors))
    except RuntimeError:  # no memory, no shape, no version: sparse, nested, or of inference mode
        return None
    places = addresses
    if layouts:
        wrapped = list(zip(wrappers, addresses, strict=True))
        places = [address if each is None else id(each) for each, address in wrapped]
        moved = [0 if each is None else _version(each) for each in wrappers]
        versions = list(map(add, versions, moved))
    impls = list(map(_impl, tensors))
    return BatchFacts(facts, tensors, storages, impls, versions, addresses, wrappers, places)


def _described(tensors: list[torch.Tensor]) -> tuple[Any, Any, Any, list[int]]:
    """Shapes, strides, dtypes and addresses. Raises RuntimeError."""
    sizes, strides = list(map(_size, tensors)), list(map(_stride, tensors))
    return sizes, strides, list(map(_dtype, tensors)), list(map(_data_ptr, tensors))


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """What decides where a DTensor lies."""
    return (*_layout(tensor), getattr(tensor._spec, "shard_order", None))


def storage_addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Of the storages of ordinary tensors and DTensors; None where one is neither, or has none."""
    local = tensors
    if not ORDINARY.issuperset(map(type, tensors)):
        local = [each if type(each) in ORDINARY else _local_of(each) for each in tensors]
        if not ORDINARY.issuperset(map(type, local)):
            return None
    try:
        return list(map(_storage_ptr, map(_storage, local)))
    except RuntimeError:  # sparse, or nested
        return None


def _local_of(tensor: Any) -> Any:
    return _local(tensor) if is_dtensor(tensor) else tensor
