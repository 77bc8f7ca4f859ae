"""How fast memory is proven to have the bytes of a file, and what that costs the training.

The proof runs as in a save: on threads of its own, of low priority, and on as many as the engine
copies with. The denominator is one pass over the same memory, a sum, in the same round, on as many
threads of the same priority: on a machine that others use, too, priority decides more than speed.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.train import Compute
from bench.unchanged.common import Group, Sizes, folder
from statehold import Checkpointer
from statehold.checkpoint.save.shared import BytesClaim, SharedFile, low_priority, refuted
from statehold.io.runtime import Runtime
from statehold.options.io import settled
from statehold.tensors.kinds import capture


def measure(sizes: Sizes, where: Path, rounds: int) -> Group:
    memory = torch.arange(sizes.base // 8, device="cpu")
    model = torch.nn.Module()
    model.frozen = torch.nn.Parameter(memory.view(torch.float64), requires_grad=False)
    with folder(where) as made, Checkpointer(made / "run", keep=1) as ckpt:
        ckpt.save(1, {"model": model}).wait("committed")
        sharing = ckpt._opened().parts.sharing
        claims = _claims(sharing._files, model)
        group = _rates(claims, sharing.runtime, memory, rounds)
        group.facts["bytes"] = memory.nbytes
        _beside_training(group, claims, sharing.runtime, rounds, sizes.base > 1 << 29)
    return group


def _claims(files: list[SharedFile], model: torch.nn.Module) -> list[BytesClaim]:
    captured = capture({"model": model})
    return [
        BytesClaim(
            each.plan.save, each.order.ordered(each.plan, captured.tensors).tensors, each.sums
        )
        for each in files
    ]


def _rates(claims: list[BytesClaim], runtime: Runtime, memory: torch.Tensor, rounds: int) -> Group:
    torch.set_num_threads(1)  # of each thread
    proofs, passes = [], []
    parts = memory.chunk(4 * settled(runtime.options.io).copy_threads)
    for round_ in range(-1, rounds * 3):
        begin = time.perf_counter()
        differing = refuted(claims, runtime)
        proven = time.perf_counter() - begin
        if any(differing):
            raise RuntimeError("memory that has not changed was refuted")
        begin = time.perf_counter()
        with contextlib.closing(low_priority(settled(runtime.options.io).copy_threads)) as threads:
            for task in [threads.submit(torch.sum, part) for part in parts]:
                task.result()
        passed = time.perf_counter() - begin
        if round_ >= 0:
            proofs.append(memory.nbytes / proven / 1e9)
            passes.append(memory.nbytes / passed / 1e9)
    group = Group()
    group.rows.append({"case": "proof, GB/s", "median": statistics.median(proofs)})
    group.rows.append({"case": "one pass, GB/s", "median": statistics.median(passes)})
    ratio = statistics.median(a / b for a, b in zip(proofs, passes, strict=True))
    group.aim("proof, x one pass over memory", ">= 0.8", ratio, ratio >= 0.8)
    return group


def _beside_training(
    group: Group, claims: list[BytesClaim], runtime: Runtime, rounds: int, is_whole: bool
) -> None:
    compute = Compute()
    work = compute.calibrate(0.5 if is_whole else 0.01)
    slower = []
    for _ in range(rounds * 2):
        alone = _timed(compute, work)
        with _proving(claims, runtime):
            slower.append(_timed(compute, work) / alone)
    group.rows.append({"case": "one training thread beside proofs that never end, x alone",
                       "median": statistics.median(slower)})  # fmt: skip


def _timed(compute: Compute, work: int) -> float:
    begin = time.perf_counter()
    compute(work)
    return time.perf_counter() - begin


@contextmanager
def _proving(claims: list[BytesClaim], runtime: Runtime) -> Iterator[None]:
    """Inside, one proof comes after the other."""
    ended = threading.Event()

    def prove() -> None:
        while not ended.is_set():
            refuted(claims, runtime)

    thread = threading.Thread(target=prove)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
