"""Many faults for real replicas: python tests/resilience/campaign.py --faults 1000

Replicas train in processes, and `statehold coordinate` runs in one. Both are killed, stopped and
started again at random moments (faults); whoever was killed is replaced. The ledger says what must
hold of everything that the replicas have written down, beside the run of one replica that nothing
happens to. It prints the pauses of survivors: the longest time between two commits around a fault,
less the median step.

--replicas 8 --low 5: a run of eight replicas to the last step. Three of them are killed, each in
another step, and come back later. One more is killed while it takes the state. The run is compared
with undisturbed runs of 8 and of 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from resilience.faults import DECK, LEASE_S, Fault, Faults
from resilience.jobs import Job, Log, coordinated, undisturbed
from resilience.ledger import Ledger
from resilience.office import Office

REPLICAS = 4
FOREVER = 1 << 30
MICROBATCH_S = 0.02
MOMENTS = ("backward", "sum", "Gather", "Reduce", "Vote", "after Vote")


@dataclass
class Outcome:
    """logs: of all replicas. struck: the faults. joins: replicas that came after the first ones."""

    ledger: Ledger
    logs: list[Log]
    struck: list[Fault]
    fired: Counter[str]
    joins: Counter[str]


def campaign(
    folder: Path,
    faults: int,
    seed: int,
    *,
    size: int,
    settle_s: float,
    kinds: Sequence[str] = tuple(DECK),
) -> Outcome:
    """So many faults of these kinds, one after another, while `size` replicas train."""
    options = (("lease_s", LEASE_S),)
    with (
        Office(size, settle_s) as office,
        Job(folder, office, FOREVER, pause_s=MICROBATCH_S, options=options) as job,
    ):
        for _ in range(size):
            job.start()
        strikes = Faults(job, office, size, seed, kinds)
        try:
            while len(strikes.struck) < faults:
                strikes.strike()
            strikes.settle()
        except TimeoutError:
            print("\n".join(each.text for each in office.events[-40:]))
            print(strikes.struck[-3:], job.stacks(), sep="\n", flush=True)
            raise
        logs = job.stop()
    last = max(step for log in logs for step in log.losses)
    alone = undisturbed(folder / "alone", last + 1)[0]
    ledger = Ledger(logs, alone)
    return Outcome(ledger, logs, strikes.struck, strikes.fired, joins(logs, size))


def joins(logs: list[Log], size: int) -> Counter[str]:
    """Replicas that were started later, and that came back after they had been fenced."""
    names = [list(dict.fromkeys(vote.name for vote in log.votes)) for log in logs]
    return Counter(
        {
            "join": sum(bool(each) for each in names[size:]),
            "rejoin": sum(len(each) - 1 for each in names if each),
        }
    )


def shrink_and_grow(folder: Path, size: int, low: int, seed: int) -> tuple[list[Log], list[str]]:
    """From `size` replicas to `low` and back; the logs, and the moments of their deaths.

    All are killed inside of steps of their own. One of those that come back is killed, too, while
    it takes the state. The others hold until the last ones are there.
    """
    draw, gone = random.Random(seed), size - low
    dooms = [(2 * number + 2, draw.choice(MOMENTS)) for number in range(gone)]
    hold = 2 * gone + 4
    until = hold + 8
    file = folder / "go"
    with coordinated(size) as meeting, Job(folder, meeting, until, hold=(hold, file)) as job:
        for doom in [*dooms, *[None] * low]:
            job.start(doom)
        for process in job.processes[:gone]:
            process.join()
        for number in range(gone, size):  # nobody joins before these hold
            job.logged(number, hold)
        dooms.append((hold + 1, "Fetch"))
        for doom in [dooms[-1], *[None] * gone]:
            job.start(doom)
        meeting.wait_for("has connected", times=size + gone + 1)
        file.touch()
        logs = job.wait()
        died = [number for number, each in enumerate(job.processes) if each.exitcode]
        assert died == [*range(gone), size], [each.exitcode for each in job.processes]
    return logs, [f"step {step}: {moment}" for step, moment in dooms]


def pauses(logs: list[Log], faults: list[Fault], kind: str) -> list[float]:
    """Of each fault of the kind: the longest pause of a replica that nothing has struck then."""
    usual = statistics.median(each for log in logs for each in log.seconds.values())
    found = []
    for fault in faults:
        gaps = [
            end - begin - usual
            for number, log in enumerate(logs)
            for begin, end in itertools.pairwise(log.times)
            if fault.kind == kind and begin <= fault.at <= end
            if not any(each.victim == number and begin <= each.at <= end for each in faults)
        ]
        found += [max(gaps)] if gaps else []
    return sorted(found)


def tell(name: str, found: list[float]) -> None:
    if found:
        late = found[min(len(found) - 1, round(0.99 * len(found)))]
        middle = statistics.median(found)
        print(f"pauses, {name}: {len(found)}, median {middle:.3f} s, 99th percentile {late:.3f} s")


def report(outcome: Outcome) -> None:
    ledger = outcome.ledger
    print(f"struck {dict(Counter(each.kind for each in outcome.struck))}")
    print(f"fired {dict(outcome.fired)}, {dict(outcome.joins)}")
    print(f"{ledger.steps} steps, {ledger.commits} commits, {ledger.dropped} of them dropped")
    print(f"steps by number of members {dict(sorted(ledger.sizes.items()))}")
    counted = ledger.counted.total()
    print(f"{counted} samples counted, {ledger.lost} lost, {ledger.repeated} repeated")
    for kind in DECK:
        tell(kind, pauses(outcome.logs, outcome.struck, kind))


def many(
    folder: Path, faults: int, seed: int, *, kinds: Sequence[str] = tuple(DECK), **job: Any
) -> list[str]:
    """What is wrong after so many faults; from 100 on each kind must have fired."""
    outcome = campaign(folder, faults, seed, kinds=kinds, **job)
    report(outcome)
    silent = [kind for kind in kinds if not outcome.fired[kind]]
    if {"kill", "stop until fenced"} <= {*kinds}:
        silent += [kind for kind in ("join", "rejoin") if not outcome.joins[kind]]
    wanted = silent if faults >= 100 else []
    return outcome.ledger.violations + [f"no {kind} has fired" for kind in wanted]


def back(folder: Path, seed: int, *, size: int, low: int) -> list[str]:
    """What is wrong after `size`, `low` and `size` replicas, also in the last weights."""
    folder.joinpath("faulty").mkdir()
    logs, deaths = shrink_and_grow(folder / "faulty", size, low, seed)
    until = 1 + max(step for log in logs for step in log.losses)
    alone = undisturbed(folder / "one", until)[0]
    together = undisturbed(folder / "all", until, replicas=size)
    ledger, others = Ledger(logs, alone), Ledger(together, alone)
    ends = [log.weights for log in [*together, *logs] if log.weights is not None]
    print(f"deaths {deaths}", f"steps by number of members {dict(ledger.sizes)}", sep="\n")
    print(f"{until} steps; {len(ends)} replicas to the end, weights {alone.weights:x}")
    wrong = [f"other weights: {each:x}" for each in ends if each != alone.weights]
    if not {size, low} <= ledger.sizes.keys() or len(ends) != 2 * size:
        wrong.append("it was not what it should have been")
    return ledger.violations + others.violations + wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--settle", type=float, default=5.0, help="of the coordinator")
    parser.add_argument("--kinds", nargs="+", choices=[*DECK], default=[*DECK], metavar="KIND",
                        help=f"of the faults: {', '.join(DECK)}")  # fmt: skip
    parser.add_argument("--low", type=int, help="down to so many replicas, and back")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, seed, size = Path(name), options.seed, options.replicas
        if options.low:
            wrong = back(folder, seed, size=size, low=options.low)
        else:
            facts = {"size": size, "settle_s": options.settle, "kinds": options.kinds}
            wrong = many(folder, options.faults, seed, **facts)
    print(f"seed {options.seed}: {time.monotonic() - begin:.0f} s, load {os.getloadavg()}")
    print("\n".join(wrong[:20]), f"{len(wrong)} violations", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
