"""Training in which everything changes: what sharing costs where it saves nothing.

The loop is that of bench.train: single-threaded products, an update after the gate, a save at each
other step. "of it computed" is the processor time of the process, which others of the machine
hardly change. Then both runs are restored, cold, into tensors that exist.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from bench import harness
from bench.state import TrainingState, build
from bench.train import Compute
from bench.unchanged.common import Group, Sizes, folder, ratios
from statehold import Checkpointer, Io

STEPS, INTERVAL, SEED = 8, 2, 1
CASES = {"share_files=True": True, "share_files=False": False}
DEADLINE_S = 600.0


def vars_of(state: TrainingState) -> dict[str, Any]:
    return {"model": state.model, "optimizer": state.optimizer, "progress": state.progress}


def measure(sizes: Sizes, where: Path, rounds: int) -> Group:
    is_smoke = sizes.full == "smoke"
    compute, state = Compute(), build(sizes.full)
    work = compute.calibrate(0.01 if is_smoke else 0.3)
    state.fill(SEED)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for round_ in range(-1, rounds):
        for name in list(CASES) if round_ % 2 else list(CASES)[::-1]:
            with folder(where) as made:
                record = _loop(made / "run", state, compute, work, shares=CASES[name])
                record["restore s"] = _restore(made / "run", state, gently=is_smoke)
            if round_ >= 0:
                found[name].append(record)
    return _judged(found)


def _loop(
    run: Path, state: TrainingState, compute: Compute, work: int, *, shares: bool
) -> dict[str, float]:
    blocked, committed = [], []
    with Checkpointer(run, keep=1, io=Io(share_files=shares)) as ckpt:
        for _ in range(2):  # files and staging memory are there
            ckpt.save(state.step(), vars_of(state)).wait("committed", DEADLINE_S)
        begin, computed = time.perf_counter(), time.process_time()
        saves = []
        for index in range(STEPS):
            compute(work)
            number = state.step()
            if index % INTERVAL == 0:
                called = time.perf_counter()
                saves.append(ckpt.save(number, vars_of(state)))
                blocked.append(time.perf_counter() - called)
        for save in saves:
            save.wait("committed", DEADLINE_S)
            committed.append(save.stats.committed_s)
        wall, computed = time.perf_counter() - begin, time.process_time() - computed
    return {
        "loop s": wall,
        "of it computed s": computed,
        "blocked s": statistics.median(blocked),
        "committed s": statistics.median(committed),
    }


def _restore(run: Path, state: TrainingState, *, gently: bool) -> float:
    state.wipe()
    harness.drop_caches(run, gently)
    begin = time.perf_counter()
    with Checkpointer(run) as ckpt:
        step = ckpt.restore(vars_of(state))
        seconds = time.perf_counter() - begin
    if step is None or (difference := state.difference(SEED, step)) is not None:
        raise RuntimeError(f"wrong bytes of step {step}: {difference}")
    return seconds


def _judged(found: dict[str, list[dict[str, float]]]) -> Group:
    group = Group()
    shared, whole = found.values()
    for name, records in found.items():
        medians = {key: statistics.median(each[key] for each in records) for key in records[0]}
        group.rows.append({"case": name, **medians})
    wanted = {"committed s": "save", "loop s": "train", "restore s": "restore"}
    for key, what in wanted.items():
        ratio = ratios([each[key] for each in shared], [each[key] for each in whole])
        group.aim(f"everything changes: {what}, x share_files=False", "<= 1.05", ratio,
                  ratio <= 1.05)  # fmt: skip
    return group
