"""Seeded schedules of training on an emulated device: streams, saves, updates and restores, mixed.

    python -m devices.schedules 10000 [--first SEED] [--broken NAME]     (with PYTHONPATH=tests)

Every tensor is a pattern plus a number, so that the host knows what it must be, in the order of the
program, whatever the device has done by then. After each schedule every step that was committed is
restored and compared. `BROKEN` are defects of statehold that the schedules have to find.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.save import shared, writes
from statehold.tensors import captured
from statehold.tensors.devices import copying, cuda, graphs
from support.cuda import Machine, copies_of, install
from support.faults import DEADLINE_S, SMALL, must
from support.inside import trainer
from support.sharing import small_files

HANGS_S = 120
# What is placed on the device: name -> (shape, whether transposed). About 4 MiB, in two buffers.
SHAPES = {
    "a": ((600, 500), False),
    "b": ((500, 300), True),
    "c": ((40,), False),
    "d": ((7, 9), True),
}
BUFFERS = {"e": ((50, 50), False), "f": ((12,), False)}
# What changes rarely, so steps share its files. The first is copied before save() returns.
KEPT = {"g": ((300, 100), False), "h": ((70, 500), True)}
ALL = {**SHAPES, **BUFFERS, **KEPT}


class Bump(torch.optim.Optimizer):
    """Adds one to every parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)


def pattern(shape: tuple[int, ...], is_transposed: bool) -> torch.Tensor:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return whole.t().contiguous().t() if is_transposed else whole


@dataclass
class Run:
    """One training run on the machine. `numbers`: what was added to each pattern so far."""

    machine: Machine
    chance: random.Random
    ckpt: statehold.Checkpointer
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    saved: dict[int, dict[str, int]] = field(default_factory=dict)
    saves: list[statehold.Save] = field(default_factory=list)
    step: int = 0
    has_room: bool = False  # for all bytes of a save at once
    graph: Any = None

    def __post_init__(self) -> None:
        for name, (shape, is_transposed) in ALL.items():
            device = self.chance.randrange(self.machine.count)
            self.live[name] = self.machine.put(pattern(shape, is_transposed), device)
            self.numbers[name] = 0
        self.optimizer = Bump([self.live[name] for name in SHAPES])

    def state(self) -> dict[str, Any]:
        """The optimizer makes its parameters lazy. Other tensors are eager, but for one."""
        gated = {"h": statehold.Gated(self.live["h"])}
        return {**self.live, **gated, "optimizer": self.optimizer}

    # -- what a schedule is made of ----------------------------------------------------------

    def update(self) -> None:
        self.optimizer.step()
        for name in SHAPES:
            self.numbers[name] += 1

    def change_buffers(self) -> None:
        for name in BUFFERS:
            self.live[name].add_(1)
            self.numbers[name] += 1

    def change_unseen(self) -> None:
        """A change of what nothing has changed so far, by what counts no change."""
        self.ckpt.gate(DEADLINE_S)
        with self.machine.still():
            for name in KEPT:
                self.live[name].data.add_(1)
                self.numbers[name] += 1

    def save_often(self) -> None:
        """Saves between which little has changed."""
        for _ in range(4):
            self.save()

    def save(self) -> None:
        self.step += 1
        self.saves.append(self.ckpt.save(self.step, self.state()))
        self.saved[self.step] = dict(self.numbers)

    def save_temporaries(self) -> None:
        """Tensors that nobody has any more when save() has returned, and others in their place."""
        self.step += 1
        made = {name: self.live[name] + 5 for name in ("a", "c", "e")}
        self.saves.append(self.ckpt.save(self.step, {**self.state(), **made}))
        del made
        numbers = dict(self.numbers)
        for name in ("a", "c", "e"):
            numbers[name] += 5
        self.saved[self.step] = numbers
        self.live["a"].mul(0)

    def wait(self) -> None:
        if self.saves:
            event = self.chance.choice(("staged", "written", "committed"))
            self.chance.choice(self.saves).wait(event, DEADLINE_S)

    def restore(self) -> None:
        committed = self.ckpt.steps()
        if committed:
            step = self.chance.choice(committed)
            self.ckpt.restore(self.state(), step)
            self.numbers = dict(self.saved[step])
            self.step = max(self.saved)

    def gate(self) -> None:
        """An update by hand."""
        self.ckpt.gate(DEADLINE_S)
        with torch.no_grad():
            self.live["a"].add_(1)
        self.numbers["a"] += 1

    def work(self) -> None:
        """Something that only reads, such as forward."""
        for name in ("b", "e"):
            (self.live[name] * 2).sum()

    def other_stream(self) -> None:
        """An update on another stream, as a program has to order it."""
        here, there = self.machine.cuda.current_stream(), self.machine.cuda.Stream()
        there.wait_stream(here)
        with self.machine.cuda.stream(there):
            self.update()
        here.wait_stream(there)

    @contextmanager
    def slow_device(self) -> Iterator[None]:
        """Inside, nothing that somebody waits for completes; then the current streams are done
        first, with what they wait for."""
        self.wait_staged()
        self.machine.timeline.may_finish.clear()
        try:
            yield
            for device in range(self.machine.count):
                self.machine.timeline.run(self.machine.default(device))
        finally:
            self.machine.timeline.may_finish.set()

    def run_ahead(self) -> None:
        """An update while copies of a save are under way."""
        if self.has_room:
            with self.slow_device():
                self.save()
                [held] = trainer(self.ckpt).gate.held.values()
                passing = held.passing
                must(passing is not None and _soon(passing), "the gate did not open")
                self.update()

    def change_ahead(self) -> None:
        """Buffers that change as soon as save() has returned."""
        if self.has_room:
            with self.slow_device():
                self.save()
                self.change_buffers()

    def wait_staged(self) -> None:
        for save in self.saves:
            save.wait("staged", DEADLINE_S)

    def update_apart(self) -> None:
        """An update on another stream, and a save before the program has joined it."""
        here, there = self.machine.cuda.current_stream(), self.machine.cuda.Stream()
        there.wait_stream(here)
        with self.machine.cuda.stream(there):
            self.update()
        self.save()
        here.wait_stream(there)

    def capture(self) -> None:
        """A graph of an update; on one device, as a stream can be captured."""
        if self.machine.count == 1:
            self.graph = self.machine.cuda.CUDAGraph()
            with self.machine.cuda.graph(self.graph):
                self.optimizer.step()

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            for name in SHAPES:
                self.numbers[name] += 1

    def replay_ahead(self) -> None:
        """The same as run_ahead, where the update is in a graph."""
        if self.graph is None:
            self.capture()
        if self.graph is not None and self.has_room:
            with self.slow_device():
                self.save()
                copies = copies_of(self.ckpt)
                must(copies.enqueued.wait(DEADLINE_S), "the copies were not enqueued")
                must(copies.job.wait_eager(DEADLINE_S), "the host tensors were not copied")
                self.replay()

    def wait_for_device(self) -> None:
        self.machine.cuda.synchronize()

    def check(self) -> None:
        """Every committed step is what the state was when it was saved."""
        for step in self.ckpt.steps():
            fresh = Run(self.machine, random.Random(0), self.ckpt)
            self.ckpt.restore(fresh.state(), step)
            for name, number in self.saved[step].items():
                expected = pattern(*ALL[name]) + number
                got = self.machine.read(fresh.live[name])
                must(torch.equal(got, expected), f"step {step}: {name} is not as it was saved")


OPERATIONS: list[tuple[int, Callable[[Run], None]]] = [
    (6, Run.update),
    (3, Run.change_buffers),
    (5, Run.save),
    (1, Run.save_temporaries),
    (2, Run.wait),
    (2, Run.restore),
    (1, Run.gate),
    (2, Run.work),
    (1, Run.other_stream),
    (1, Run.run_ahead),
    (1, Run.change_ahead),
    (1, Run.update_apart),
    (1, Run.capture),
    (3, Run.replay),
    (2, Run.replay_ahead),
    (1, Run.wait_for_device),
    (2, Run.save_often),
    (2, Run.change_unseen),
]


def _soon(holds: Callable[[], bool]) -> bool:
    """Asked again and again, until the threads of a save have come so far."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def play(seed: int, directory: Path) -> None:
    """One schedule. Raises where a step is wrong, AssertionError or whatever a save raises."""
    chance = random.Random(seed)
    patch = pytest.MonkeyPatch()
    machine = install(patch, chance.choice((1, 1, 2)), seed=chance.choice((None, seed, seed)))
    patch.setattr(captured, "CLONED_BYTES_MAX", chance.choice((0, captured.CLONED_BYTES_MAX)))
    weights = [weight for weight, _ in OPERATIONS]
    settings = {**SMALL, "staging_bytes": chance.choice(("2MiB", "3MiB", "16MiB"))}
    try:
        with machine.in_use(), small_files():
            with statehold.Checkpointer(directory / f"run{seed}", keep=100, **settings) as ckpt:
                run = Run(machine, chance, ckpt)
                run.has_room = settings["staging_bytes"] == "16MiB"
                for _ in range(chance.randrange(4, 16)):
                    [(_, operation)] = chance.choices(OPERATIONS, weights)
                    operation(run)
                run.check()
            must(not machine.pins.ranges, "memory is still pinned")
            machine.finish()
    finally:
        patch.undo()
        shutil.rmtree(directory / f"run{seed}", ignore_errors=True)


def _no_fork(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("support.cuda.streams.Stream.wait_stream", lambda *_: None)


def _no_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda.CudaBackend, "make_current_wait", lambda *_: None)


def _early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda.CudaBackend, "synchronize", lambda *_: None)
    patch.setattr(cuda.CudaBackend, "is_complete", lambda *_: True)


def _on_current_stream(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def here(*_: object) -> Iterator[None]:
        yield

    patch.setattr(cuda.CudaBackend, "on", here)


def _free_replays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(graphs._Graphs, "_replay", lambda _self, call, _graph: call())


def _one_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(graphs.UpdateStreams, "join", lambda _self: None)


def _eager_unordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(copying.DeviceCopies, "wait_eager", lambda _self: None)


def _no_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writes.Segments, "can_be_read_in_place", True)
    patch.setattr(shared, "refuted", lambda claims, _: [set() for _ in claims])


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the side stream does not wait for the current one": _no_fork,
    "the gate does not order the current stream": _no_order,
    "buffers go back before their copies have completed": _early,
    "copies are not on the side stream": _on_current_stream,
    "eager tensors may change before they are copied": _eager_unordered,
    "replays of captured updates pass the gate": _free_replays,
    "updates on other streams are not waited for": _one_stream,
    "a link stands for bytes that have changed": _no_comparison,
}


def finds(name: str, seeds: range, directory: Path) -> int | None:
    """The first schedule that finds a defect."""
    patch = pytest.MonkeyPatch()
    BROKEN[name](patch)
    try:
        for seed in seeds:
            try:
                play(seed, directory)
            except (AssertionError, statehold.StateholdError):
                return seed
    finally:
        patch.undo()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--broken", choices=BROKEN)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="schedules-"))
    seeds = range(options.first, options.first + options.count)
    begin = time.perf_counter()
    try:
        if options.broken:
            print(f"{options.broken}: found by seed {finds(options.broken, seeds, directory)}")
            return
        for seed in seeds:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            try:
                play(seed, directory)
            except BaseException as error:
                error.add_note(f"schedule {seed}")
                raise
            if (seed + 1) % 500 == 0:
                print(f"{seed + 1}: {time.perf_counter() - begin:.0f} s", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{options.count} schedules: all steps right, none hung")


if __name__ == "__main__":
    main()
