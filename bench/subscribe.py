"""Updates of a model in another process, beside a plain copy of the bytes that changed.

`python -m bench.subscribe`. A trainer saves each step into a memory level. Another process has the
same model, of 500 MB, and gets each step by statehold.subscribe(). Two kinds of steps:

    tensors     one tensor in twenty changes, and the others are frozen
    scattered   one MiB in twenty changes, all over the model

"read" lasts from the moment when the consumer sees the step until its pieces are verified in spare
memory. "apply" is the time in which the model stands still. "lag" lasts from the commit to the last
byte in place. "processor" is what an update takes of all processors. "memcpy" copies what changed,
a range at a time, on one thread, from memory that was just written, in the same process after each
update.

Then the trainer runs a loop of steps, each with a save, in turns with the consumer and without it.

Invariants: after each update the model is compared with the content of its step, bit for bit, after
the clock has stopped. Figures are medians. The ratio is the median of the ratios of all updates.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.report import Column, number, spread_text, table
from bench.train import Compute
from statehold import Checkpointer, Memory, subscribe

MIB = 1 << 20
LAYERS = 60
SIDES = {"500m": 1448, "smoke": 64}
EVERY = 20
KINDS = ("tensors", "scattered")
DEADLINE_S = 600.0
IDLE_S = 0.2

Record = dict[str, Any]


class Model:
    """Layers whose content follows from the number of changes."""

    def __init__(self, size: str, kind: str) -> None:
        side = SIDES[size]
        layers = [torch.nn.Linear(side, side, bias=False) for _ in range(LAYERS)]
        self.module = torch.nn.Sequential(*layers)
        self.weights = [layer.weight.detach() for layer in layers]
        numel = MIB // 4 if kind == "scattered" else self.weights[0].numel()
        flat = [part for weight in self.weights for part in weight.view(-1).split(numel)]
        self.changing = flat[::EVERY]
        self.fixed = [each for index, each in enumerate(flat) if index % EVERY]
        if kind == "tensors":
            for index, layer in enumerate(layers):
                layer.weight.requires_grad_(index % EVERY == 0)
        self.bytes = sum(weight.nbytes for weight in self.weights)
        self.changing_bytes = sum(each.nbytes for each in self.changing)

    def fill(self, value: int) -> None:
        for each in self.fixed:
            each.fill_(1.0)
        self.change(value)

    def change(self, value: int) -> None:
        for index, each in enumerate(self.changing):
            each.fill_(float(value + index))

    def difference(self, value: int) -> str | None:
        """What differs from the content of `value`."""
        wrong = [i for i, each in enumerate(self.changing) if not (each == value + i).all()]
        fixed = [i for i, each in enumerate(self.fixed) if not (each == 1).all()]
        return f"parts {wrong[:4]} that change, and {fixed[:4]}" if wrong or fixed else None

    def memcpy(self) -> float:
        """Seconds to copy all that changes, a range at a time."""
        sources = [each + 0 for each in self.changing]
        begin = time.perf_counter()
        for target, source in zip(self.changing, sources, strict=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return time.perf_counter() - begin


# -- the consumer, in a process of its own ---------------------------------------------------------


class Orders:
    """Lines of the trainer: "measure", "follow" without checks, "pause", "end"."""

    def __init__(self) -> None:
        self.now = "pause"
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in itertools.chain(sys.stdin, ["end"]):
            with self._changed:
                self.now = line.strip()
                self._changed.notify_all()

    def wait_while_paused(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.now != "pause")


def consume(options: argparse.Namespace) -> None:
    model, orders = Model(options.size, options.kind), Orders()
    model.fill(-1)
    with subscribe(options.run, {"model": model.module}) as updates:
        print("ready", flush=True)
        while orders.now != "end":
            orders.wait_while_paused()
            computed = time.process_time()
            update = updates.wait(IDLE_S)
            if update is None:
                continue
            update.apply()
            computed = time.process_time() - computed
            found: Record = {"step": update.step, "lag_s": update.lag_s, "read_s": update.read_s,
                             "apply_s": update.apply_s, "changed_bytes": update.changed_bytes,
                             "processor_s": computed,
                             "read_bytes": update.read_bytes}  # fmt: skip
            if orders.now == "measure":
                found["difference"] = model.difference(update.step)
                found["memcpy_s"] = model.memcpy()
            print(json.dumps(found), flush=True)


# -- the trainer -----------------------------------------------------------------------------------


class Consumer:
    """The other process."""

    def __init__(self, run: Path, kind: str, size: str) -> None:
        words = "--task", "consume", "--run", run, "--kind", kind, "--size", size
        pipe = subprocess.PIPE
        self._process = harness.start("bench.subscribe", *words, stdin=pipe, stdout=pipe)
        self._line()

    def order(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def update(self) -> Record:
        found: Record = json.loads(self._line())
        return found

    def end(self) -> list[Record]:
        """The updates that nobody has asked for."""
        self.order("end")
        out, _ = self._process.communicate(timeout=DEADLINE_S)
        return [json.loads(line) for line in out.splitlines()]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the consumer has ended")
        return line


class Trainer:
    """Saves a model after each change of it."""

    def __init__(self, ckpt: Checkpointer, model: Model) -> None:
        self._ckpt = ckpt
        self.model = model
        self.step = 0

    def save(self) -> Any:
        self.step += 1
        self.model.change(self.step)
        return self._ckpt.save(self.step, {"model": self.model.module})

    def one_step(self, compute: Compute, work: int) -> float:
        begin = time.perf_counter()
        compute(work)
        self._ckpt.gate()
        self.save()
        return time.perf_counter() - begin


def measure_updates(trainer: Trainer, consumer: Consumer, reps: int) -> list[Record]:
    consumer.order("measure")
    found = []
    for _ in range(reps + 2):
        trainer.save().wait("committed", DEADLINE_S)
        while (update := consumer.update())["step"] < trainer.step:
            pass  # the step that was there before
        found.append(update)
    consumer.order("pause")
    return found[2:]  # the first one reads everything, and the second one into new memory


def measure_loop(trainer: Trainer, consumer: Consumer, options: argparse.Namespace) -> Record:
    """The seconds of steps, without the consumer and with it."""
    compute = Compute()
    work = compute.calibrate(options.step_seconds) if options.step_seconds else 1
    found: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(2 * options.turns):
        name = "with" if turn % 4 in (1, 2) else "without"
        consumer.order("follow" if name == "with" else "pause")
        steps = [trainer.one_step(compute, work) for _ in range(options.steps + 2)]
        found[name] += steps[2:]
    medians = {name: statistics.median(steps) for name, steps in found.items()}
    return {**found, "ratio": medians["with"] / medians["without"], "medians": medians}


def measure(kind: str, options: argparse.Namespace) -> Record:
    folder = Path(tempfile.mkdtemp(prefix="statehold-bench-", dir=options.memory))
    disk = Path(tempfile.mkdtemp(prefix="statehold-bench-", dir=options.dir))
    try:
        levels = [Memory(path=folder / "steps", keep=1, agent=False)]
        with Checkpointer(disk / "run", levels=levels) as ckpt:
            trainer = Trainer(ckpt, Model(options.size, kind))
            trainer.model.fill(0)
            trainer.save().wait("committed", DEADLINE_S)
            consumer = Consumer(disk / "run", kind, options.size)
            updates = measure_updates(trainer, consumer, options.reps)
            loop = measure_loop(trainer, consumer, options)
            loop["updates"] = len(consumer.end())
        return {"kind": kind, "bytes": trainer.model.bytes, "updates": updates, "loop": loop,
                "changed_bytes": trainer.model.changing_bytes}  # fmt: skip
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(disk)


def row(record: Record) -> Record:
    updates = record["updates"]
    found: Record = {"kind": record["kind"], "loop": record["loop"]["ratio"]}
    found["changed_mb"] = record["changed_bytes"] / 1e6
    found["read_mb"] = harness.median([each["read_bytes"] / 1e6 for each in updates])
    for name in ("memcpy", "apply", "read", "lag", "processor"):
        found[name] = harness.spread(1000 * each[f"{name}_s"] for each in updates)
    found["ratio"] = harness.spread(each["apply_s"] / each["memcpy_s"] for each in updates)
    found["whole"] = harness.spread(
        (each["read_s"] + each["apply_s"]) / each["memcpy_s"] for each in updates
    )
    return found


COLUMNS: list[Column] = [
    ("kind", lambda r: r["kind"]),
    ("changed MB", lambda r: number(r["changed_mb"])),
    ("read MB", lambda r: number(r["read_mb"])),
    ("memcpy ms", lambda r: spread_text(r["memcpy"], 1)),
    ("apply ms", lambda r: spread_text(r["apply"], 1)),
    ("apply x memcpy", lambda r: spread_text(r["ratio"])),
    ("read ms", lambda r: spread_text(r["read"], 1)),
    ("read and apply x memcpy", lambda r: spread_text(r["whole"])),
    ("lag ms", lambda r: spread_text(r["lag"], 1)),
    ("processor ms", lambda r: spread_text(r["processor"], 1)),
    ("steps with / without", lambda r: f"{r['loop']:.3f}"),
]


def report(records: list[Record], options: argparse.Namespace, facts: Record) -> int:
    rows = [row(record) for record in records]
    wrong = [
        f"{record['kind']}, step {each['step']}: {each['difference']}"
        for record in records
        for each in record["updates"]
        if each["difference"]
    ]
    lines = [*(f"{key}: {value}" for key, value in facts.items()), "", *table(rows, COLUMNS)]
    lines += [f"WRONG BYTES: {each}" for each in wrong]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "subscribe.txt").write_text("\n".join(lines) + "\n")
    whole = {"schema": 1, "facts": facts, "rows": rows, "records": records}
    (options.out / "subscribe.json").write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(lines))
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.subscribe", description=__doc__)
    parser.add_argument("--size", choices=tuple(SIDES), default="500m")
    parser.add_argument("--reps", type=int, default=20, help="updates of each kind")
    parser.add_argument("--turns", type=int, default=6, help="of the loop, with and without")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--step-seconds", type=float, default=0.5, help="of the loop")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="on tmpfs")
    parser.add_argument("--dir", type=Path, default=None, help="of the run directory")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/subscribe")
    parser.add_argument("--task", choices=["consume"], help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task:
        consume(options)
        return 0
    facts = harness.facts(options.memory)
    facts |= {"command": " ".join(["python -m bench.subscribe", *sys.argv[1:]])}
    return report([measure(kind, options) for kind in KINDS], options, facts)


if __name__ == "__main__":
    sys.exit(main())
