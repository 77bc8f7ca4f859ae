"""Fingerprints: whether two ranks hold the same bytes, without moving them.

Holds: equal bytes have equal fingerprints on one kind of device; different ones practically never
(XXH3-64 on the host; a weighted sum of mixed words, modulo 2**64, on a device). They find
accidents, not attackers.
A tensor that may change as soon as `save` has returned is read before; one on a device is
read by work queued there before whatever changes it; the others are read on the stage thread,
before the gate opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from statehold.state.capture import CapturedTensor
from statehold.state.tensors import is_external

HashMemory = Callable[[int, int], int]

# How many 8-byte words a device mixes at once: bounds the temporary memory.
_WORDS = 4 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio, as a signed word
_MASK = (1 << 64) - 1


def begin(
    captured: Iterable[CapturedTensor], hash_memory: HashMemory
) -> dict[str, Callable[[], int]]:
    """By name, what to call on the stage thread for the fingerprint of each tensor."""
    return {each.spec.name: _begin(each, hash_memory) for each in captured}


def _begin(captured: CapturedTensor, hash_memory: HashMemory) -> Callable[[], int]:
    tensor = captured.tensor
    if is_external(tensor):
        pending = on_device(tensor)
        return lambda: int(pending.item()) & _MASK
    if captured.eager:
        known = on_host(tensor, hash_memory)
        return lambda: known
    return lambda: on_host(tensor, hash_memory)


def on_host(tensor: torch.Tensor, hash_memory: HashMemory) -> int:
    """XXH3-64 of the elements in C order."""
    dense = tensor.contiguous()
    return hash_memory(dense.data_ptr(), dense.numel() * dense.element_size())


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A one-element tensor that holds the fingerprint when the device's queue has come so far."""
    nbytes = tensor.numel() * tensor.element_size()
    data = torch.zeros(-(-nbytes // 8), dtype=torch.int64, device=tensor.device)
    data.view(tensor.dtype)[: tensor.numel()].copy_(tensor.detach().reshape(-1))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, data.numel(), _WORDS):
        words = data[begin : begin + _WORDS]
        end = begin + words.numel()
        places = torch.arange(begin, end, dtype=torch.int64, device=tensor.device)
        total += (_mixed(words + places * _ODD) * (2 * places + 1)).sum()
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ (words >> 29)) * _ODD
    return words ^ (words >> 32)
