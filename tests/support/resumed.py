"""Scripts of frameworks: run in forks of one process, killed inside a save, resumed, and compared.

What is compared is all of the last step: weights, optimizer, generators, position in the data.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import statehold

FRAMEWORKS = Path(__file__).parents[1] / "frameworks"
EXAMPLES = Path(__file__).parents[2] / "examples"
KILL = 4
# What a framework counts itself, or a loader; each step has one of these.
HOLDERS = {"trainer", "accelerator", "deepspeed", "lightning", "train_state", "data", "losses"}


def ran(jobs: list[dict[str, Any]]) -> list[int]:
    # `make modes` makes warnings errors; what frameworks warn about is their own business.
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, FRAMEWORKS / "runs.py", json.dumps(jobs)],
        capture_output=True, text=True, check=True, timeout=600, env=environment,
    )  # fmt: skip
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


def job(script: Path, *words: Any, **more: Any) -> dict[str, Any]:
    return {"script": str(script), "words": [str(word) for word in words], **more}


def three(script: Path, folder: Path, *words: Any, **more: Any) -> list[dict[str, Any]]:
    """A whole run, one that is killed, and the same once more."""
    return [
        job(script, *words, folder / "whole", seed=0, **more),
        job(script, *words, folder / "cut", seed=0, kill=KILL, **more),
        job(script, *words, folder / "cut", **more),
    ]


def check(folder: Path, codes: list[int]) -> None:
    logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
    assert codes == [0, -signal.SIGKILL, 0], logs
    whole, cut = folder / "whole", folder / "cut"
    assert (whole / "losses.txt").read_text() == (cut / "losses.txt").read_text()
    manifest = json.loads((max(whole.glob("step-*")) / "manifest.json").read_text())
    for rank in range(manifest["world_size"]):
        one, other = (statehold.load(run, rank=rank) for run in (whole, cut))
        assert HOLDERS & one.keys()
        for name in ("trainer", "lightning"):  # a log with times, and paths
            one.pop(name, None)
            other.pop(name, None)
        assert same(one, other)


def same(one: Any, other: Any) -> bool:
    """Equal bits, types and keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
