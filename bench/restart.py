"""Restart after a trainer was killed: from the memory it left behind, beside a cold disk.

`python -m bench.restart`. In each round a trainer saves its state into [Memory(), Directory()], and
is killed with SIGKILL once both levels have the step. Then new processes restore the step several
times, in turns, into tensors that exist already:

    memory    both levels are there, as after a kill; the page cache is dropped all the same
    disk      the memory level was taken away, and the page cache dropped: another host, or a reboot
    warm      the same with the file in the page cache: a disk that would cost nothing

Invariants: "restore" lasts from opening the library to the last byte in place, verified. "process"
lasts from the start of the process, and includes its imports and the making of its state. Every
restore begins with a wiped state, and is compared bit for bit after the clock has stopped. "copy"
is the time in which the same process then copies as many bytes from memory to memory, on as many
threads as the engine has. Each figure is a median. The ratio to the disk is the median of the
ratios of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.mapped import Copies
from bench.report import Column, number, spread_text, table
from bench.state import SHAPES, TrainingState, build
from statehold import Checkpointer, Directory, Memory

CASES = ("memory", "disk", "warm")
SEED = 1
DEADLINE_S = 600.0

Record = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Where the levels of the run are."""

    memory: Path
    disk: Path

    def checkpointer(self) -> Checkpointer:
        # Without an agent: it would use the disk meanwhile, and the step is there already.
        memory = Memory(path=self.memory, keep=1, agent=False)
        levels = [memory, Directory(path=self.disk, keep=1)]
        return Checkpointer(self.disk, levels=levels)

    def words(self) -> list[str]:
        return [str(self.memory), str(self.disk)]


# -- in processes of their own ---------------------------------------------------------------------


def train(places: Places, size: str) -> None:
    """Save one step, say so once both levels have it, and wait to be killed."""
    state = build(size)
    state.fill(SEED)
    ckpt = places.checkpointer()
    ckpt.save(state.step(), vars_of(state)).wait("committed", DEADLINE_S)
    ckpt.flush(DEADLINE_S)
    print("committed", flush=True)
    signal.pause()


def restore(places: Places, size: str) -> Record:
    state = build(size)
    state.fill(SEED + 1)
    state.wipe()
    begin, computed = time.perf_counter(), time.process_time()
    ckpt = places.checkpointer()
    step = ckpt.restore(vars_of(state))
    seconds, computed = time.perf_counter() - begin, time.process_time() - computed
    ended = time.monotonic()
    difference = state.difference(SEED, 1) if step == 1 else f"step {step} was restored"
    ckpt.close()
    return {
        "restore_s": seconds,
        "processor_s": computed,
        "ended": ended,
        "difference": difference,
        "bytes": state.total_bytes(),
        "copy_s": plain_copy(state.total_bytes()),
    }


def vars_of(state: TrainingState) -> dict[str, Any]:
    return {"model": state.model, "optimizer": state.optimizer, "progress": state.progress}


def plain_copy(nbytes: int) -> float:
    """Seconds to copy so many bytes, by the rate of a part of them."""
    part = min(nbytes, 1 << 30)
    copies = Copies(
        [torch.ones(part, dtype=torch.uint8, device="cpu")], min(4, os.cpu_count() or 1)
    )
    return min(copies.whole().wall_s for _ in range(3)) * nbytes / part


# -- the rounds ------------------------------------------------------------------------------------


def process(task: str, places: Places, size: str) -> subprocess.Popen[str]:
    words = "--task", task, "--size", size, *places.words()
    return harness.start("bench.restart", *words, stdout=subprocess.PIPE)


def killed(places: Places, size: str) -> None:
    """A run whose trainer was killed."""
    with process("train", places, size) as trainer:
        assert trainer.stdout is not None
        said = trainer.stdout.readline()
        trainer.kill()
    if said != "committed\n":
        raise RuntimeError("the trainer ended before its step was at both levels")


def restored(places: Places, size: str) -> Record:
    begin = time.monotonic()
    with process("restore", places, size) as child:
        assert child.stdout is not None
        told = child.stdout.read()
    if child.returncode != 0:
        raise RuntimeError(f"a restore ended with exit code {child.returncode}")
    record: Record = json.loads(told)
    if record["difference"] is not None:
        raise RuntimeError(f"wrong bytes were restored: {record['difference']}")
    return record | {"process_s": record["ended"] - begin}


@contextlib.contextmanager
def without(directory: Path) -> Iterator[None]:
    """Take a level away for a while."""
    aside = directory.with_name(directory.name + ".aside")
    directory.rename(aside)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)


def one(case: str, places: Places, size: str) -> Record:
    with contextlib.ExitStack() as stack:
        if case != "memory":
            stack.enter_context(without(places.memory))
        harness.drop_caches(places.disk, gently=size == "smoke")
        if case == "warm":
            harness.warm_caches(places.disk)
        return restored(places, size)


def rounds(places: Places, options: argparse.Namespace) -> Iterator[dict[str, Record]]:
    """All cases in turns, every other round in the opposite order, each of a new run."""
    for number_ in range(options.reps):
        killed(places, options.size)
        try:
            order = CASES if number_ % 2 == 0 else CASES[::-1]
            yield {case: one(case, places, options.size) for case in order}
        finally:
            shutil.rmtree(places.memory)
            shutil.rmtree(places.disk)


def rows(records: list[dict[str, Record]]) -> list[Record]:
    def ratios(case: str, key: str) -> dict[str, float] | None:
        return harness.spread(each["disk"][key] / each[case][key] for each in records)

    found = []
    for case in CASES:
        mine = [record[case] for record in records]
        row: Record = {"case": case}
        for key in ("restore_s", "process_s", "processor_s", "copy_s"):
            row[key] = harness.spread(each[key] for each in mine)
        row["gb_s"] = mine[0]["bytes"] / row["restore_s"]["median"] / harness.GB
        row["faster"] = ratios(case, "restore_s")
        row["process_faster"] = ratios(case, "process_s")
        row["of_copy"] = harness.spread(each["restore_s"] / each["copy_s"] for each in mine)
        found.append(row)
    return found


COLUMNS: list[Column] = [
    ("from", lambda r: r["case"]),
    ("restore s", lambda r: spread_text(r["restore_s"], 3)),
    ("x faster than disk", lambda r: spread_text(r["faster"])),
    ("GB/s", lambda r: number(r["gb_s"])),
    ("x plain copy", lambda r: spread_text(r["of_copy"])),
    ("processor s", lambda r: spread_text(r["processor_s"], 3)),
    ("process s", lambda r: spread_text(r["process_s"], 2)),
    ("x faster", lambda r: spread_text(r["process_faster"])),
]


def measure(options: argparse.Namespace) -> list[dict[str, Record]]:
    made = [tempfile.mkdtemp(prefix="restart-", dir=each) for each in (options.memory, options.dir)]
    places = Places(Path(made[0]) / "levels", Path(made[1]) / "run")
    records = []
    try:
        for record in rounds(places, options):
            records.append(record)
            print("  ".join(f"{case} {each['restore_s']:.3f}" for case, each in record.items()))
    finally:
        for directory in made:
            shutil.rmtree(directory)
    return records


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="350m")
    parser.add_argument("--reps", type=int, default=5, help="trainers that are killed")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="on tmpfs")
    parser.add_argument("--dir", type=Path, help="the disk (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/restart")
    parser.add_argument("--task", choices=("train", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("places", nargs="*", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.task == "train":
        train(Places(*options.places), options.size)
    if options.task == "restore":
        print(json.dumps(restore(Places(*options.places), options.size)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.dir = (options.dir or options.out).resolve()
    command = " ".join(["python -m bench.restart", *sys.argv[1:]])
    facts = harness.facts(options.dir) | {"command": command}
    records = measure(options)
    found = rows(records)
    total = records[0]["disk"]["bytes"]
    lines = [*(f"{key}: {value}" for key, value in facts.items()), f"bytes: {total}", ""]
    lines += table(found, COLUMNS)
    (options.out / "restart.txt").write_text("\n".join(lines) + "\n")
    whole = {"schema": 1, "facts": facts, "rows": found, "records": records}
    (options.out / "restart.json").write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
