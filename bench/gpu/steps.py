"""How much longer a training step takes while a save is under way, with statehold and with DCP.

A step is work on the device and an update. Steps with and without a save alternate, and a save
begins only when the last one is durable. Each library saves the same state in its own process.
Invariants: the slow-down is the ratio of medians; it holds all that the trainer's thread loses, the
call of save and the wait before the update included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from bench.gpu import figures
from bench.gpu.device import Work, launches, products, synchronize
from bench.gpu.figures import Figure
from bench.gpu.model import Trained
from bench.gpu.peers import open_peer
from bench.gpu.saving import FEW, SMOKE_DIVISOR
from bench.gpu.task import Skipped, Task
from bench.harness import GB, median
from bench.peers import Peer

__all__ = ["steps"]

PAIRS, SMOKE_PAIRS = 4, 1
STEP_S, SMOKE_STEP_S = 1.0, 0.002
STATE_BYTES = 4 * 10**9
SLOW_DOWN = 1.03
SEED = 5


@dataclass
class Took:
    """Seconds: steps without and with a save, and of the saves."""

    plain: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return (median(self.saving) or 0.0) / (median(self.plain) or 1.0)


def steps(library: str, title: str, limit: float | None) -> Callable[[Task], Iterator[Figure]]:
    """The check of a library in peers.py. limit: of the slow-down, if there is a target."""

    def check(task: Task) -> Iterator[Figure]:
        device = task.torch_device
        if device.type != "cuda" and library == "dcp-process":
            raise Skipped("without a device this is bench.peers' dcp-process-shm")
        trained = Trained(
            device,
            FEW // SMOKE_DIVISOR if task.is_smoke else FEW,
            task.at_most_bytes(STATE_BYTES),
        )
        peer = open_peer(library, task.path / "run", trained)
        seconds = SMOKE_STEP_S if task.is_smoke else STEP_S
        _step(peer, trained, lambda: None, device, Took(), saves_as=1)  # pins, makes files
        number = 1
        kinds = [("device-bound", products(device, seconds, task.is_smoke))]
        if limit is not None:  # one kind of a peer is enough: its steps take several times as long
            kinds.append(("launch-bound", launches(device, seconds)))
        for name, work in kinds:
            took = _alternate(peer, trained, work, device, number, task.is_smoke)
            number += len(took.saving)
            yield from _figures(f"{title}, {name} steps", trained.total_bytes(), took, limit)
        yield _restored(peer, trained, number + 1, title)
        if (stager := peer.statistics().get("stager")) is not None:
            yield figures.measured(f"{title}: stager", stager)
        peer.close()

    return check


def _restored(peer: Peer, trained: Trained, number: int, title: str) -> Figure:
    """One more save of a state that changes as soon as the library allows; it is restored."""
    trained.fill(SEED)
    peer.save(number)
    peer.wait_mutable()
    trained.optimizer.step()
    peer.wait_durable()
    peer.settle()
    trained.wipe()
    peer.restore(warm=True)
    wrong = trained.difference(SEED) or "none"
    return figures.equal(f"{title}: wrong tensors after a restore", wrong, "none")


def _alternate(
    peer: Peer, trained: Trained, work: Work, device: torch.device, number: int, is_smoke: bool
) -> Took:
    took = Took()
    for _ in range(SMOKE_PAIRS if is_smoke else PAIRS):
        number += 1
        _step(peer, trained, work, device, took)
        _step(peer, trained, work, device, took, saves_as=number)
    return took


def _step(
    peer: Peer,
    trained: Trained,
    work: Callable[[], None],
    device: torch.device,
    took: Took,
    saves_as: int | None = None,
) -> None:
    trained.backward()
    synchronize(device)
    begin = time.perf_counter()
    if saves_as is not None:
        peer.save(saves_as)
        took.blocked.append(time.perf_counter() - begin)
    work()
    if saves_as is not None:
        peer.wait_mutable()
    trained.optimizer.step()
    synchronize(device)
    (took.plain if saves_as is None else took.saving).append(time.perf_counter() - begin)
    if saves_as is not None:
        peer.wait_durable()
        took.durable.append(time.perf_counter() - begin)
        peer.settle()


def _figures(name: str, nbytes: int, took: Took, limit: float | None) -> Iterator[Figure]:
    durable = median(took.durable) or 0.0
    yield figures.measured(f"{name}: plain", (median(took.plain) or 0.0) * 1e3, "ms")
    ratio = f"{name}: saving / plain"
    if limit is None:
        yield figures.measured(ratio, took.ratio)
    else:
        yield figures.at_most(ratio, took.ratio, limit)
    yield figures.measured(f"{name}: blocked", (median(took.blocked) or 0.0) * 1e3, "ms")
    yield figures.measured(f"{name}: durable", nbytes / durable / GB, "GB/s")
