"""Fingerprints of device tensors, computed on the side streams of a save.

Invariants: equal bytes have equal fingerprints on one kind of device. Of the elements in C order,
as 8-byte words w(0), w(1), ... with zeros at the end, it is the sum of mixed(w(i) + i * ODD) *
(2 i + 1), modulo 2**64. The scratch is four times WORDS words, and less on a device that has no
memory left.
Not here: fingerprints of host memory, and what they are for (tensors/captured).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from statehold.tensors.captured import CapturedTensor
from statehold.tensors.devices.elements import SCRATCH_BYTES_MIN
from statehold.tensors.devices.gathering import bring
from statehold.tensors.devices.mover import Mover
from statehold.tensors.storable import device_of

WORDS = 1 << 20  # that are mixed at once
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio, as a signed word
_MASK = (1 << 64) - 1


class Fingerprinting:
    """The fingerprints of one save, on its stage thread."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._totals: list[tuple[torch.device, list[str], torch.Tensor]] = []

    def enqueue(self, chosen: Iterable[CapturedTensor]) -> None:
        """Compute those of these tensors, behind what the side streams have been given."""
        by_device: defaultdict[torch.device, list[CapturedTensor]] = defaultdict(list)
        for each in chosen:
            by_device[device_of(each.tensor)].append(each)
        for device, tensors in by_device.items():
            names = [each.spec.name for each in tensors]
            with self._mover.on(device):
                totals = totals_of([each.tensor for each in tensors])
            self._totals.append((device, names, totals))

    def read(self) -> dict[str, int]:
        """By name. After Mover.wait()."""
        found: dict[str, int] = {}
        for device, names, totals in self._totals:
            host = torch.empty(len(names), dtype=torch.int64, device="cpu")
            with self._mover.on(device):
                host.copy_(totals)
            found |= zip(names, [int(total) & _MASK for total in host.tolist()], strict=True)
        self._totals = []
        return found


def totals_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The fingerprints of tensors on one device."""
    counts = [-(-tensor.nbytes // 8) for tensor in tensors]
    totals = tensors[0].new_zeros(len(tensors), dtype=torch.int64)
    scratch = _scratch(totals, min(WORDS, max(1, *counts)))
    at_once = scratch[0].numel()
    for index, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
        for begin in range(0, count, at_once):
            end = min(begin + at_once, count)
            words, places, spare = [each[: end - begin] for each in scratch]
            _bring_words(tensor, begin, words)
            torch.arange(begin, end, out=places, device=places.device)
            words += torch.mul(places, _ODD, out=spare)
            _mix(words, spare)
            words *= places.mul_(2).add_(1)
            totals[index] += words.sum()
    return totals


def _scratch(beside: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Memory for three times `count` words; for fewer where the device has too little."""
    while True:
        try:
            return [beside.new_empty(count) for _ in range(3)]
        except torch.OutOfMemoryError:
            if 8 * count <= SCRATCH_BYTES_MIN:
                raise
            count //= 2


def _bring_words(tensor: torch.Tensor, begin: int, words: torch.Tensor) -> None:
    """The words from number `begin` on."""
    offset = 8 * begin
    nbytes = min(words.nbytes, tensor.nbytes - offset)
    if nbytes < words.nbytes:
        words[-1:].zero_()
    bring(tensor, offset, words.view(torch.uint8)[:nbytes])


def _mix(words: torch.Tensor, spare: torch.Tensor) -> None:
    words ^= torch.bitwise_right_shift(words, 29, out=spare)
    words *= _ODD
    words ^= torch.bitwise_right_shift(words, 32, out=spare)
