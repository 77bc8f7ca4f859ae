"""What SIGKILL of one of four replicas costs the others: statehold, and the ways of its peers.

Each kill is a job of its own, of 32 samples a step. The victim dies in a step, before the first or
the last microbatch of its share. A pause is the longest time that a survivor takes from the commit
before to the commit of that step, less its median step before. With torchrun a survivor is a new
process with the same rank. A job that has not ended in time counts as hung.

Invariants: subjects take turns, and the victim changes from round to round. What was thrown away is
what the survivors have computed of that step, less what they have contributed to it.
Not here: who is compared, and how it is started (subjects); what a replica does (killed).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.resilience.killed.work import Order
from bench.resilience.processes import Processes, lines
from bench.resilience.subjects import SUBJECTS, Subject

Record = dict[str, Any]

MICROBATCHES = 32
MODEL = (2, 256)  # layers, features
KILL, UNTIL = 10, 14
WARM_UP = 3  # steps that do not count for the median
DEADLINE_S = 90.0  # of a job that takes ten seconds


def measure(given: Namespace) -> list[Record]:
    found: list[Record] = []
    present = []
    for subject in SUBJECTS:
        if subject.module is None or _has(given.peers, subject.module):
            present.append(subject)
        else:
            reason = f"--peers has no {subject.module}"
            found.append({"subject": subject.name, "moment": subject.moment, "skipped": reason})
    for number in range(given.rounds):
        for subject in present:
            found.append(_killed(subject, given, number))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def _has(python: str, module: str) -> bool:
    words = [python, "-c", f"import {module}"]
    return Path(python).exists() and not subprocess.run(words, capture_output=True).returncode


def _killed(subject: Subject, given: Namespace, number: int) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        order = Order(
            folder=folder,
            replicas=given.replicas,
            microbatches=MICROBATCHES,
            layers=MODEL[0],
            features=MODEL[1],
            until=UNTIL,
            kill=KILL,
            victim=number % given.replicas,
            moment=subject.moment,
        )
        told = {"subject": subject.name, "moment": subject.moment}
        with subject.start(order, given.peers) as processes:
            if not have_ended(processes):
                return {**told, "victim": order.victim, "hangs": True}
        logs = [lines(Path(folder, f"replica{i}")) for i in range(order.replicas)]
    return {**told, **_facts(order, logs)}


def have_ended(processes: Processes) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    try:
        for each in processes:
            each.wait(deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        return False
    return True


def _facts(order: Order, logs: Sequence[list[Record]]) -> Record:
    survivors = [log for replica, log in enumerate(logs) if replica != order.victim]
    steps = [_steps(log, order.until) for log in survivors]
    usual = [statistics.median(each[i] for i in range(WARM_UP, order.kill)) for each in steps]
    pauses = [each[order.kill] - usual[i] for i, each in enumerate(steps)]
    computed = sum(_computed(log, order.kill) for log in survivors)
    batch = [index for log in logs for index in _contributed(log, order.kill)]
    if len(set(batch)) != len(batch):
        raise RuntimeError("a sample is in the batch twice")
    theirs = sum(len(_contributed(log, order.kill)) for log in survivors)
    return {
        "victim": order.victim,
        "microbatches": order.microbatches,
        "pause_s": max(pauses),
        "step_s": statistics.median(usual),
        "thrown_away": computed - theirs,
        "batch": len(batch),
    }


def _computed(log: list[Record], step: int) -> int:
    return sum(line["computes"][0] == step for line in log if "computes" in line)


def _contributed(log: list[Record], step: int) -> list[int]:
    return [index for line in log if line.get("step") == step for index in line["contributed"]]


def _steps(log: list[Record], until: int) -> dict[int, float]:
    """Of each step after the warm-up: the time from the commit before to its own, by number."""
    ends = {line["step"]: line["at"] for line in log if "step" in line}
    return {step: ends[step] - ends[step - 1] for step in range(WARM_UP, until)}


def table(records: Sequence[Record]) -> str:
    rows = [
        f"{'subject':22} {'killed':6} {'kills':>5} {'pause s: min med max':>24} {'step s':>7} "
        f"{'microbatches thrown away':>24} {'samples in the step':>20} {'hung':>5}",
    ]
    names = dict.fromkeys((each["subject"], each["moment"]) for each in records)
    for subject, moment in names:
        of = [each for each in records if (each["subject"], each["moment"]) == (subject, moment)]
        rows.append(f"{subject:22} {moment:6} {_line(of)}")
    return "\n".join(rows)


def _line(of: Sequence[Record]) -> str:
    if "skipped" in of[0]:
        return f"not measured: {of[0]['skipped']}"
    hung = sum("hangs" in each for each in of)
    of = [each for each in of if "hangs" not in each]
    if not of:
        return f"all {hung} jobs hung for {DEADLINE_S:g} s"
    pauses = sorted(each["pause_s"] for each in of)
    step = statistics.median(each["step_s"] for each in of)
    thrown = statistics.median(each["thrown_away"] for each in of)
    batch = statistics.median(each["batch"] for each in of)
    return (
        f"{len(of):5} {pauses[0]:8.3f}{statistics.median(pauses):8.3f}{pauses[-1]:8.3f} "
        f"{step:7.3f} {thrown:24.0f} {batch:10.0f} of {of[0]['microbatches']:6} {hung:5}"
    )
