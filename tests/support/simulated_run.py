"""A training run by its times alone: what a Schedule sees of one, with costs that the test knows.

Every step takes `step_s`, more while a save or a copy is under way, with noise; save() and the gate
block it. Nothing is saved, and nothing waits: time is a number.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.specs import Level
from statehold.options import Options
from statehold.ranks.membership import ALONE


@dataclass
class Costs:
    """Of one level: what a save or copy takes, by how much it slows steps down (a share), and what
    save() and the gate block."""

    takes_s: float
    slower: float = 0.0
    blocked_s: float = 0.0
    gate_s: float = 0.0

    def lost_s(self) -> float:
        """What training loses each time: steps take 1 + slower times as long while it lasts."""
        return self.blocked_s + self.gate_s + self.takes_s * self.slower / (1 + self.slower)


@dataclass
class Promoter:
    """What a Schedule sees of a level after the first."""

    place: Any
    ends_s: float = 0.0
    copied: int = 0
    took_s: float = 0.0
    is_busy: bool = False
    steps: int = 1
    last: int = 0

    @property
    def level(self) -> str:
        return str(self.place.name).removesuffix(".copies")

    def every(self, interval: Any) -> None:
        self.steps = interval.steps


@dataclass
class SimulatedRun:
    levels: list[Level]
    costs: list[Costs]
    step_s: float
    noise: float
    seed: int
    options: Options = field(default_factory=Options)
    hosts: int = 1
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        names = [level.name for level in self.levels[1:]]
        if len(self.costs) > len(self.levels):  # the last are those of copies on other hosts
            names.append(f"{self.levels[0].name}.copies")
        self.promoters = [Promoter(SimpleNamespace(name=name)) for name in names]
        self.lines: list[str] = []
        self.shown: list[float] = []  # as a figure
        log = SimpleNamespace(info=lambda text, *values: self.lines.append(text % values))
        watch = SimpleNamespace(log=log, interval=self.shown.append)
        watches: Any = [watch] * len(self.levels)
        self.schedule = Schedule(
            self.levels,
            self.promoters,
            ALONE,
            self.options,
            watches,
            lambda _now_s: -math.inf,
            lambda: self.now_s,
        )
        self.step = self.number = 0
        self.gate_s = self.saving_until_s = 0.0
        self.saved: list[int] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._compute()
            self._save()

    def _compute(self) -> None:
        """One step: its parts are slower while something is under way."""
        until = [self.saving_until_s, *(each.ends_s for each in self.promoters)]
        left_s = self.step_s * (1 + self.noise * abs(self.random.gauss(0, 1)))
        while left_s > 1e-12:
            busy = [i for i, end_s in enumerate(until) if end_s > self.now_s + 1e-12]
            pace = 1 + sum(self.costs[i].slower for i in busy)
            spent_s = min([left_s * pace, *(until[i] - self.now_s for i in busy)])
            self.now_s += spent_s
            left_s -= spent_s / pace
        for each in self.promoters:
            if each.is_busy and each.ends_s <= self.now_s:
                each.is_busy, each.copied = False, each.copied + 1

    def _save(self) -> None:
        self.step, number, self.number = self.step + 1, self.number, self.number + 1
        is_due = self.schedule.is_due(
            number,
            self.step,
            wanted=False,
            is_saving=self.saving_until_s > self.now_s,
            gate_s=self.gate_s,
        )
        if not is_due:
            return
        first = self.costs[0]
        self.now_s += first.blocked_s
        self.schedule.saved(first.blocked_s, self.gate_s)
        self.now_s += first.gate_s
        self.gate_s += first.gate_s
        self.saving_until_s = self.now_s + first.takes_s
        self.saved.append(self.step)
        self.schedule.committed(number, first.takes_s, self.hosts)
        for each, costs in zip(self.promoters, self.costs[1:], strict=True):
            if not each.is_busy and self.step // each.steps > each.last // each.steps:
                each.is_busy, each.last = True, self.step
                each.ends_s, each.took_s = self.now_s + costs.takes_s, costs.takes_s

    @property
    def intervals(self) -> list[int]:
        """Of all levels, in steps, as they are in force."""
        return [self.schedule.turns.rule.steps, *(each.steps for each in self.promoters)]
