"""One replica of a case of sums.py: `python -m bench.resilience.sums_replica JSON RANK`.

Invariants: replicas meet before each step, and a step lasts until the last of them has done it. The
first round does not count. In each round the contestants begin with another one. In the
first round all of them have the same gradients, but for rounding.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.resilience.contestants import NONE, Contestant, contestant

Record = dict[str, Any]
TOLERANCE = 1e-4


def main() -> None:
    spec, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=spec["replicas"]
    )
    microbatches = spec["share"] * spec["replicas"]
    share = range(rank * spec["share"], (rank + 1) * spec["share"])
    given = [contestant(name, spec["model"], microbatches) for name in spec["names"]]
    records = {each.name: _record(each, spec) for each in given}
    for number in range(1 + spec["rounds"]):
        for position in range(len(given)):
            each = given[(position + number) % len(given)]
            taken = _step(each, number, share)
            if number:
                for key, values in taken.items():
                    records[each.name][key].append(values)
        if not number:
            _check(given)
    for each in given:
        records[each.name]["announced_bytes"] = each.announced_bytes
        records[each.name]["peak_bytes"] = _peak_bytes()
    if rank == 0:
        print(json.dumps(list(records.values())))
    dist.destroy_process_group()


def _record(each: Contestant, spec: Record) -> Record:
    numel = sum(param.numel() for param in each.model.parameters())
    return {"name": each.name, "share": spec["share"], "numel": numel,
            "step_s": [], "count_s": [], "reduce_s": [], "cpu_s": []}  # fmt: skip


def _step(each: Contestant, number: int, share: range) -> dict[str, float]:
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    each.step(number, share)
    taken = {"step_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu,
             **{key: each.spent.get(key, 0.0) for key in ("count_s", "reduce_s")}}  # fmt: skip
    slowest = torch.tensor([*taken.values()], dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(taken, slowest.tolist(), strict=True))


def _check(given: list[Contestant]) -> None:
    summed = [each for each in given if each.name != NONE]
    for each in summed[1:]:
        for one, other in zip(summed[0].model.parameters(), each.model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            scale = one.grad.abs().max().item()
            worst = (one.grad - other.grad).abs().max().item()
            if worst > TOLERANCE * scale:
                raise AssertionError(f"gradients of {each.name} differ by {worst} of {scale}")


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
