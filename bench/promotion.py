"""Copies to a slower level while training: the bandwidth they take, and what they cost the loop.

`python -m bench.promotion`. Processes in turns run the same loop: a step is a fixed number of
single-threaded matrix products and an optimizer step that waits for the gate; every few steps the
state is saved into memory. In one of the two the steps go on to a disk, under a limit of a quarter
of what the disk took in the same run, and a copy is under way nearly all of the time.

    alone       [Memory()]
    promoting   [Memory(), Directory(bytes_per_s=limit)]

Invariants: "of limit" is the bandwidth of whole copies, from the first byte to the last, as the
level's own status tells it; "x alone" the time of the loop over that of the loop alone in the same
round. The loop begins once the memory level has all its files. What reached the disk is restored
and compared bit for bit after the clock has stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import harness
from bench.report import Column, number, spread_text, table
from bench.state import SHAPES, TrainingState, build
from bench.train import Compute
from statehold import Checkpointer, Directory, Memory, _core

CASES = ("alone", "promoting")
SHARE = 4  # the limit is this part of the device
SEED = 1
SAMPLE_S = 0.01
WARM_UP = 4  # saves, until every file of the memory level is there
DEADLINE_S = 600.0
BLOCK_BYTES, DEPTH = 16 << 20, 32

Record = dict[str, Any]


class Copies:
    """Watches the copies to a level: (bytes a second, bytes) of each that was seen to its end."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self._ckpt = ckpt
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.rates: list[float] = []

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        step, begun, last = None, (0.0, 0), (0.0, 0)
        while not self._ended.wait(SAMPLE_S):
            status = next(each for each in self._ckpt.levels() if each.name == "directory")
            now = time.perf_counter(), status.bytes_done
            if status.copying != step:
                self._note(begun, last)
                step, begun, last = status.copying, now, now
            elif now[1] != last[1]:
                begun, last = (begun if begun[1] else now), now

    def _note(self, begun: tuple[float, int], last: tuple[float, int]) -> None:
        if last[0] > begun[0] > 0 and begun[1]:
            self.rates.append((last[1] - begun[1]) / (last[0] - begun[0]))


def vars_of(state: TrainingState) -> dict[str, Any]:
    return {"model": state.model, "optimizer": state.optimizer, "progress": state.progress}


def loop(options: argparse.Namespace) -> Record:
    """One case, in this process."""
    compute, state = Compute(), build(options.size)
    state.fill(SEED)
    compute(1)
    levels: list[Any] = [Memory(path=options.memory / "levels", keep=2, agent=False)]
    if options.case == "promoting":
        disk = Directory(path=options.dir / "run", keep=1, bytes_per_s=options.limit)
        levels.append(disk)
    with Checkpointer(options.dir / "own", levels=levels) as ckpt:
        for _ in range(WARM_UP):
            ckpt.save(state.step(), vars_of(state)).wait("committed", DEADLINE_S)
        with contextlib.ExitStack() as stack:
            copies = stack.enter_context(Copies(ckpt)) if len(levels) > 1 else None
            begin = time.perf_counter()
            for index in range(options.steps):
                compute(options.work)
                saved = state.step()
                if index % options.interval == 0:
                    ckpt.save(saved, vars_of(state))
            wall = time.perf_counter() - begin
        found: Record = {"wall_s": wall, "rates": copies.rates if copies else []}
        found |= {"bytes": state.total_bytes(), "last": state.progress["step"]}
    if copies is not None:
        found["difference"] = difference(options, state)
    return found


def difference(options: argparse.Namespace, state: TrainingState) -> str | None:
    """What is wrong with the step on the disk."""
    state.wipe()
    with Checkpointer(options.dir / "run") as ckpt:
        step = ckpt.restore(vars_of(state))
    return state.difference(SEED, step or 0)


# -- the rounds ------------------------------------------------------------------------------------


def device_rate(directory: Path, nbytes: int) -> float:
    """Bytes a second of direct writes into a new file."""
    path = str(directory / "probe")
    fs = _core.open_fs("auto", DEPTH)
    try:
        whole = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        return whole / _core.raw_write(fs, path, whole, BLOCK_BYTES, DEPTH, False)
    finally:
        fs.close()
        Path(path).unlink(missing_ok=True)


def process(case: str, limit: int, options: argparse.Namespace, places: list[Path]) -> Record:
    words = ["--case", case, "--limit", str(limit), "--size", options.size]
    words += ["--steps", str(options.steps), "--interval", str(options.interval)]
    words += ["--work", str(options.work), "--memory", str(places[0]), "--dir", str(places[1])]
    with harness.start("bench.promotion", *words, stdout=subprocess.PIPE) as child:
        told, _ = child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"{case} ended with exit code {child.returncode}")
    record: Record = json.loads(told)
    if record.get("difference") is not None:
        raise RuntimeError(f"wrong bytes on the disk: {record['difference']}")
    return record


def rounds(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Both cases in turns, every other round in the opposite order."""
    nbytes = build(options.size).total_bytes()
    for number_ in range(options.reps):
        made = [Path(tempfile.mkdtemp(prefix="promote-", dir=d)) for d in options.places]
        try:
            limit = int(device_rate(made[1], nbytes) / SHARE)
            found: dict[str, Any] = {"limit": limit}
            for case in CASES if number_ % 2 == 0 else CASES[::-1]:
                found[case] = process(case, limit, options, made)
                for each in made:
                    shutil.rmtree(each)
                    each.mkdir()
            yield found
        finally:
            for each in made:
                shutil.rmtree(each)


def rows(records: list[dict[str, Any]]) -> list[Record]:
    found = []
    for case in CASES:
        pairs = [(record[case]["wall_s"], record["alone"]["wall_s"]) for record in records]
        rates = [(rate, each["limit"]) for each in records for rate in each[case]["rates"]]
        found.append(
            {
                "case": case,
                "wall_s": harness.spread(wall for wall, _ in pairs),
                "ratio": harness.spread(wall / alone for wall, alone in pairs),
                "of_limit": harness.spread(rate / limit for rate, limit in rates),
                "copies": len(rates),
                "limit": harness.spread(each["limit"] / harness.GB for each in records),
            }
        )
    return found


COLUMNS: list[Column] = [
    ("case", lambda r: r["case"]),
    ("loop s", lambda r: spread_text(r["wall_s"], 3)),
    ("x alone", lambda r: spread_text(r["ratio"], 3)),
    ("limit GB/s", lambda r: spread_text(r["limit"])),
    ("of limit", lambda r: spread_text(r["of_limit"], 3)),
    ("copies", lambda r: number(r["copies"], 0)),
]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.promotion", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="80m")
    parser.add_argument("--reps", type=int, default=7, help="rounds over both loops")
    parser.add_argument("--steps", type=int, default=40, help="of each loop")
    parser.add_argument("--interval", type=int, default=5, help="steps from save to save")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="compute of a step, alone")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="on tmpfs")
    parser.add_argument("--dir", type=Path, help="the disk (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/promotion")
    for name in ("--limit", "--work"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.case:
        print(json.dumps(loop(options)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.places = [options.memory, (options.dir or options.out).resolve()]
    command = " ".join(["python -m bench.promotion", *sys.argv[1:]])
    facts = harness.facts(options.places[1]) | {"command": command}
    options.work = options.work or Compute().calibrate(options.step_seconds)
    records = []
    for record in rounds(options):
        records.append(record)
        print("  ".join(f"{case} {record[case]['wall_s']:.3f} s" for case in CASES), flush=True)
    found = rows(records)
    lines = [*(f"{key}: {value}" for key, value in facts.items()), ""]
    lines += [f"bytes: {records[0]['alone']['bytes']}, a save every {options.interval} steps", ""]
    lines += table(found, COLUMNS)
    (options.out / "promotion.txt").write_text("\n".join(lines) + "\n")
    whole = {"schema": 1, "facts": facts, "rows": found, "records": records}
    (options.out / "promotion.json").write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
