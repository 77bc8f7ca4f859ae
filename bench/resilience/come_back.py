"""A killed replica comes back by Replicas itself: when it contributes, and what that costs others.

Three peers train. In each round they take steps undisturbed, then another replica starts, joins and
contributes, and is killed. A replica is ready when it has its model and asks to join. Boundaries
are the ends of steps of the peers between that and the first step to which it contributes.

Invariants: a ratio compares steps of three contributing peers, in the same round: the joining step,
in which the joiner takes the state, with the undisturbed ones. While its process starts, it imports
torch on the processors of the peers; that is a ratio of its own.
Not here: what a replica does (come_back_replica).
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.resilience.burden import WORK
from bench.resilience.processes import TO_NOWHERE, Processes, coordinated, ended, lines

Record = dict[str, Any]

UNDISTURBED = 6  # steps of a round without a joiner
TOGETHER = 2  # steps to which the joiner contributes
MICROBATCHES = 12  # of a step
DEADLINE_S = 300.0


def measure(given: Namespace) -> list[Record]:
    return [record for trainer in WORK for record in _run(given, trainer)]


def _run(given: Namespace, trainer: str) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder, coordinated(given.replicas) as address:
        spec = {
            "coordinator": address,
            "trainer": trainer,
            "bytes": given.state_mb * 10**6,
            "microbatches": MICROBATCHES,
            "microbatch_s": given.step_s * given.replicas / MICROBATCHES,
        }
        with ended([]) as processes:
            job = Job(Path(folder), spec, given.replicas, processes)
            rounds = [job.round() for _ in range(given.rounds)]
            facts = [_facts(job.peers(), each) for each in rounds]
    return [{"trainer": trainer, "peers": given.replicas, **each} for each in facts]


class Job:
    """processes: of all replicas that it starts. The first ones are the peers, and stay."""

    def __init__(self, folder: Path, spec: Record, peers: int, processes: Processes) -> None:
        self._folder = folder
        self._spec = spec
        self._count = peers
        self._processes = processes
        for _ in range(peers):
            self._start()

    def peers(self) -> list[list[Record]]:
        return [self._steps(number) for number in range(self._count)]

    def round(self) -> Record:
        """When the joiner was started and killed, and its log."""
        self._until(lambda: min(map(len, self.peers())) > 1)
        done = max(map(len, self.peers()))
        self._until(lambda: min(map(len, self.peers())) > done + UNDISTURBED)
        started = time.monotonic()
        number = self._start()
        self._until(lambda: sum(1 for step in self._steps(number) if step["share"]) >= TOGETHER)
        self._processes[number].kill()
        self._processes[number].wait()
        log = lines(self._log(number))
        return {"undisturbed_from": done, "started": started, "log": log}

    def _start(self) -> int:
        number = len(self._processes)
        words = [json.dumps({**self._spec, "log": str(self._log(number))})]
        process = harness.start("bench.resilience.come_back_replica", *words, **TO_NOWHERE)
        self._processes.append(process)
        return number

    def _log(self, number: int) -> Path:
        return self._folder / f"replica{number}"

    def _steps(self, number: int) -> list[Record]:
        return [line for line in lines(self._log(number)) if "step" in line]

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the replicas do not go on")
            time.sleep(0.05)


def _facts(peers: Sequence[list[Record]], found: Record) -> Record:
    """Of a round. The step with the number `undisturbed_from` was in progress when it began."""
    ends = _ends(peers)
    taken = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    ready = next(line["ready"] for line in found["log"] if "ready" in line)
    first = next(line["step"] for line in found["log"] if line.get("share"))
    asked = min(step for step in ends if ends[step] >= ready)  # the step in progress
    undisturbed = [
        taken[step]
        for step in taken
        if step > found["undisturbed_from"] and ends[step] <= found["started"]
    ]
    starting = [taken[step] for step in taken if found["started"] <= ends[step - 1] < ready]
    usual = statistics.median(undisturbed)
    return {
        "boundaries": first - asked,
        "step_s": usual,
        "joining": taken[first - 1] / usual,
        "starting": [each / usual for each in starting],
    }


def _ends(peers: Sequence[list[Record]]) -> dict[int, float]:
    """When the last of the peers has committed a step, by its number."""
    each = [{line["step"]: line["at"] for line in log} for log in peers]
    common = set(each[0]).intersection(*each[1:])
    return {step: max(log[step] for log in each) for step in sorted(common)}


def table(records: Sequence[Record]) -> str:
    rows = [
        f"{'the trainer':12} {'rounds':>6} {'boundaries: min med max':>24} {'step s':>7} "
        f"{'joining step: min med max':>26} {'steps while it starts':>22}"
    ]
    for trainer, group in itertools.groupby(records, lambda each: each["trainer"]):
        of = list(group)
        boundaries = sorted(each["boundaries"] for each in of)
        joining = sorted(each["joining"] for each in of)
        starting = [ratio for each in of for ratio in each["starting"]]
        shown = f"{statistics.median(starting):22.3f}" if starting else f"{'none':>22}"
        rows.append(
            f"{trainer:12} {len(of):6} {boundaries[0]:8}{statistics.median(boundaries):8.0f}"
            f"{boundaries[-1]:8} {statistics.median(each['step_s'] for each in of):7.2f} "
            f"{joining[0]:10.3f}{statistics.median(joining):8.3f}{joining[-1]:8.3f} {shown}"
        )
    return "\n".join(rows)
