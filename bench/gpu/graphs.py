"""CUDA graphs: an update that is replayed, and a capture, while a save is under way.

Invariants: the staging memory is a small part of the state, so that copies are under way for as
long as the disk writes: a replay or a capture right after save() finds the save in the middle of
its work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import statehold
from bench.gpu import figures
from bench.gpu.figures import Figure
from bench.gpu.model import Trained
from bench.gpu.task import Task
from statehold.errors import TornSnapshot

__all__ = ["captured_step", "captured_while_saving", "replay_while_saving"]

LITTLE = {"staging_bytes": "64MiB"}
DEADLINE_S = 120.0
REPLAYS = 3
CAPTURES, LAUNCHES = 20, 300
SEED = 11


def captured_step(trained: Trained, kind: Any) -> Any:
    """A graph of this class that holds the update, after the warm-up that a capture needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        trained.optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = kind()
    with torch.cuda.stream(side):
        graph.capture_begin()
        trained.optimizer.step()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def replay_while_saving(task: Task) -> Iterator[Figure]:
    """Right are the bytes from before the replays, or a refusal; never a mixture."""
    task.need_cuda("CUDA graphs")
    kinds: dict[str, Any] = {"": torch.cuda.CUDAGraph}
    if hasattr(torch.accelerator, "Graph"):  # not in torch 2.9
        kinds[", accelerator.Graph"] = torch.accelerator.Graph
    for number, (suffix, kind) in enumerate(kinds.items()):
        yield from _replay_while_saving(task, task.path / str(number), kind, suffix)


def _replay_while_saving(task: Task, run: Path, kind: Any, suffix: str) -> Iterator[Figure]:
    nbytes = task.at_most_bytes(4 * 10**9)
    can_capture = task.torch_device.type == "cuda"
    trained = Trained(task.torch_device, 800, nbytes, capturable=can_capture)
    with statehold.Checkpointer(run, **LITTLE) as ckpt:
        graph = captured_step(trained, kind)
        trained.fill(SEED)
        torch.cuda.synchronize()
        save = ckpt.save(1, trained.state)
        for _ in range(REPLAYS):
            graph.replay()
        found = "right bytes"
        try:
            save.wait("committed", DEADLINE_S)
        except TornSnapshot:
            found = "refused"
        moved = trained.difference(SEED)
        if found != "refused":
            ckpt.restore(trained.state)
            found = "WRONG BYTES" if trained.difference(SEED) else found
    name = f"replay of a captured update while saving{suffix}"
    yield figures.equal(name, found, "right bytes", "refused")
    yield figures.equal(f"the replays took place{suffix}", str(bool(moved)), "True")


def captured_while_saving(task: Task) -> Iterator[Figure]:
    """Neither the captures nor the saves fail, also in the strictest mode of capturing. The first
    save pins staging memory meanwhile."""
    task.need_cuda("CUDA graphs")
    nbytes = task.at_most_bytes(1 << 30)
    weights = torch.ones(nbytes // 4, device=task.torch_device)
    tiny = torch.zeros(16, device=task.torch_device)
    with statehold.Checkpointer(task.path / "run", **LITTLE) as ckpt:
        state = {"w": statehold.Gated(weights)}
        for step in (1, 2):
            save = ckpt.save(step, state)
            captured = _capture_often(tiny)
            yield figures.equal(f"captures while save {step} runs", captured, "captured")
            yield figures.equal(
                f"save {step} while graphs are captured", _outcome(save), "committed"
            )


def _capture_often(tiny: torch.Tensor) -> str:
    try:
        for _ in range(CAPTURES):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
                for _ in range(LAUNCHES):
                    tiny.add_(1)
    except RuntimeError as error:
        return f"failed: {str(error)[:200]}"
    return "captured"


def _outcome(save: statehold.Save) -> str:
    try:
        save.wait("committed", DEADLINE_S)
    except (statehold.StateholdError, RuntimeError) as error:
        return f"failed: {str(error)[:200]}"
    return "committed"
