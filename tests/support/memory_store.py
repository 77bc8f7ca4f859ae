"""A step kept in memory: what capture gives, written where restore says, with no disk between.

The manifest goes through its bytes and back, so that every test also proves that it is valid.
Addresses and strides are used the way the engine uses them.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch

from statehold.manifest import Manifest, record_file
from statehold.plan import BLOCK_BYTES, pieces, plan_save
from statehold.state.capture import Capture, CapturedTensor, capture
from statehold.state.restore import Destination, Restoration, prepare


class MemoryStep:
    """One step of `state`."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.capture: Capture = capture(state)
        self.bytes = {item.spec.name: _read(item) for item in self.capture.tensors}
        self.manifest = self._manifest()

    def restore(self, state: dict[str, Any]) -> Restoration:
        restoration = prepare(state, self.manifest)
        for destination in restoration.destinations:
            _write(destination, self.bytes[destination.name])
        restoration.finish()
        return restoration

    def _manifest(self) -> Manifest:
        plan = plan_save([item.spec for item in self.capture.tensors], step=1)
        sums = b"".join(
            _sum(plan.header[begin:end]) for begin, end in pieces(0, plan.data_begin, BLOCK_BYTES)
        )
        for spec, start in zip(plan.specs, plan.begins, strict=True):
            data = self.bytes[spec.name]
            for begin, end in pieces(start, spec.nbytes, BLOCK_BYTES):
                sums += _sum(data[begin - start : end - start])
        file, tensors = record_file(plan, sums)
        manifest = Manifest(1, 1, "2026-01-01T00:00:00Z", "test", BLOCK_BYTES, (file,), tensors,
                            self.capture.tree)  # fmt: skip
        return Manifest.decode(manifest.encode(), "manifest.json")


def round_trip(state: dict[str, Any], live: dict[str, Any]) -> MemoryStep:
    """Save `state` and restore it into `live`."""
    step = MemoryStep(state)
    step.restore(live)
    return step


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, in C order, as bytes: equal for NaN, different for -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def _sum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def _read(item: CapturedTensor) -> bytes:
    assert item.address == item.tensor.data_ptr()
    assert (item.strided is None) is item.tensor.is_contiguous()
    data = raw(item.tensor)
    assert len(data) == item.spec.nbytes
    return data


def _write(destination: Destination, data: bytes) -> None:
    if destination.strided is None:
        ctypes.memmove(destination.address, data, len(data))
        return
    itemsize, shape, strides = destination.strided
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (span * itemsize)).from_address(destination.address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    target = flat.as_strided((*shape, itemsize), (*(s * itemsize for s in strides), 1))
    target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(*shape, itemsize))
