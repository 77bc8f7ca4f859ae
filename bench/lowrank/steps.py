"""Seconds of a step on four ranks behind limited links: full rank, and pairs split in both ways.

`python -m bench.lowrank steps --mbit 1000` starts the ranks in namespaces (links.py), each with one
thread. Models have equal hidden sizes. The ways take turns, and each figure is the median of all
steps of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from bench.lowrank import links
from bench.lowrank.model import Size, made, split
from statehold.planners.lowrank import WAYS, LlamaShape, LowRankCosts

PORT = 29_517


def run(arguments: list[str]) -> int:
    """Start the ranks, and print what rank 0 has found."""
    parser = argparse.ArgumentParser(prog="python -m bench.lowrank steps")
    parser.add_argument("--mbit", type=int, default=1000, help="of each link; 0: no limit (1000)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way (3)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn, after one more (5)")
    parser.add_argument("--width", type=int, default=512, help="d; ff is 8/3 of it (512)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 256 tokens (4)")
    parser.add_argument("--out", type=Path, help="also write what was found as JSON")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go in any case
    with links.linked(given.ranks, given.mbit) as words:
        found = _start(words, given)
    found |= {"mbit": given.mbit, "command": " ".join(["python -m bench.lowrank", *sys.argv[1:]])}
    print(*lines(found), sep="\n")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _start(words: list[list[str]], given: argparse.Namespace) -> dict[str, Any]:
    order = {name: getattr(given, name) for name in ("rounds", "steps", "width", "layers", "batch")}
    ranks = []
    for rank, own in enumerate(words):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(words)),
            "MASTER_ADDR": f"{links.NETWORK}.1", "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": links.INTERFACE, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [*own, sys.executable, "-m", "bench.lowrank.steps", json.dumps(order)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        printed = [each.communicate()[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    if any(each.returncode for each in ranks):
        raise RuntimeError(f"ranks ended with {[each.returncode for each in ranks]}")
    found: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """A table in Markdown."""
    times = found["seconds"]
    medians = {way: statistics.median(each) for way, each in times.items()}
    rate = f"{found['mbit']} Mbit/s" if found["mbit"] else "no limit"
    rows = [
        f"| {way} | {medians[way] * 1e3:.0f} ({min(each) * 1e3:.0f} to {max(each) * 1e3:.0f}) "
        f"| {found['reduced_bytes'][way] / 1e6:.1f} | {medians[way] / medians['bottleneck']:.2f} |"
        for way, each in times.items()
    ]
    return [f"{found['ranks']} ranks, {rate}, width {found['width']}, {found['layers']} layers, "
            f"{found['tokens']} tokens, {len(times['full'])} steps of each:", "",
            "| | ms | MB all-reduced | / bottleneck |", "|---|---|---|---|", *rows]  # fmt: skip


# -- a rank ----------------------------------------------------------------------------------------


def rank_of(order: dict[str, int]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    width = order["width"]
    size = Size(width, -(-width * 8 // 96) * 32, order["layers"], batch=order["batch"])
    one = torch.Generator("cpu").manual_seed(1)
    shape = size.batch, size.length + 1
    tokens = torch.randint(size.vocabulary, shape, generator=one, device="cpu")
    models, reduced = {}, {}
    for way in WAYS:
        model = made(size, way)
        split(model, way, mesh)
        models[way] = model, torch.optim.AdamW(model.parameters(), foreach=False)
        _step(*models[way], tokens)  # torch compiles and allocates what it needs
        reduced[way] = _reduced(size, way)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(order["rounds"]):
        for way in WAYS:
            _step(*models[way], tokens)
            for _ in range(order["steps"]):
                distributed.barrier()
                begin = time.perf_counter()
                _step(*models[way], tokens)
                taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device="cpu")
                distributed.all_reduce(taken, distributed.ReduceOp.MAX)
                seconds[way].append(taken.item())
    found = {
        "ranks": distributed.get_world_size(), "width": size.width, "layers": size.layers,
        "tokens": size.batch * size.length, "seconds": seconds, "reduced_bytes": reduced,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model.loss(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _reduced(size: Size, way: str) -> int:
    """The bytes of a step that go into the all-reduces of layers; tests/lowrank counts them."""
    shape = LlamaShape(size.layers, size.width, size.ff, size.width, size.width, size.vocabulary)
    costs = LowRankCosts(shape, size.width // 4)
    elements = costs.reduced(way) + costs.reduced(way, is_backward=True)
    return 4 * elements * size.layers * size.batch * size.length


if __name__ == "__main__":
    rank_of(json.loads(sys.argv[1]))
