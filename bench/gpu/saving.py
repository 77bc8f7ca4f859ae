"""save() of a state on the device: how long it blocks, how fast it stages and commits, and how long
the optimizer waits at the gate. And a restore, cold and warm, which is compared bit for bit.

Invariants: rates are over the ceilings of the same run. The first save pins staging memory and
writes a new file; figures with a target are medians of the later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.gpu import ceilings, figures
from bench.gpu.device import products, synchronize
from bench.gpu.figures import Figure
from bench.gpu.model import Trained
from bench.gpu.peers import open_peer
from bench.gpu.task import Task
from bench.harness import GB, drop_caches, median
from bench.peers import Peer

__all__ = ["FEW", "MANY", "restores", "saves"]

FEW, MANY = 800, 20_000
BLOCKED_MS = {FEW: 5.0, MANY: 50.0}
SMOKE_DIVISOR = 100  # of the number of tensors
LATER = 3  # saves after the first
NO_WAIT_MS = 1.0  # what is measured of a wait of 0
STEP_S, SMOKE_STEP_S = 0.5, 0.001
SEED = 7

Saved = dict[str, float]


def saves(tensors: int, staging: str) -> Callable[[Task], Iterator[Figure]]:
    """The check for a state of so many tensors. staging: a key of peers.OWN."""

    def check(task: Task) -> Iterator[Figure]:
        count = tensors // SMOKE_DIVISOR if task.is_smoke else tensors
        trained = Trained(task.torch_device, count, task.state_bytes)
        peer = open_peer(staging, task.path / "run", trained)
        work = products(task.torch_device, SMOKE_STEP_S if task.is_smoke else STEP_S, task.is_smoke)
        title = f"{tensors} tensors, staging {staging}"
        first = _save(peer, trained, 1, lambda: None)
        yield figures.measured(f"{title}: blocked, first save", first["blocked_ms"], "ms")
        later = [_save(peer, trained, 2 + turn, work) for turn in range(LATER)]
        yield from _figures(task, title, BLOCKED_MS[tensors], later)
        at_once = _save(peer, trained, 2 + LATER, lambda: None)
        yield figures.measured(f"{title}: gate, update at once", at_once["gate_ms"], "ms")
        peer.close()

    return check


def _save(peer: Peer, trained: Trained, step: int, work: Callable[[], None]) -> Saved:
    """One save, `work` on the device, one update, and what they took."""
    device = next(trained.model.parameters()).device
    trained.backward()
    synchronize(device)
    peer.save(step)
    work()
    synchronize(device)
    trained.optimizer.step()
    synchronize(device)
    peer.wait_durable()
    stats: dict[str, Any] = peer.statistics()
    return {
        "blocked_ms": stats["blocked_s"] * 1e3,
        "gate_ms": stats["gate_s"] * 1e3,
        "staged_gbps": stats["state_bytes"] / stats["staged_s"] / GB,
        "committed_gbps": stats["state_bytes"] / stats["committed_s"] / GB,
        "reused": float(stats["reused"]),
    }


def _figures(task: Task, name: str, blocked_ms: float, later: list[Saved]) -> Iterator[Figure]:
    def middle(key: str) -> float:
        return median([each[key] for each in later]) or 0.0

    staged, committed = middle("staged_gbps"), middle("committed_gbps")
    disk = ceilings.OVERWRITE if later[-1]["reused"] else ceilings.FRESH
    yield figures.at_most(f"{name}: blocked", middle("blocked_ms"), blocked_ms, "ms")
    yield figures.at_most(f"{name}: gate, after a step", middle("gate_ms"), NO_WAIT_MS, "ms")
    yield figures.measured(f"{name}: staged", staged, "GB/s")
    yield task.of_ceiling(f"{name}: staged / D2H", staged, ceilings.D2H, 0.9)
    yield figures.measured(f"{name}: committed", committed, "GB/s")
    yield task.of_ceiling(f"{name}: committed / {disk}", committed, disk, 0.9)


def restores(task: Task) -> Iterator[Figure]:
    """What is restored was saved while an update waited at the gate: a torn copy shows here."""
    count = FEW // SMOKE_DIVISOR if task.is_smoke else FEW
    trained = Trained(task.torch_device, count, task.state_bytes)
    trained.fill(SEED)
    peer = open_peer("given", task.path / "run", trained)
    peer.save(1)
    trained.optimizer.step()
    peer.wait_durable()
    if not trained.difference(SEED):
        raise RuntimeError("the update changed nothing, so the restore would prove nothing")
    peer.close()
    ends = [task.found[name] for name in (ceilings.READ, ceilings.H2D) if name in task.found]
    for name in ("cold", "warm"):
        rate = _restore(task, trained, is_cold=name == "cold")
        yield figures.measured(f"restore, {name}", rate, "GB/s")
        if name == "cold" and len(ends) == 2:
            title = "restore, cold / smaller of disk and H2D"
            yield figures.at_least(title, rate / min(ends), 0.9)
        if name == "warm":
            yield task.of_ceiling("restore, warm / H2D", rate, ceilings.H2D, 0.5)
        wrong = trained.difference(SEED) or "none"
        yield figures.equal(f"restore, {name}: wrong tensors", wrong, "none")


def _warm(directory: Path) -> None:
    """Have the files in the page cache: neither a save nor a cold restore leaves them there."""
    part = memoryview(bytearray(16 << 20))
    for path in directory.rglob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(part):
                pass


def _restore(task: Task, trained: Trained, is_cold: bool) -> float:
    """GB/s from opening the run to the last byte on the device, as in a restart."""
    trained.wipe()
    if is_cold:
        drop_caches(task.path / "run", gently=task.is_smoke)
    else:
        _warm(task.path / "run")
    synchronize(task.torch_device)
    begin = time.perf_counter()
    peer = open_peer("chosen", task.path / "run", trained)
    peer.restore(warm=not is_cold)
    synchronize(task.torch_device)
    took = time.perf_counter() - begin
    peer.close()
    return trained.total_bytes() / took / GB
