"""One look at a disk after the power went off: what is there, and whether a run goes on from it.

Not here: the process that looks at one disk after the other (checker).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerloss.content import Found
from powerloss.history import Fact, History, oracles
from powerloss.jobs import Job, Readers, Where
from powerloss.plans import Plan
from powerloss.workload import Workload
from sim.oracle import Oracle
from statehold.cli.checking import SpanReader, check_step
from statehold.reading.places import find
from support.agents import steps_in


class Look:
    """One state. found: the saves that are there: nothing else may come, and none of it may go."""

    def __init__(
        self, fs: Any, reader: SpanReader, plan: Plan, where: Where, facts: list[Fact]
    ) -> None:
        self._fs = fs
        self._reader = reader
        self._plan = plan
        self._where = where
        self._facts = facts
        self._all = tuple(plan.keeps)
        self.found: list[Fact] = []
        self.wrong: list[str] = []

    def judge(self) -> None:
        """Every promise is kept, and whatever else is listed is whole."""
        known = oracles(self._facts, self._plan.keeps)
        for place, path in self._where.places.items():
            self._judge_place(place, path, known[place])

    def _judge_place(self, place: str, path: str, oracle: Oracle) -> None:
        named = steps_in(Path(path))
        with Readers(self._fs, self._plan, path) as readers:
            steps = readers.ckpts[0].steps()
            self._say(place, oracle.judge(steps))
            if steps != named:
                self._say(place, [f"{named} are there, and {steps} are listed"])
            for step in steps:
                for rank, found in enumerate(readers.restore(step)):
                    wrong = _judged(oracle, step, rank, found)
                    self._say(place, wrong)
                    if not wrong and rank == 0:
                        self._find(place, step, found)
        self._verify(place, path, steps)

    def _find(self, place: str, step: int, found: Found) -> None:
        for what, places in (("begin", self._all), ("promise", (place,))):
            self.found.append(Fact(0, what, places, step, found.serial or 0, self._plan.ranks))

    def _verify(self, place: str, path: str, steps: Sequence[int]) -> None:
        """All bytes of these steps are as they were saved, and no step was found damaged before."""
        for step in steps:
            found = find(self._fs, f"{path}/step-{step:012d}")
            report = check_step(self._fs, found, self._reader)
            if not report.is_intact:
                self._say(place, [f"verify: {report.findings}"])
        if _aside(path):
            self._say(place, [f"set aside: {_aside(path)}"])

    def go_on(self, history: History, first: int) -> None:
        """The job that comes next: it restores the newest step, and saves another."""
        newest = max((fact.step for fact in self.found), default=0)
        workload = Workload(self._plan, self._where, history, first)
        with Job(self._fs, self._plan, self._where) as job:
            self._resume(job, newest)
            step = workload.save(job, newest + 1)
            self._compare(job.restore(step))
            if self._plan.has_levels:
                workload.flush(job, step)
            job.finish()
        for place, path in self._where.places.items():
            self._verify(place, path, steps_in(Path(path)))

    def _resume(self, job: Job, newest: int) -> None:
        """Restore the newest step, which is `newest`; 0: there is none."""
        found = job.restore()
        restored = [each.restored for each in found]
        if restored != [newest or None] * self._plan.ranks:
            self._say("job", [f"{restored} restored, and {newest} is the newest"])
        if newest:
            self._compare(found)

    def _compare(self, found: list[Found]) -> None:
        for each in found:
            self._say("job", each.wrong)

    def _say(self, place: str, wrong: list[str]) -> None:
        self.wrong += [f"{place}: {each}" for each in wrong]


def _judged(oracle: Oracle, step: int, rank: int, found: Found) -> list[str]:
    """What is wrong with what a rank has restored of a step."""
    told = {"step": found.step, "serial": found.serial}
    return oracle.judge_content(step, rank, told, ()) or found.wrong


def _aside(path: str) -> list[str]:
    names = os.listdir(path) if os.path.isdir(path) else []
    return [name for name in names if name.endswith(".corrupt")]
