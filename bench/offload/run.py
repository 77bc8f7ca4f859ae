"""Runs the cases of bench.offload in turns, and shows them.

`python -m bench.offload DIR [DIR=RATE ...]`. Parameters in bfloat16. RATE limits a path, as in
"500MB". Every case runs in a process of its own in each round. The limit of a path is measured in
the same round. At the end of a round, parameters are compared with torch's bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.offload import cases
from bench.offload.cases import GROUPS, Case, Setup
from bench.offload.limits import bandwidth
from bench.offload.report import table

DEEPSPEED = harness.ROOT / "bench/peers/deepspeed_offload.py"
Record = dict[str, Any]


class Skipped(Exception):
    """A case that cannot run here; the message says why."""


def carry_out(case: Case, setup: Setup, updates: int, deepspeed: str | None) -> list[Record]:
    """One case in one round; a record for each thing that its process has measured."""
    if case.widths:
        _check_device(case, setup)
    if case.kind == "deepspeed":
        words = [*_deepspeed_words(case, setup, updates, deepspeed)]
        process = subprocess.Popen(words, text=True, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL)
        return _answers([process])[0]
    given = {"numel": setup.numel, "updates": updates}
    first_path = cases.directory_of(case.paths[0]) if case.paths else None
    with tempfile.TemporaryDirectory(dir=first_path) as folder:
        ranks = [dataclasses.replace(case, rank=n, folder=folder) for n in range(case.ranks)]
        words = [json.dumps({**given, "case": dataclasses.asdict(each)}) for each in ranks]
        name = "bench.offload.process"
        return _merged(_answers([harness.start(name, each, stdin=-1, stdout=-1) for each in words]))


def _check_device(case: Case, setup: Setup) -> None:
    import torch

    if not torch.cuda.is_available():
        raise Skipped("torch finds no device")
    there = torch.cuda.get_device_properties(0).total_memory
    if case.name == cases.ON_DEVICE and there < cases.ON_DEVICE_BYTES * setup.numel:
        needed = cases.ON_DEVICE_BYTES * setup.numel / harness.GB
        raise Skipped(f"it needs {needed:.0f} GB on a device with {there / harness.GB:.0f}")


def _deepspeed_words(case: Case, setup: Setup, updates: int, python: str | None) -> Iterator[str]:
    if python is None:
        raise Skipped("no --deepspeed PYTHON, an interpreter that has it")
    probe = [python, "-c", "import deepspeed"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        raise Skipped(f"{python} cannot import deepspeed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = cases.directory_of(case.paths[0]) if case.paths else None
    width = cases.width_of(setup.numel)
    widths = case.widths or [width] * (setup.numel // width**2 + 1)
    given = {"name": case.name, "widths": widths, "on_device": bool(case.widths),
             "updates": updates, "path": path, "buffers": cases.DEEPSPEED_BUFFERS,
             "subgroup": cases.DEEPSPEED_SUBGROUP, "port": port}  # fmt: skip
    yield from (python, str(DEEPSPEED), json.dumps(given))


def _answers(processes: Sequence[Any]) -> list[list[Record]]:
    """All begin to measure when the last one is ready."""
    with contextlib.ExitStack() as ended:
        for process in processes:
            ended.enter_context(process)  # which waits for its end, and closes its pipes
            ended.callback(process.kill)
        for process in processes:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError("a case has failed before it was ready; see above")
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        return [json.loads(process.stdout.read().splitlines()[-1]) for process in processes]


def _merged(answers: Sequence[list[Record]]) -> list[Record]:
    """Of several ranks, which all do the same: an update lasts until the last one has done it."""
    first = answers[0]
    for others in answers[1:]:
        for mine, theirs in zip(first, others, strict=True):
            for one, other in zip(mine["updates"], theirs["updates"], strict=True):
                one["wall_s"] = max(one["wall_s"], other["wall_s"])
                one["cpu_s"] += other["cpu_s"]
                one["io_bytes"] += other["io_bytes"]
            for one, other in zip(mine.get("saves", []), theirs.get("saves", []), strict=True):
                one["wall_s"] = max(one["wall_s"], other["wall_s"])
    return first


def measure(
    group: Sequence[Case], setup: Setup, updates: int, rounds: int, deepspeed: str | None
) -> list[Record]:
    """The records of all cases and rounds, those of a case with its limit."""
    found: list[Record] = []
    skipped: dict[str, str] = {}
    for number in range(rounds):
        for case in group:
            if case.name in skipped:
                continue
            try:
                records = carry_out(case, setup, updates, deepspeed)
            except Skipped as reason:
                skipped[case.name] = str(reason)
                print(f"skipped: {case.name}: {reason}")
                continue
            for record in records:
                record |= {"round": number, "of": case.of}
                _add_limit(case, record)
            found += records
        _check([record for record in found if record["round"] == number], group)
    return found


def _add_limit(case: Case, record: Record) -> None:
    """The bandwidth of each path, and the seconds that an update needs at least on its path."""
    moved = record.get("moved_bytes")
    if moved and all(moved) and not case.saves and case.ranks == 1:
        rates = [
            bandwidth(path, int(nbytes) // 2)
            for path, nbytes in zip(case.paths, moved, strict=True)
        ]
        record["limits"] = rates
        record["limit_s"] = sum(moved) / sum(rates)


def _check(records: Sequence[Record], group: Sequence[Case]) -> None:
    """The same gradients give the same bits, whatever the tiers."""
    plain = {case.name for case in group if case.gradients == "memory" and not case.trains}
    wanted = {r["digest"] for r in records if r["name"] in plain or r["name"].startswith("torch")}
    if len(wanted) > 1:
        raise AssertionError("the parameters of the cases differ")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="DIR[=RATE]")
    parser.add_argument("--only", default="host,paths", help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--params", type=float, default=5e8)
    parser.add_argument("--host", type=float, default=0, help="bytes that keep state")
    parser.add_argument("--updates", type=int, default=6, help="that are timed, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed")
    parser.add_argument("--out", type=Path, help="a directory for offload-GROUP.{json,txt}")
    given = parser.parse_args(arguments)
    if not given.paths and not {*given.only.split(",")} <= {"host", "device"}:
        parser.error("all groups but host and device need a path")
    for path in given.paths:
        Path(cases.directory_of(path)).mkdir(parents=True, exist_ok=True)
    width = cases.width_of(int(given.params))
    setup = Setup(int(given.params) // width**2 * width**2, tuple(given.paths), int(given.host))
    updates = given.updates + given.updates % 2  # torch takes two in a turn
    for name in given.only.split(","):
        group = GROUPS[name](setup)
        numel = cases.numel_of(group[0].widths) or setup.numel
        sized = dataclasses.replace(setup, numel=numel)
        records = measure(group, sized, updates, given.rounds, given.deepspeed)
        text = f"{facts(name, sized, updates, given.rounds)}\n{table(records, numel)}"
        print(text, flush=True)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"offload-{name}.txt").write_text(text + "\n")
            (given.out / f"offload-{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    return 0


def facts(name: str, setup: Setup, updates: int, rounds: int) -> str:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{name}: {setup.numel:,} parameters in bfloat16, {setup.state_bytes / harness.GB:.2f} GB "
        f"of state, {updates} updates in each of {rounds} rounds, load {load}\n"
        f"$ {' '.join(['python -m bench.offload', *sys.argv[1:]])}"
    )
