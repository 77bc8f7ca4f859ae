"""What the benchmarks of other people's trainers share: cases that take turns in one process.

Owns: the rounds, a new folder for each training, the times of steps, the table, the options and
the record. Invariants: every case trains once in each round. The first steps of a training do not
count. Nothing of a training is left, neither on the disk nor in memory.
Not here: the trainers, their callbacks and their models.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import ROOT, median
from statehold.checkpoint.levels.memory import memory_root


class Clock:
    """When steps begin; a callback of a trainer calls `begin`."""

    def __init__(self) -> None:
        self._begun: list[float] = []

    def begin(self) -> None:
        self._begun.append(time.perf_counter())

    def steps(self, warm: int) -> list[float]:
        """From the beginning of a step to that of the next, in seconds, without the first ones."""
        pairs = zip(self._begun, self._begun[1:], strict=False)
        return [later - earlier for earlier, later in pairs][warm:]


def step_wall(train: Callable[[], object], steps: int) -> float:
    """The wall time of a training for each of its steps, in seconds."""
    begin = time.perf_counter()
    train()
    return (time.perf_counter() - begin) / steps


@dataclass(frozen=True)
class Comparison:
    """`train(size, case, steps, folder)` returns the times of the steps, and the wall time of one.

    The first case is the one without saves. `steps` has the sizes of the model, and how many steps
    a training of each has.
    """

    module: str
    record: str  # the file in --dir
    cases: Sequence[str]
    steps: dict[str, int]
    parameters: Callable[[str], int]
    train: Callable[[str, str, int, Path], tuple[list[float], float]]

    def measure(self, size: str, steps: int, rounds: int, base: Path) -> dict[str, Any]:
        taken: dict[str, list[float]] = {case: [] for case in self.cases}
        walls: dict[str, list[float]] = {case: [] for case in self.cases}
        for _ in range(rounds):
            for case in self.cases:
                folder = Path(tempfile.mkdtemp(prefix="training-", dir=base))
                try:
                    found, wall = self.train(size, case, steps, folder)
                finally:
                    shutil.rmtree(folder)
                    shutil.rmtree(memory_root(str(folder)), ignore_errors=True)
                taken[case] += found
                walls[case].append(wall)
        return {
            "size": size, "parameters": self.parameters(size), "steps": steps, "rounds": rounds,
            "step_s": {case: median(each) for case, each in taken.items()},
            "wall_s": {case: median(each) for case, each in walls.items()},
        }  # fmt: skip

    def shown(self, found: dict[str, Any]) -> str:
        none = self.cases[0]
        free, free_wall = found["step_s"][none], found["wall_s"][none]
        lines = [
            f"{found['size']}: {found['parameters'] / 1e6:.2f} million parameters, "
            f"{found['steps']} steps, {found['rounds']} rounds",
            f"{'':12}{'step':>12}{'over no saves':>16}{'a save adds':>14}{'training, a step':>19}",
        ]
        for case in self.cases:
            step, wall = found["step_s"][case], found["wall_s"][case]
            lines.append(
                f"{case:12}{step * 1e3:9.1f} ms{step / free:14.2f} x{(step - free) * 1e3:11.1f} ms"
                f"{wall * 1e3:16.1f} ms{wall / free_wall:6.2f} x"
            )
        return "\n".join(lines)

    def main(self) -> None:
        arguments = self._arguments()
        arguments.dir.mkdir(parents=True, exist_ok=True)
        record: list[dict[str, Any]] = []
        for size in arguments.sizes:
            steps = arguments.steps or self.steps[size]
            record.append(self.measure(size, steps, arguments.rounds, arguments.dir))
            print(self.shown(record[-1]), flush=True)
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        print(f"load {load}; torch {torch.__version__}, {torch.get_num_threads()} threads")
        (arguments.dir / self.record).write_text(json.dumps({"load": load, "cases": record}))

    def _arguments(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=self.module)
        parser.add_argument("--sizes", nargs="+", choices=[*self.steps], default=[*self.steps])
        usual = " and ".join(map(str, self.steps.values()))
        parser.add_argument("--steps", type=int, help=f"of a training; by default {usual}")
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--dir", type=Path, default=ROOT / "bench/out")
        return parser.parse_args()
