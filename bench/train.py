"""Train: what saving costs a CPU training loop in wall time.

Invariants: a step is a fixed number of single-threaded matrix products (calibrated once per run,
the same for everyone) and then one optimizer step; after every `interval`-th step the state is
saved. The optimizer steps only when the library allows (its gate). The clock stops when the last
save is durable. The peer "none" is the same loop without saves. The state is changed once more
after the last save has begun, and that save is then restored and compared bit for bit with what the
state was when `save` was called: a torn copy fails here.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.case import Case
from bench.harness import median
from bench.peers import Peer, load_peer, open_peer
from bench.state import TrainingState, build

NO_SAVES = "none"
MATRIX = 768


class Compute:
    """The forward and backward of a step: matrix products on one core."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(2)
        self._weight = torch.randn(MATRIX, MATRIX, generator=generator, device="cpu") / MATRIX**0.5
        self._x = torch.randn(MATRIX, MATRIX, generator=generator, device="cpu")
        self._y = torch.empty_like(self._x)

    def __call__(self, work: int) -> None:
        for _ in range(work):
            torch.mm(self._x, self._weight, out=self._y)

    def calibrate(self, seconds: float) -> int:
        """How many products take `seconds` on this machine, by the median of some trials."""
        trial = 8
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            self(trial)
            times.append((time.perf_counter() - begin) / trial)
        return max(1, round(seconds / (median(times) or seconds)))


def measure(case: Case) -> dict[str, Any]:
    compute = Compute()
    state = build(case.size)
    state.fill(case.seed)
    compute(1)
    if case.peer == NO_SAVES:
        return _loop(case, state, compute, None)
    load_peer(case.peer)
    peer = open_peer(case.peer, case.path, state, case.peer_options())
    peer.begin()
    result = _loop(case, state, compute, peer)
    peer.settle()
    state.wipe()
    peer.restore(warm=True)
    result["difference"] = state.difference(case.seed, result["last_saved"])
    peer.close()
    return result


def _loop(case: Case, state: TrainingState, compute: Compute, peer: Peer | None) -> dict[str, Any]:
    steps: list[dict[str, float]] = []
    saved = 0
    begin = time.perf_counter()
    for index in range(case.steps):
        started = time.perf_counter()
        compute(case.work)
        computed = time.perf_counter()
        _update(state, peer)
        updated = time.perf_counter()
        if peer is not None and index % case.interval == 0:
            saved = state.progress["step"]
            peer.save(saved)
        steps.append(
            {
                "compute_s": computed - started,
                "update_s": updated - computed,
                "save_s": time.perf_counter() - updated,
            }
        )
    _update(state, peer)
    if peer is not None:
        peer.wait_durable()
    wall = time.perf_counter() - begin
    return {
        "bytes": state.total_bytes(),
        "wall_s": wall,
        "step_s": wall / case.steps,
        "steps": steps,
        "last_saved": saved,
    }


def _update(state: TrainingState, peer: Peer | None) -> None:
    if peer is not None:
        peer.wait_mutable()
    state.step()
