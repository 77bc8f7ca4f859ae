"""`python -m bench.ranks`: several ranks on one node save, train, and restore in other layouts.

Owns: the options and the order. One run measures everything that its ratios compare: the limits of
the storage before and after each round, and in each round every library once.
Invariants: outside smoke runs each task has processes of its own, that start after a sync and with
the page cache dropped. Smoke runs put tasks of as many ranks into one job, and measure limits here.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import harness
from bench.case import Case, run_case
from bench.ranks import report
from bench.ranks.job import run_job
from bench.ranks.task import Task
from bench.run import run_process
from bench.state import SHAPES
from bench.train import NO_SAVES, Compute

BENCHES = ("save", "train", "restore")
OWN_SAVES = 10
# Peer -> the layout that it saves.
SAVERS = {
    "statehold": "fsdp-4",
    "statehold-independent": "shares-4",
    "statehold-alone": "share-4",
    "dcp-1": "fsdp-4",
    "dcp-2": "fsdp-4",
    "dcp-async": "fsdp-4",
    "dcp-async-cached": "fsdp-4",
    "dcp-process": "fsdp-4",
    "dcp-process-shm": "fsdp-4",
}
SMOKE_PEERS = ("statehold", "statehold-independent", "statehold-alone", "dcp-2", "dcp-async-cached")
READERS = ("statehold", "dcp-2")
# Saved layout -> into which it is restored.
RESTORES = {
    "fsdp-4": ("fsdp-4", "fsdp-3", "fsdp-2", "whole", "tp-4", "columns-4"),
    "tp-2-fsdp-2": ("fsdp-4",),
    "whole": ("fsdp-4",),
}
PAIRS = {
    f"{source}:{target}": (source, target)
    for source, targets in RESTORES.items()
    for target in targets
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny state; not a result")
    parser.add_argument("--size", choices=tuple(SHAPES), default="130m")
    parser.add_argument("--only", choices=(*BENCHES, "limit"), help="one benchmark and the limits")
    parser.add_argument("--peers", help=f"comma-separated, of: {','.join(SAVERS)}")
    parser.add_argument(
        "--pairs", help="comma-separated SOURCE:TARGET layouts to restore (default: all)"
    )
    parser.add_argument("--reps", type=int, default=3, help="rounds over all peers")
    parser.add_argument("--saves", type=int, default=4, help="saves per process of a peer")
    parser.add_argument("--train-steps", type=int, default=8)
    parser.add_argument("--step-seconds", type=float, default=0.3, help="compute of a step, alone")
    parser.add_argument("--staging-mib", type=int, default=1024, help="of each rank")
    parser.add_argument("--dir", type=Path, help="the storage under test (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "out" / "ranks")
    options = parser.parse_args(arguments)
    default = SMOKE_PEERS if options.smoke else tuple(SAVERS)
    options.peers = options.peers.split(",") if options.peers else list(default)
    if unknown := set(options.peers) - set(SAVERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    options.pairs = options.pairs.split(",") if options.pairs else list(PAIRS)
    if unknown := set(options.pairs) - set(PAIRS):
        parser.error(f"unknown pairs: {', '.join(sorted(unknown))}")
    if options.smoke:
        options.size, options.reps, options.saves, options.staging_mib = "smoke", 1, 3, 64
        options.train_steps, options.step_seconds = 3, 0.002
    return options


class Runner:
    """Plans the tasks of a round, runs them, keeps their records."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._root = (options.dir or options.out / "data").resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        self.records: list[dict[str, Any]] = []
        self.limits: list[dict[str, Any]] = []

    def limit(self) -> None:
        """What the storage does for one process, as bench/limit.py measures it."""
        directory = self._root / "limit"
        directory.mkdir()
        case = Case("limit", str(directory), size=self._options.size)
        try:
            smoke = self._options.smoke
            self.limits.append(run_case(case) if smoke else run_process(case, self._options.out))
        finally:
            shutil.rmtree(directory)

    def round(self, number: int, work: int) -> None:
        """Every benchmark once."""
        benches = (self._options.only,) if self._options.only else BENCHES
        plans = {"save": self._saves, "train": self._trains, "restore": self._restores}
        tasks: list[Task] = [self._task(number, "raw", "raw", "shares-4")]
        for bench in benches:
            if bench in plans:
                tasks += plans[bench](number, work)
        try:
            for job in self._jobs(tasks):
                self._run(job)
        finally:
            for left in self._root.iterdir():
                shutil.rmtree(left)

    def _task(self, number: int, kind: str, peer: str, layout: str, **more: Any) -> Task:
        options = self._options
        name = f"{kind}-{peer}-{layout}"
        if kind in ("write", "restore"):
            name = f"step-{peer}-{more.get('source', layout)}"
        return Task(
            kind,
            peer,
            layout,
            str(self._root / name),
            size=options.size,
            repetition=number,
            staging_bytes=options.staging_mib << 20,
            **more,
        )

    def _saves(self, number: int, work: int) -> Iterator[Task]:
        for peer in self._options.peers:
            own = peer.startswith("statehold") and not self._options.smoke
            saves = max(OWN_SAVES, self._options.saves) if own else self._options.saves
            yield self._task(number, "save", peer, SAVERS[peer], saves=saves)

    def _trains(self, number: int, work: int) -> Iterator[Task]:
        peers = [peer for peer in self._options.peers if SAVERS[peer] == "fsdp-4"]
        for peer in [NO_SAVES, *peers]:
            steps = self._options.train_steps
            yield self._task(number, "train", peer, "fsdp-4", steps=steps, work=work)

    def _restores(self, number: int, work: int) -> Iterator[Task]:
        pairs = [PAIRS[pair] for pair in self._options.pairs]
        readers = [peer for peer in READERS if peer in self._options.peers]
        for peer, source in itertools.product(readers, dict.fromkeys(each for each, _ in pairs)):
            yield self._task(number, "write", peer, source)
        for (source, target), peer in itertools.product(pairs, readers):
            yield self._task(number, "restore", peer, target, source=source)

    def _jobs(self, tasks: Iterable[Task]) -> Iterator[list[Task]]:
        if not self._options.smoke:
            yield from ([task] for task in tasks)
            return
        # Restores of what was written before come last, whatever the number of ranks.
        ordered = sorted(tasks, key=lambda task: (task.kind == "restore", task.ranks))
        for _, group in itertools.groupby(ordered, lambda t: (t.kind == "restore", t.ranks)):
            yield list(group)

    def _run(self, tasks: list[Task]) -> None:
        for task in tasks:
            task.path.mkdir(exist_ok=True)
        harness.drop_caches(self._root, gently=self._options.smoke)
        records = run_job(tasks, self._options.out)
        for task, record in zip(tasks, records, strict=True):
            if task.kind not in ("write", "restore"):
                shutil.rmtree(task.path)
            self.records.append(record)
            print(report.progress_line(record), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """0 when all tasks of all ranks ended well, 1 when one failed or lost bytes."""
    options = parse(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = harness.facts(options.dir or options.out) | {"command": report.command(options)}
    work = 1 if options.smoke else Compute().calibrate(options.step_seconds)
    runner = Runner(options)
    runner.limit()
    for number in range(options.reps):
        runner.round(number, work)
        if not options.smoke:
            runner.limit()
    summary = report.summarise(runner.records, runner.limits)
    report.write(options, facts, runner.records, runner.limits, summary)
    return 1 if summary["failed"] else 0
