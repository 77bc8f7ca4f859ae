"""A run that begins with a step of another: how long it takes, and what it writes."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from bench import harness
from bench.unchanged.common import Group, Sizes, folder
from statehold import Checkpointer, _core
from statehold.checkpoint.levels.forking import fork

PARTS = 64


def measure(sizes: Sizes, where: Path, rounds: int) -> Group:
    seconds, data_bytes = [], []
    with folder(where) as made:
        _save(made / "base", sizes.fork)
        step = made / "base" / "step-000000000001"
        fs = _core.open_fs()
        try:
            for round_ in range(2 * rounds):
                child = made / f"child-{round_}"
                begin = time.perf_counter()
                fork(fs, str(step), str(child))
                seconds.append(time.perf_counter() - begin)
                data = child / step.name
                data_bytes += [
                    path.stat().st_blocks * 512
                    for path in data.glob("*.safetensors")
                    if path.stat().st_nlink == 1
                ]
        finally:
            fs.close()
        nbytes = sum(path.stat().st_size for path in harness.files_below(step))
    median = statistics.median(seconds)
    group = Group(facts={"bytes of the step": nbytes})
    group.rows.append({"case": "fork", "ms": 1e3 * median, "most ms": 1e3 * max(seconds),
                       "data bytes": sum(data_bytes)})  # fmt: skip
    group.aim("fork, ms", "< 100", 1e3 * median, median < 0.1, 1)
    group.aim("fork, data bytes", "0", float(sum(data_bytes)), not sum(data_bytes), 0)
    return group


def _save(run: Path, nbytes: int) -> None:
    """A step of this size. Memory that nobody has written takes no room."""
    state = {
        f"part{index}": torch.zeros(nbytes // PARTS // 4, device="cpu") for index in range(PARTS)
    }
    with Checkpointer(run, keep=1, staging_bytes="512MiB") as ckpt:
        ckpt.save(1, state).wait("committed", 600.0)
