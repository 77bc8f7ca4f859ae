"""Equal bytes, equal fingerprints; anything else differs."""

from __future__ import annotations

import ctypes
import hashlib

import pytest
import torch

from statehold.tensors import captured as captures
from statehold.tensors import columns, found
from statehold.tensors.kinds import capture


def hash_memory(address: int, nbytes: int) -> int:
    data = ctypes.string_at(address, nbytes) if nbytes else b""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def test_host_fingerprints_are_of_the_elements_in_order() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    value = captures.fingerprint_on_host(tensor, hash_memory)
    assert value == captures.fingerprint_on_host(tensor.t().contiguous().t(), hash_memory)
    assert value != captures.fingerprint_on_host(tensor.t(), hash_memory)


def test_a_device_tensor_is_left_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "is_external", lambda tensor: tensor.numel() == 4)
    monkeypatch.setattr(columns, "devices_of", lambda given: [(t.numel() == 4) - 1 for t in given])
    captured = capture({"host": torch.ones(3), "device": torch.ones(4)})
    assert captures.begin_fingerprints(captured.tensors, hash_memory).keys() == {"host"}
