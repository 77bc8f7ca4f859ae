"""One session: a workload on a disk that is logged, the states that a loss of power leaves, and
what becomes of each; of some also what a second loss of power leaves while the run recovers.

Everything that is mounted here is seen by this process and its children only (linux.own_mounts),
and all of it lies on a tmpfs of theirs.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from powerloss import filesystems, images, states
from powerloss.checker import Checker
from powerloss.device import SECTOR_BYTES, RecordingDevice
from powerloss.history import Fact, History, facts_of, known_at
from powerloss.jobs import Where
from powerloss.journal import Journal, Position
from powerloss.linux import loop_device, mount, unmount_within
from powerloss.neighbour import neighbour
from powerloss.plans import Plan
from powerloss.states import State
from powerloss.workload import Workload, in_own_process

HANG_S = 180.0
_BUSY_S = 10.0
SECONDS = 3  # states that are drawn from each recovery that was logged
_RECORDED = 0.12  # which part of the recoveries that is
_SERIALS = 10_000  # of the job that recovers: none of these was used before


@dataclass
class Report:
    """states: how many by (file system, workload, kind of state, which loss of power). wrong: the
    violations."""

    seed: int
    states: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: str | None = None  # why this session has not come to its end
    flushes: int = 0  # in its log
    overlapped: int = 0  # those of them during which a change was under way

    def document(self) -> dict[str, Any]:
        counted = [[*key, count] for key, count in self.states.items()]
        return {**asdict(self), "states": counted}


class Lab:
    """The tmpfs on which disks lie, and what all sessions of this process share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.position = Position()
        self.image, self.root, self.memory = folder / "image", folder / "root", folder / "memory"
        self.notes = folder / "notes"
        for each in (self.root, self.memory):
            each.mkdir()

    def base(self, file_system: filesystems.FileSystem) -> Path:
        """The image of an empty file system."""
        path = self._folder / f"{file_system.name}.base"
        if not path.exists():
            file_system.format(path)
        return path

    def forget_memory(self) -> None:
        """What was in memory when the power went off."""
        shutil.rmtree(self.memory)
        self.memory.mkdir()

    @contextmanager
    def recorded(self, file_system: filesystems.FileSystem, seed: int) -> Iterator[RecordingDevice]:
        """The image, mounted, with all that is done to it logged."""
        with RecordingDevice(self._folder, self.image, self.position, seed) as device:
            mount(device.name, str(self.root), file_system.kind, file_system.options)
            try:
                yield device
            finally:
                unmount_within(_BUSY_S, str(self.root))

    @contextmanager
    def mounted(self, file_system: filesystems.FileSystem) -> Iterator[None]:
        """The image, mounted."""
        self.position.set(0)
        with loop_device(str(self.image), direct=False, sector_bytes=SECTOR_BYTES) as name:
            mount(name, str(self.root), file_system.kind, file_system.options)
        try:
            yield
        finally:
            unmount_within(_BUSY_S, str(self.root))


class Session:
    """before: called in the process of the workload, before it begins."""

    def __init__(self, lab: Lab, plan: Plan, before: Callable[[], None]) -> None:
        self._lab = lab
        self._plan = plan
        self._file_system = filesystems.BY_NAME[plan.file_system]
        self._before = before
        self._chance = random.Random(plan.seed)
        self._first, self._last = lab.image.with_name("first"), lab.image.with_name("second")
        self.report = Report(plan.seed)

    def run(self, count: int) -> Report:
        """Check `count` states, and those of the second losses of power in addition."""
        images.copy(self._lab.base(self._file_system), self._first)
        images.copy(self._first, self._lab.image)
        self._lab.forget_memory()
        with self._lab.recorded(self._file_system, self._plan.seed) as device:
            facts = self._work()
        journal = device.journal()
        self.report.flushes = len(journal.flushes)
        self.report.overlapped = states.overlapped(journal)
        checker = CheckerProcess(self._lab)
        try:
            for state in self._drawn(journal, facts, count):
                self._check(checker, state, facts, may_record=True)
        finally:
            checker.close()
        return self.report

    def _work(self) -> list[Fact]:
        """The workload, in a process of its own; what it has noted."""
        history = History(self._lab.notes, self._lab.position)
        where = Where(self._plan, self._lab.root, self._lab.memory)

        def work() -> None:
            self._before()
            Workload(self._plan, where, history).run()

        pid = os.fork()
        if pid == 0:
            in_own_process(work)
        with self._neighbour():
            wait_for(pid, f"the workload of {self._plan}")
        return history.facts()

    def _neighbour(self) -> AbstractContextManager[None]:
        if self._plan.has_neighbour:
            return neighbour(self._lab.root, self._plan.seed)
        return nullcontext()

    def _drawn(self, journal: Journal, facts: Sequence[Fact], count: int) -> Iterator[State]:
        marks = [fact.at for fact in facts]
        for cut in sorted(states.moments(journal, marks, count, self._chance)):
            kind = self._chance.choice(states.KINDS)
            yield states.draw(journal, cut, kind, self._chance, SECTOR_BYTES)

    def _check(
        self, checker: CheckerProcess, state: State, facts: Sequence[Fact], *, may_record: bool
    ) -> None:
        images.copy(self._first if may_record else self._last, self._lab.image)
        images.apply(state, self._lab.image)
        self._lab.forget_memory()
        known = known_at(facts, state.cut)
        loss = "first" if may_record else "second"
        self.report.states[self._plan.file_system, self._plan.kind, state.kind, loss] += 1
        if may_record and self._chance.random() < _RECORDED:
            self._check_recorded(checker, state, known)
            return
        with self._lab.mounted(self._file_system):
            answer = checker.ask(self._plan, known, _SERIALS if may_record else 2 * _SERIALS)
            self._tell(state, answer["wrong"])

    def _check_recorded(self, checker: CheckerProcess, state: State, known: Sequence[Fact]) -> None:
        """Let the power go off again while the run recovers from its loss."""
        images.copy(self._lab.image, self._last)
        seed = self._chance.randrange(1 << 30)
        with self._lab.recorded(self._file_system, seed) as device:
            answer = checker.ask(self._plan, known, _SERIALS)
            self._tell(state, answer["wrong"])
        facts = facts_of(answer["facts"])
        for again in self._drawn(device.journal(), facts, SECONDS):
            self._check(checker, again, facts, may_record=False)

    def _tell(self, state: State, wrong: Sequence[str]) -> None:
        where = f"{self._plan.file_system}, {self._plan.kind}, {state.kind} at {state.cut}"
        self.report.wrong += [f"{where}: {each}" for each in wrong]


class CheckerProcess:
    """A Checker in a process of its own."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._out)
            os.close(self._in)
            checker = Checker(lab.position, lab.notes)
            requests, answers = os.fdopen(theirs_in), os.fdopen(theirs_out, "w")
            in_own_process(checker.serve, requests, answers)
        os.close(theirs_in)
        os.close(theirs_out)
        self._answers = os.fdopen(self._in)

    def ask(self, plan: Plan, facts: Sequence[Fact], first: int) -> dict[str, Any]:
        """What is wrong with what is mounted now."""
        request = {
            "plan": plan.document(),
            "root": str(self._lab.root),
            "memory": str(self._lab.memory),
            "facts": [asdict(fact) for fact in facts],
            "first": first,
        }
        line = json.dumps(request).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]
        if not select.select([self._in], [], [], HANG_S)[0]:
            os.kill(self._pid, signal.SIGABRT)
            raise TimeoutError(f"nothing came of a state of {plan}")
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        os.close(self._out)
        self._answers.close()
        wait_for(self._pid, "the process that checks")


def wait_for(pid: int, what: str) -> None:
    """Until a process has ended, well and in time."""
    pidfd = os.pidfd_open(pid)
    try:
        is_hanging = not select.select([pidfd], [], [], HANG_S)[0]
        if is_hanging:
            os.kill(pid, signal.SIGABRT)
    finally:
        os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    if is_hanging:
        raise TimeoutError(f"{what} hangs")
    if status:
        raise RuntimeError(f"{what} ended with {os.waitstatus_to_exitcode(status)}")
