"""`python -m bench`: run the benchmarks, each case in its own process, and write the report.

Owns: the options, the order, the processes. One run measures everything that its ratios compare:
the limits before, between and after the benchmarks, and in each round every peer once, so that slow
drift of a shared machine touches all of them alike.
Invariants: every case gets an empty directory that is removed afterwards, starts after a sync and
with the page cache dropped, and is skipped with its reason when memory does not suffice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import harness, report
from bench.case import Case, run_case
from bench.peers import DEFAULT_PEERS, PEERS
from bench.state import SHAPES, build
from bench.train import NO_SAVES

BENCHES = ("save", "train", "restore")
OWN_SAVES = 10  # "the first save as fast as the tenth"
TRAIN_SLOW_INTERVAL = 10
CASE_DEADLINE_S = 1800
SPARE_MEMORY = 1 << 30


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny state, seconds; not a result")
    parser.add_argument("--size", choices=tuple(SHAPES), default="350m")
    parser.add_argument("--only", choices=(*BENCHES, "limit"), help="one benchmark and the limits")
    parser.add_argument("--peers", help=f"comma-separated, of: {','.join(PEERS)}")
    parser.add_argument("--reps", type=int, default=3, help="rounds over all peers")
    parser.add_argument("--saves", type=int, default=3, help="saves per process of a peer")
    parser.add_argument("--train-steps", type=int, default=8, help="steps when saving every step")
    parser.add_argument("--step-seconds", type=float, default=0.3, help="compute of a step")
    parser.add_argument("--dir", type=Path, help="the storage under test (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "out")
    parser.add_argument("--in-process", action="store_true", help="no process per case (smoke)")
    options = parser.parse_args(arguments)
    names = options.peers.split(",") if options.peers else list(DEFAULT_PEERS)
    if unknown := set(names) - set(PEERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    options.peers = names
    if options.smoke:
        options.size, options.reps, options.saves = "smoke", 1, 3
        options.train_steps, options.step_seconds = 4, 0.002
    if options.in_process and options.size != "smoke":
        parser.error("--in-process is for --smoke: figures need a process per case")
    return options


def cases_of(bench: str, options: argparse.Namespace, round_: int, work: int) -> Iterator[Case]:
    """The cases of one round of one benchmark; the directory is filled in when they run."""
    if bench == "limit":
        return  # main measures it after every benchmark
    base = Case(bench, "", size=options.size, repetition=round_, work=work)
    if options.size == "smoke":
        base = dataclasses.replace(base, staging_bytes=64 << 20)
    if bench == "train":
        yield from _train_cases(base, options)
        return
    for name in options.peers:
        saves = options.saves
        if name.startswith("statehold") and not options.smoke:
            saves = max(saves, OWN_SAVES)
        if bench == "save" or PEERS[name].restores:
            yield dataclasses.replace(base, peer=name, saves=saves)


def _train_cases(base: Case, options: argparse.Namespace) -> Iterator[Case]:
    """No saves; a save after every step; a save after every tenth."""
    rare = 2 * TRAIN_SLOW_INTERVAL if not options.smoke else options.train_steps
    yield dataclasses.replace(base, peer=NO_SAVES, steps=rare)
    for name in options.peers:
        yield dataclasses.replace(base, peer=name, steps=options.train_steps, interval=1)
        if not options.smoke:
            yield dataclasses.replace(base, peer=name, steps=rare, interval=TRAIN_SLOW_INTERVAL)


class Runner:
    """Runs cases one at a time and keeps their records."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._root = options.dir or options.out / "data"
        self._root.mkdir(parents=True, exist_ok=True)
        self._state_bytes = build(options.size).total_bytes()
        self.records: list[dict[str, Any]] = []

    def run(self, case: Case) -> dict[str, Any]:
        directory = Path(tempfile.mkdtemp(prefix=f"{case.bench}-{case.peer}-", dir=self._root))
        case = dataclasses.replace(case, directory=str(directory))
        try:
            record = self._refusal(case) or self._measure(case)
        finally:
            shutil.rmtree(directory)
        self.records.append(record)
        print(report.progress_line(record), flush=True)
        return record

    def _measure(self, case: Case) -> dict[str, Any]:
        if self._options.in_process:
            return run_case(case)
        harness.drop_caches(case.path, gently=case.smoke)
        return run_process(case, self._options.out)

    def _refusal(self, case: Case) -> dict[str, Any] | None:
        entry = PEERS.get(case.peer)
        needed = self._state_bytes * (1 + (entry.extra_states if entry else 0)) + SPARE_MEMORY
        if (free := harness.available_memory()) >= needed or self._options.smoke:
            return None
        reason = f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are available"
        return _record_of(case, "unavailable", reason)


def _record_of(case: Case, status: str, reason: str) -> dict[str, Any]:
    return {"case": dataclasses.asdict(case), "status": status, "reason": reason, "process_s": 0.0}


def run_process(case: Case, out: Path) -> dict[str, Any]:
    """Run `python -m bench.case` and read its record; its output goes to out/cases.log."""
    with tempfile.TemporaryDirectory(dir=out) as exchange:
        spec, result = Path(exchange, "case.json"), Path(exchange, "record.json")
        spec.write_text(json.dumps(dataclasses.asdict(case)))
        with (out / "cases.log").open("a") as log:
            print(f"== {spec.read_text()}", file=log, flush=True)
            code = _wait_for(harness.start("bench.case", spec, result, stdout=log, stderr=log))
        if result.exists():
            return dict(json.loads(result.read_text()))
    return _record_of(case, "failed", f"the process ended with {code}: see {out / 'cases.log'}")


def _wait_for(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            return f"status {process.wait(CASE_DEADLINE_S)}"
        except subprocess.TimeoutExpired:
            process.kill()
            return f"no result after {CASE_DEADLINE_S} s"


def main(arguments: list[str] | None = None) -> int:
    """0 when every case ran or was unavailable, 1 when one failed or lost bytes."""
    options = parse(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = harness.facts(options.dir or options.out)
    runner = Runner(options)
    benches = (options.only,) if options.only else BENCHES
    limit = Case("limit", "", size=options.size, step_s=options.step_seconds)
    work = runner.run(limit).get("result", {}).get("work", 1)
    for round_ in range(options.reps):
        for bench in benches:
            for case in cases_of(bench, options, round_, work):
                runner.run(case)
            if not options.smoke:
                runner.run(dataclasses.replace(limit, repetition=round_ + 1))
    summary = report.summarise(runner.records)
    report.write(options.out, facts, vars(options), runner.records, summary)
    return 1 if report.failures(runner.records) else 0
