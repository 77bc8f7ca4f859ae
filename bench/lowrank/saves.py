"""What a step of a model takes, full rank and as pairs: bytes, save(), and until it is durable.

`python -m bench.lowrank saves DIRECTORY`. The two models take turns on the same storage; weights
and both moments are float32. Each figure is the median of all saves after the first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path

import torch

import statehold
from bench.lowrank.model import Size, made


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lowrank saves")
    parser.add_argument("directory", type=Path, help="on the storage; runs are made below it")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each model (3)")
    parser.add_argument("--saves", type=int, default=4, help="of a turn (4)")
    given = parser.parse_args(arguments)
    ff = -(-given.width * 8 // 96) * 32
    size = Size(given.width, ff, given.layers, heads=16, vocabulary=given.vocabulary)
    blocked: dict[str, list[float]] = {"full": [], "bottleneck": []}
    durable: dict[str, list[float]] = {"full": [], "bottleneck": []}
    nbytes, parameters = {}, {}
    for _ in range(given.rounds):
        for way in blocked:
            run_at = given.directory / f"lowrank-{way}-{os.getpid()}"
            model, stats = _saved(size, way, run_at, given.saves)
            blocked[way] += [each.blocked_s for each in stats[1:]]
            durable[way] += [each.committed_s for each in stats[1:]]
            nbytes[way], parameters[way] = stats[0].state_bytes, model
            shutil.rmtree(run_at)
    print(f"width {given.width}, {given.layers} layers, {len(blocked['full'])} saves of each\n")
    print(
        "| | million parameters | GB of a step | save(), ms | durable, s |\n|---|---|---|---|---|"
    )
    for way in blocked:
        cells = (f"{parameters[way] / 1e6:.0f}", f"{nbytes[way] / 1e9:.2f}",
                 f"{statistics.median(blocked[way]) * 1e3:.1f}",
                 f"{statistics.median(durable[way]):.2f} ({min(durable[way]):.2f} to "
                 f"{max(durable[way]):.2f})")  # fmt: skip
        print(f"| {way} | {' | '.join(cells)} |")
    return 0


def _saved(size: Size, way: str, run: Path, saves: int) -> tuple[int, list[statehold.SaveStats]]:
    model = made(size, way)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    found = []
    with statehold.Checkpointer(run, keep=1) as ckpt:
        for step in range(saves):
            save = ckpt.save(step, {"model": model, "optimizer": optimizer})
            found.append(save.wait("committed").stats)
    return sum(each.numel() for each in model.parameters()), found
