"""Steps that share files, with states of a few KiB, and what each of them has to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from statehold import Checkpointer, Save
from statehold.checkpoint.save import sharing
from support.faults import DEADLINE_S, must
from support.in_memory import SimFs
from support.inside import inside


@contextmanager
def small_files() -> Iterator[None]:
    """Parts from 8 KiB on are shared, in files of 16 KiB and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "PART_BYTES_MIN", 8 << 10)
        patch.setattr(sharing, "FILE_BYTES_MIN", 16 << 10)
        patch.setattr(sharing, "FILE_BYTES", 32 << 10)
        yield


class Tuned(torch.nn.Module):
    """A base that needs no gradient, in layers of `width` x `width`, and a head that trains."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.base = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(width, width), requires_grad=False)
            for _ in range(layers)
        )
        self.head = torch.nn.Parameter(torch.randn(64, 64))

    @torch.no_grad()
    def train_once(self) -> None:
        self.head.add_(1.0)

    def bits(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}

    @property
    def base_bytes(self) -> int:
        return sum(each.nbytes for each in self.base)


def names(fs: SimFs, folder: str) -> list[str]:
    return sorted(name for name, _ in fs.listdir(folder)) if fs.is_dir(folder) else []


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


class TunedRun:
    """Saves a model step by step, and remembers what each step has to be.

    is_loose: as a state_dict, whose bytes are compared on their way through buffers.
    """

    def __init__(self, ckpt: Checkpointer, model: Tuned, *, is_loose: bool = False) -> None:
        self.ckpt, self.model, self.is_loose = ckpt, model, is_loose
        self.expected: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict() if self.is_loose else self.model}

    def save(self, step: int, wait: bool = True) -> Save:
        self.ckpt.gate()
        self.model.train_once()
        self.expected[step] = self.model.bits()
        save = self.ckpt.save(step, self.state)
        if wait:
            save.wait("committed", DEADLINE_S)
            inside(self.ckpt).pipeline.drain(DEADLINE_S)
        return save


def whole_steps(
    ckpt: Checkpointer, expected: dict[int, dict[str, torch.Tensor]], *, is_loose: bool = False
) -> list[int]:
    """The steps that are there: each restores bit for bit, or this raises AssertionError."""
    steps = ckpt.steps()
    for step in steps:
        model = Tuned(sum(name.startswith("base") for name in expected[step]))
        found = ckpt.restore({"model": model.state_dict() if is_loose else model}, step)
        must(found == step and same(model.bits(), expected[step]), f"step {step} has other bytes")
    return steps
