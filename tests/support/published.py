"""Steps whose content follows from one number, so that half a step shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import torch

import statehold
from support.faults import DEADLINE_S

PIECE = 1 << 20  # of a checksum
NUMEL = 5 * PIECE // 8  # 2.5 MiB of int32
NAMES = "abcd"
CHANCE = 5  # a part changes in one of so many steps


def content(value: int) -> dict[str, torch.Tensor]:
    """Four tensors of a few parts; each part changes in every fifth step."""
    made = {name: torch.empty(NUMEL, dtype=torch.int32) for name in NAMES}
    for number, tensor in enumerate(made.values()):
        for part, memory in enumerate(tensor.split(NUMEL // 4)):
            memory.fill_(value - (value + number + part) % CHANCE)
    return {**made, "value": torch.tensor(value)}


def whole(found: dict[str, Any]) -> int:
    """The number that the content follows from. Raises AssertionError for a mixture."""
    value = int(found["value"])
    expected = content(value)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    if wrong:
        raise AssertionError(f"half a step: {wrong} differ from the content of {value}")
    return value


def flip(path: Path, at: int) -> None:
    """Damage one byte of a file."""
    with open(path, "r+b") as file:
        flip_in(file, at)


def flip_in(file: BinaryIO, at: int) -> None:
    """The same in an open file, whatever its name is by now. Twice undoes it."""
    file.seek(at)
    found = file.read(1)
    file.seek(at)
    file.write(bytes([found[0] ^ 1]))
    file.flush()


def save(ckpt: statehold.Checkpointer, step: int, state: dict[str, Any] | None = None) -> None:
    model = content(step) if state is None else state
    ckpt.save(step, {"model": model, "more": torch.ones(3)}).wait("committed", DEADLINE_S)


def brought(
    ckpt: statehold.Checkpointer,
    updates: statehold.Subscription,
    step: int,
    state: dict[str, Any] | None = None,
) -> statehold.Update:
    """Save a step, and have it in place."""
    save(ckpt, step, state)
    return applied(updates)


def applied(updates: statehold.Subscription) -> statehold.Update:
    update = updates.wait(DEADLINE_S)
    assert update is not None
    update.apply()
    return update


def data_files(run: Path, step: int) -> list[Path]:
    return sorted((run / f"step-{step:012d}").glob("*.safetensors"))
