"""Many faults for real replicas: python tests/resilience/campaign.py --faults 1000

Four replicas train. Replicas are killed, or stopped and continued, and the coordinator is
restarted, at random moments; another replica is started for each that was killed. The losses of
every step must be those of an undisturbed run, bit for bit, on every replica, and no replica may
compute a microbatch twice in a step. It prints the pauses of survivors: the longest time between
two commits around a fault, less the median step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
from resilience.jobs import Job, Log, Meeting, coordinated, undisturbed

REPLICAS = 4
FOREVER = 1 << 30
MICROBATCH_S = 0.02


class Fault(NamedTuple):
    """What has happened, when, and to which replica."""

    kind: str
    at: float
    victim: int


class Campaign:
    """One job under faults. seed: of the faults and their moments."""

    def __init__(self, job: Job, meeting: Meeting, seed: int) -> None:
        self.job, self.meeting = job, meeting
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[Fault] = []

    def run(self, faults: int) -> None:
        for _ in range(REPLICAS):
            self.job.start()
        for _ in range(faults):
            self.settle()
            time.sleep(self.random.uniform(0, 0.2))
            kind = self.random.choices(("kill", "stop", "coordinator"), (6, 3, 1))[0]
            getattr(self, kind)()
            self.counts[kind] += 1
        self.settle()

    def settle(self) -> None:
        """Until all replicas take part again."""
        try:
            self.job.progress(REPLICAS, steps=4)
        except TimeoutError:
            print("\n".join(self.meeting.events[-40:]), self.counts, sep="\n", flush=True)
            print(self.job.stacks())
            raise

    def kill(self) -> None:
        victim = self._strikes("kill")
        victim.kill()
        victim.join()
        self.job.start()

    def stop(self) -> None:
        victim = self._strikes("stop")
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.2, 2.5))
        os.kill(victim.pid, signal.SIGCONT)

    def coordinator(self) -> None:
        self.meeting.restart()

    def _strikes(self, kind: str) -> Any:
        victim = self.random.choice(self.job.living())
        number = self.job.processes.index(victim)
        self.faults.append(Fault(kind, time.monotonic(), number))
        return victim


def pauses(logs: list[Log], faults: list[Fault], kind: str) -> list[float]:
    """Of each fault of the kind: the longest pause of a survivor."""
    usual = statistics.median(each for log in logs for each in log.seconds.values())
    found = []
    for what, at, victim in faults:
        gaps = [
            end - begin - usual
            for number, log in enumerate(logs)
            for begin, end in itertools.pairwise(log.times)
            if what == kind and number != victim and begin <= at <= end
        ]
        found += [max(gaps)] if gaps else []
    return sorted(found)


def violations(logs: list[Log], folder: Path) -> list[str]:
    last = max(step for log in logs for step in log.losses)
    alone = undisturbed(folder / "alone", last + 1)[0]
    found = [
        f"replica {number}, step {step}: loss {loss}, undisturbed {alone.losses[step]}"
        for number, log in enumerate(logs)
        for step, loss in log.losses.items()
        if loss != alone.losses[step]
    ]
    twice = [(n, each) for n, log in enumerate(logs) for each, k in log.computed.items() if k > 1]
    print(f"{last + 1} steps, {sum(len(log.losses) for log in logs)} commits")
    return found + [f"replica {n} computes {each} twice" for n, each in twice]


def report(name: str, found: list[float]) -> None:
    if found:
        late = found[min(len(found) - 1, round(0.99 * len(found)))]
        middle = statistics.median(found)
        print(f"{name}: {len(found)} pauses, median {middle:.3f} s, 99th percentile {late:.3f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.monotonic()
        with (
            coordinated(REPLICAS) as meeting,
            Job(folder, meeting, FOREVER, pause_s=MICROBATCH_S, options=(("lease_s", 1.0),)) as job,
        ):
            campaign = Campaign(job, meeting, options.seed)
            campaign.run(options.faults)
            logs = job.stop()
        print(
            f"{dict(campaign.counts)} in {time.monotonic() - begin:.0f} s, load {os.getloadavg()}"
        )
        wrong = violations(logs, folder)
        for kind in ("kill", "stop"):
            report(kind, pauses(logs, campaign.faults, kind))
        print("\n".join(wrong[:20]), f"{len(wrong)} violations", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
