"""A step in memory: capture a state and match another one with it, without any disk."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from statehold.format.entries import record_file
from statehold.format.manifest import Manifest
from statehold.format.saved import open_step
from statehold.layout.plan import plan_save
from statehold.tensors.captured import Capture
from statehold.tensors.kinds import capture, finish, prepare
from statehold.tensors.matching import Restoration
from support.steps import sums_for


def captured(state: Mapping[str, Any]) -> dict[str, Any]:
    """The captured tensors by name."""
    return {tensor.spec.name: tensor for tensor in capture(state).tensors}


def eager(state: Mapping[str, Any]) -> set[str]:
    return {name for name, tensor in captured(state).items() if tensor.spec.eager}


CREATED = "2026-11-21T07:00:00+00:00"


class MemoryStep:
    """A state as it was: its manifest, and a private copy of every tensor."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        found: Capture = capture(state)
        self.copies = {
            each.spec.name: each.tensor.detach().clone(memory_format=torch.contiguous_format)
            for each in found.tensors
        }
        plan = plan_save([tensor.spec for tensor in found.tensors], step=1)
        file, tensors = record_file(plan, self._sums(plan))
        written = Manifest(1, 1, CREATED, "test", 1 << 20, (file,), tensors, found.tree)
        raw = written.encode()
        self.manifest = Manifest.decode(raw, "memory")
        self.saved = open_step(lambda *_: raw, "memory", 1, 0, 1)

    def _sums(self, plan: Any) -> bytes:
        """Sums that are equal for equal bytes: all a comparison of tied tensors looks at."""
        if plan.file_bytes > 1 << 20:
            return sums_for(plan)
        nonempty = [spec for spec in plan.specs if spec.nbytes]
        hashes = [0, *(hash(_bytes(self.copies[spec.name])) for spec in nonempty)]
        return b"".join((value & 2**64 - 1).to_bytes(8, "little") for value in hashes)

    def prepare(self, state: Mapping[str, Any], **options: Any) -> Restoration:
        return prepare(state, self.saved, **options)

    def restore(self, state: Mapping[str, Any], **options: Any) -> Restoration:
        restoration = self.prepare(state, **options)
        with torch.no_grad():
            for target in restoration.destinations:
                target.tensor.copy_(self.copies[target.name])
        finish(restoration)
        return restoration


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
