"""Equal bytes, equal fingerprints; anything else differs."""

from __future__ import annotations

import ctypes
import hashlib

import pytest
import torch

from statehold.state import fingerprints


def hash_memory(address: int, nbytes: int) -> int:
    data = ctypes.string_at(address, nbytes) if nbytes else b""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 7, 4096, 100_003])
def test_device_fingerprints_see_the_bytes_and_nothing_else(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(count).remainder(251).to(dtype)
    value = fingerprints.on_device(tensor)
    assert torch.equal(value, fingerprints.on_device(tensor.clone()))
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    assert torch.equal(value, fingerprints.on_device(strided))


def test_device_fingerprints_differ_by_one_bit_and_by_order() -> None:
    tensor = torch.arange(10_000, dtype=torch.int32)
    seen = {int(fingerprints.on_device(tensor))}
    for index in range(0, 10_000, 37):
        changed = tensor.clone()
        changed[index] ^= 1 << (index % 31)
        seen.add(int(fingerprints.on_device(changed)))
    seen.add(int(fingerprints.on_device(tensor.flip(0))))
    seen.add(int(fingerprints.on_device(tensor.roll(1))))
    assert len(seen) == 1 + len(range(0, 10_000, 37)) + 2


def test_words_beyond_one_batch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000, dtype=torch.int64)
    whole = int(fingerprints.on_device(tensor))
    monkeypatch.setattr(fingerprints, "_WORDS", 64)
    assert int(fingerprints.on_device(tensor)) == whole


def test_host_fingerprints_are_of_the_elements_in_order() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    value = fingerprints.on_host(tensor, hash_memory)
    assert value == fingerprints.on_host(tensor.t().contiguous().t(), hash_memory)
    assert value != fingerprints.on_host(tensor.t(), hash_memory)
