"""What sums of gradients cost: the time of a step beside plain DDP, and memory beside no reduction.

Invariants: all contestants of a case run in the same processes, one step each in turn, so they meet
the same load. A ratio is the median of the ratios of such turns. Memory is measured in processes
that run one contestant only. Where the machine is busy, the processor time of a step says more
than its duration.
Not here: what a contestant does in a step (sums_replica).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.resilience.contestants import CONTESTANTS, DDP, NONE

Record = dict[str, Any]

# Microbatches of each replica in a step.
SHARES = (1, 4)
MEMORY_ROUNDS = 2


def measure(given: Namespace) -> list[Record]:
    """The records of all cases: those of time, then those of memory."""
    timed = [name for name in CONTESTANTS if name != NONE]
    found = [
        {"of": "time", **record}
        for share in SHARES
        for record in _run(given, timed, share, given.rounds)
    ]
    for name in CONTESTANTS:
        records = _run(given, [name], SHARES[-1], MEMORY_ROUNDS)
        found += [{"of": "memory", **record} for record in records]
    return found


def _run(given: Namespace, names: Sequence[str], share: int, rounds: int) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        model = [given.layers, given.features]
        spec = {"store": str(Path(folder, "store")), "replicas": given.replicas, "names": names,
                "model": model, "share": share, "rounds": rounds}  # fmt: skip
        replicas = [
            harness.start("bench.resilience.sums_replica", json.dumps(spec), rank, stdout=-1)
            for rank in range(given.replicas)
        ]
        try:
            told = [replica.communicate()[0] for replica in replicas]
        finally:
            for replica in replicas:
                replica.kill()
    if any(replica.returncode for replica in replicas):
        raise RuntimeError("a replica has failed; see above")
    found: list[Record] = json.loads(told[0].splitlines()[-1])
    return found


def table(records: Sequence[Record]) -> str:
    times = [record for record in records if record["of"] == "time"]
    lines = [
        f"{times[0]['numel']:,} parameters in float32",
        f"{'case, microbatches of each replica':36} {'step s: min med max':>23} {'/DDP':>6} "
        f"{'cpu s':>6} {'/DDP':>6} {'count s':>7} {'reduce':>7} "
        f"{'ns/param: count':>15} {'reduce':>7}",
    ]
    for record in times:
        ddp = next(r for r in times if r["name"] == DDP and r["share"] == record["share"])
        lines.append(_time_line(record, ddp))
    memory = {record["name"]: record for record in records if record["of"] == "memory"}
    lines.append(f"{'':36} {'peak MiB':>9} {'over none, bytes/param':>23} {'announced':>9}")
    for name, record in memory.items():
        over = (record["peak_bytes"] - memory[NONE]["peak_bytes"]) / record["numel"]
        announced = record["announced_bytes"] / record["numel"]
        peak = record["peak_bytes"] / (1 << 20)
        lines.append(f"{name:36} {peak:9.0f} {over:23.2f} {announced:9.2f}")
    return "\n".join(lines)


def _time_line(record: Record, ddp: Record) -> str:
    taken = record["step_s"]
    name = f"{record['name']}, {record['share']}"
    parts = {key: statistics.median(record[key] or [0.0]) for key in ("count_s", "reduce_s")}
    each = 1e9 / record["numel"]
    return (
        f"{name:36} {min(taken):7.3f} {statistics.median(taken):7.3f} {max(taken):7.3f} "
        f"{_ratio(record, ddp, 'step_s'):6.3f} "
        f"{statistics.median(record['cpu_s']):6.3f} {_ratio(record, ddp, 'cpu_s'):6.3f} "
        f"{parts['count_s']:7.3f} {parts['reduce_s']:7.3f} "
        f"{parts['count_s'] * each / record['share']:15.2f} {parts['reduce_s'] * each:7.2f}"
    )


def _ratio(record: Record, of: Record, key: str) -> float:
    return statistics.median(map(lambda mine, theirs: mine / theirs, record[key], of[key]))
