"""Fingerprints: whether two ranks hold the same bytes, without moving them.

Invariants: equal bytes have equal fingerprints on one kind of device; different ones practically
never (XXH3-64 on the host). They find accidents, not attackers. A tensor that may change as soon as
`save` has returned is read before; the others are read on the stage thread, before the gate opens.
Not here: fingerprints of device memory (tensors/devices/fingerprinting).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from statehold.tensors.captured import CapturedTensor

HashMemory = Callable[[int, int], int]


def begin(
    captured: Iterable[CapturedTensor], hash_memory: HashMemory
) -> dict[str, Callable[[], int]]:
    """By name, what to call on the stage thread for the fingerprint of each host tensor."""
    return {each.spec.name: _begin(each, hash_memory) for each in captured if not each.external}


def _begin(captured: CapturedTensor, hash_memory: HashMemory) -> Callable[[], int]:
    tensor = captured.tensor
    if captured.eager:
        known = on_host(tensor, hash_memory)
        return lambda: known
    return lambda: on_host(tensor, hash_memory)


def on_host(tensor: torch.Tensor, hash_memory: HashMemory) -> int:
    """XXH3-64 of the elements in C order."""
    dense = tensor.contiguous()
    return hash_memory(dense.data_ptr(), dense.numel() * dense.element_size())
