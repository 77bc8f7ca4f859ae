"""A checksum of a batch: what two draws of one microbatch have in common if they are equal.

Owns: walking a batch, which may nest tensors, numpy arrays, plain values, containers and data
classes.
Invariants: equal batches have equal checksums, in every process; different ones practically never
(XXH3-64). The order of a mapping or a set does not matter, because it may differ by process. Of an
object of any other class only the class counts: its attributes may hold more than the batch, such
as a cache.
Not here: what becomes of a difference (purity).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from statehold import _core
from statehold.tensors.captured import fingerprint_on_host
from statehold.tensors.storable import local_of

_PLAIN = (bool, int, float, complex, str, type(None))
_BYTES = (bytes, bytearray, memoryview)


def checksum(value: Any) -> int:
    """XXH3-64 over the content of `value`. Reads device tensors to the host."""
    return int.from_bytes(_sum(value), "little")


def _sum(value: Any) -> bytes:
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return _joined("tensor", _of_tensor(local_of(value)))  # of a DTensor: this rank's part
    if isinstance(value, _PLAIN):
        return _joined(kind, repr(value).encode("utf-8", "surrogatepass"))
    if isinstance(value, _BYTES):
        return _joined(kind, bytes(value))
    if isinstance(value, Mapping):
        return _joined(kind, *sorted(_sum(key) + _sum(value[key]) for key in value))
    if isinstance(value, Set):
        return _joined(kind, *sorted(map(_sum, value)))
    if isinstance(value, list | tuple):
        return _joined(kind, *map(_sum, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _joined(kind, *(_sum(getattr(value, each.name)) for each in fields(value)))
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.ndarray):
            return _joined("array", _of_array(value, numpy))
        if isinstance(value, numpy.generic):
            return _joined("array", _of_array(numpy.asarray(value), numpy))
    return _joined(kind, b"")


def _joined(kind: str, *parts: bytes) -> bytes:
    # A sum of sums, so that the parts of a large batch are read once and never copied.
    return _core.xxh3_64(b"".join([kind.encode(), b"\0", *parts])).to_bytes(8, "little")


def _of_tensor(tensor: torch.Tensor) -> bytes:
    if tensor.is_nested:  # its shape has numbers that differ by process
        return b"nested" + b"".join(map(_of_tensor, tensor.unbind()))
    form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode()
    if tensor.is_meta:
        return form
    if tensor.is_quantized:
        return form + _of_tensor(tensor.dequantize())
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().to_dense()
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return form + fingerprint_on_host(plain, _core.hash_memory).to_bytes(8, "little")


def _of_array(array: Any, numpy: Any) -> bytes:
    form = f"{array.dtype.str} {array.shape}".encode()
    if array.dtype.hasobject:
        return form + _sum(array.tolist())
    dense = numpy.ascontiguousarray(array)
    address, _ = dense.__array_interface__["data"]
    return form + _core.hash_memory(address, dense.nbytes).to_bytes(8, "little")
