"""Runs on a simulated disk, whose steps follow from their numbers."""

from __future__ import annotations

from typing import Any

import torch

from statehold.format.manifest import Commit, Manifest
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.levels import step_path
from support.rank_states import blank
from support.rank_states import check as check_state
from support.rank_states import state as state_of_rank
from support.ranks import Ranks

BASE, CHILD = "/runs/base", "/runs/child"
NUMEL = 300_000  # more than one block of checksums


def content(step: int) -> dict[str, Any]:
    return {"w": torch.arange(NUMEL, dtype=torch.int32) * 7 + step, "step": step}


def save(fs: SimFs, run: str, *steps: int, keep: int | None = None, **said: Any) -> None:
    """A job that saves these steps. said: of each step."""
    with checkpointer_on(fs, run, keep=keep, **SMALL) as ckpt:
        for step in steps:
            ckpt.save(step, content(step), **said).wait("committed", DEADLINE_S)


def check(fs: SimFs, run: str, *steps: int) -> None:
    """The run has these steps, and no others."""
    with checkpointer_on(fs, run, **SMALL) as ckpt:
        found = ckpt.steps()
        must(found == list(steps), found)
        for step in steps:
            live = content(0)
            must(ckpt.restore(live, step) == step)
            must(torch.equal(live["w"], content(step)["w"]), f"step {step} has other bytes")


def save_on_ranks(fs: SimFs, size: int, run: str, step: int) -> None:
    with Ranks(fs, size, run) as ranks:
        ranks.save(step, lambda rank: state_of_rank(rank, step))


def check_on_ranks(ranks: Ranks, step: int) -> None:
    """A restore brings this step, on each rank."""
    found = [blank() for _ in range(ranks.size)]
    restored = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    must(restored == [step] * ranks.size, restored)
    for rank, each in enumerate(found):
        check_state(each, rank, step)


def manifest_of(fs: SimFs, run: str, step: int) -> Manifest | Commit:
    path = f"{step_path(run, step)}/manifest.json"
    return Manifest.decode(fs.read_file(path, 1 << 20), path)


def data_of(fs: SimFs, run: str, step: int) -> str:
    """The path of the first data file of a step."""
    where = step_path(run, step)
    return f"{where}/{min(name for name, _ in fs.listdir(where) if 'safetensors' in name)}"


class RetiringOnLink:
    """A file system on which the job of a run retires a step as soon as a file of it is linked."""

    def __init__(self, fs: SimFs, run: str, step: int) -> None:
        self._fs, self._where = fs, step_path(run, step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def link(self, path: str, target: str) -> None:
        self._fs.link(path, target)
        self._fs.rename(self._where, f"{self._where}.retired")
