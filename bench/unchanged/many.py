"""Restore of a step whose files were made by many steps, beside a step that has its own files.

Parts of a model change for the last time at different steps. Each of them is in a file that was
made soon after. The newest step has links to all of them. The same state is saved once more without
sharing. Both are restored in turns, cold.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import harness
from bench.unchanged.common import MIB, Group, Sizes, folder, ratios
from statehold import Checkpointer, Io
from statehold.checkpoint.save import sharing

PART_BYTES = 16 * MIB
SAVES_EACH = 5  # what has changed is in a shared file again so many saves later


def model(parts: int) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(torch.full((PART_BYTES // 4,), float(part), device="cpu"), requires_grad=False)
        for part in range(parts)
    )


def measure(sizes: Sizes, where: Path, rounds: int) -> Group:
    with folder(where) as made:
        live, files, makers = _made(made / "shared", sizes)
        with Checkpointer(made / "own", io=Io(share_files=False)) as ckpt:
            ckpt.save(1, {"model": live}).wait("committed")
        seconds: dict[str, list[float]] = {"shared": [], "own": []}
        for round_ in range(-1, 4 * rounds):
            for name in ("shared", "own") if round_ % 2 else ("own", "shared"):
                taken = _restore(made / name, live, gently=sizes.files < 50)
                if round_ >= 0:
                    seconds[name].append(taken)
    group = Group(facts={"shared files": files, "steps that made them": makers})
    for name, each in seconds.items():
        group.rows.append({"case": f"restore, {name} files", "s": statistics.median(each)})
    ratio = ratios(seconds["shared"], seconds["own"])
    group.aim(f"restore of a step with {files} files of {makers} steps, x own", "<= 1.05", ratio,
              ratio <= 1.05, 3)  # fmt: skip
    return group


def _made(run: Path, sizes: Sizes) -> tuple[nn.ParameterList, int, int]:
    """The model as saved, the number of shared files of the newest step, and of their makers."""
    live = model(sizes.files)
    first_of: dict[tuple[int, int], int] = {}  # file -> the first step that had it
    with pytest.MonkeyPatch.context() as patch, Checkpointer(run, keep=2) as ckpt:
        patch.setattr(sharing, "FILE_BYTES", PART_BYTES)
        patch.setattr(sharing, "FILES_MAX", sizes.files)
        for step in range(1, SAVES_EACH * sizes.makers + 1):
            ckpt.gate()
            maker, is_later = divmod(step - 1, SAVES_EACH)
            with torch.no_grad():
                for each in [] if is_later else list(live)[maker :: sizes.makers]:
                    each.add_(1000.0)
            ckpt.save(step, {"model": live}).wait("committed")
            ckpt._opened().pipeline.drain(60.0)
            stats = [path.stat() for path in _shared_files(run, step)]
            files = [(each.st_ino, each.st_mtime_ns) for each in stats]
            for file in files:
                first_of.setdefault(file, step)
    return live, len(files), len({first_of[file] for file in files})


def _shared_files(run: Path, step: int) -> list[Path]:
    files = (run / f"step-{step:012d}").glob("*.safetensors")
    return [path for path in files if path.stat().st_size >= PART_BYTES]


def _restore(run: Path, live: nn.ParameterList, *, gently: bool) -> float:
    found = model(len(live))
    with torch.no_grad():
        for each in found:
            each.zero_()
    harness.drop_caches(run, gently)
    begin = time.perf_counter()
    with Checkpointer(run) as ckpt:
        ckpt.restore({"model": found})
        seconds = time.perf_counter() - begin
    if not all(map(torch.equal, found, live)):
        raise RuntimeError("wrong bytes were restored")
    return seconds
