"""What a joiner costs: the time of its transfer, and the steps of its peers meanwhile.

Peers take steps of equal work, in turns without and with a joiner that takes their state. The peers
wait for the joiner at the end of a step, as they do at the reduction.

Invariants: all turns of a case run in the same processes. A ratio is the median of the ratios of
neighbouring turns. The joiner has the digest of its peers at the end.
Not here: what a rank does in a turn (rejoin_rank).
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from bench import harness
from bench.resilience.burden import WORK
from statehold.resilience.meeting import Desk

Record = dict[str, Any]


def measure(given: Namespace) -> list[Record]:
    return [_run(given, trainer) for trainer in WORK]


def _run(given: Namespace, trainer: str) -> Record:
    desk = Desk("127.0.0.1")
    spec = {
        "desk": desk.address,
        "peers": given.replicas,
        "trainer": trainer,
        "rounds": given.rounds,
        "bytes": given.state_mb * 10**6,
        "step_s": given.step_s,
    }
    ranks = [
        harness.start("bench.resilience.rejoin_rank", json.dumps(spec), rank, stdout=-1)
        for rank in range(given.replicas + 1)
    ]
    try:
        told = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        desk.close()
    *peers, joiner = told
    if {each["digest"] for each in peers} != {joiner["digest"]}:
        raise RuntimeError("the joiner has another state than its peers")
    turns = [turn for peer in peers for turn in peer["turns"]]
    return {
        "trainer": trainer,
        "peers": given.replicas,
        "bytes": joiner["bytes"],
        "fetch_s": joiner["fetch_s"],
        "cpu_s": joiner["cpu_s"],
        "turns": turns,
    }


def table(records: Sequence[Record]) -> str:
    lines = [
        f"{records[0]['peers']} peers, a state of {records[0]['bytes'] / 1e6:.0f} MB",
        f"{'the trainer':12} {'transfer s: min med max':>24} {'MB/s':>6} {'step s':>7} "
        f"{'work, with/without':>19} {'step, with/without':>19} {'serve ms':>9} "
        f"{'cpu s: joiner, a peer':>22}",
    ]
    for record in records:
        fetch, turns = sorted(record["fetch_s"]), record["turns"]
        work = statistics.median(
            turn["with"]["work_s"] / turn["without"]["work_s"] for turn in turns
        )
        step = statistics.median(
            turn["with"]["step_s"] / turn["without"]["step_s"] for turn in turns
        )
        alone = statistics.median(turn["without"]["step_s"] for turn in turns)
        serve = 1e3 * statistics.median(turn["with"]["serve_s"] for turn in turns)
        middle = statistics.median(fetch)
        joiner = statistics.median(record["cpu_s"])
        peer = statistics.median(turn["with"]["cpu_s"] - turn["without"]["cpu_s"] for turn in turns)
        lines.append(
            f"{record['trainer']:12} {fetch[0]:8.2f}{middle:8.2f}{fetch[-1]:8.2f} "
            f"{record['bytes'] / middle / 1e6:6.0f} {alone:7.2f} {work:19.3f} {step:19.3f} "
            f"{serve:9.1f} {joiner:15.3f}{peer:7.3f}"
        )
    return "\n".join(lines)
