"""Jobs of replicas for tests: a coordinator in a thread, replicas in processes, and their logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resilience.replica import MICROBATCHES, Order, train
from statehold.resilience.control.server import Server
from statehold.resilience.protocol.coordinator import Coordinator
from support.forked import forked

DEADLINE_S = 60
SETTLE_S = 30.0  # of a replica that starts slowly


@dataclass(frozen=True)
class Log:
    """What a replica has done."""

    losses: dict[int, str]
    shares: dict[int, list[int]]
    norms: dict[int, float]
    computed: Counter[tuple[int, int]]
    seconds: dict[int, float]
    times: list[float]  # of commits
    errors: list[str]
    weights: int | None

    @classmethod
    def of(cls, path: Path) -> Log:
        text = path.read_text("utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        steps = [line for line in lines if "step" in line]
        weights = [line["weights"] for line in lines if "weights" in line]
        return cls(
            {line["step"]: line["loss"] for line in steps},
            {line["step"]: line["share"] for line in steps},
            {line["step"]: line["norm"] for line in steps},
            Counter(
                (each[0], each[1]) for line in lines for each in [line.get("computed")] if each
            ),
            {line["step"]: line["seconds"] for line in steps},
            [line["at"] for line in steps],
            [line["error"] for line in lines if "error" in line],
            weights[0] if weights else None,
        )


class Meeting:
    """Where replicas meet: the address of a coordinator, and what it has reported."""

    def __init__(self, replicas: int) -> None:
        self.events: list[str] = []
        self._replicas = replicas
        self._changed = threading.Condition()
        self._begin(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def restart(self) -> None:
        """Another coordinator at the same address, which knows nothing."""
        port = self._server.port
        self.end()
        self._begin(port)

    def end(self) -> None:
        self._server.stop()
        self._thread.join()
        self._server.close()

    def _begin(self, port: int) -> None:
        coordinator = Coordinator(self._replicas, SETTLE_S)
        self._server = Server(coordinator, "127.0.0.1", port, self.report)
        self._thread = threading.Thread(target=self._server.serve)
        self._thread.start()

    def report(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until so many events have the text in them."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(text in event for event in self.events) >= times, DEADLINE_S
            ), self.events


@contextlib.contextmanager
def coordinated(replicas: int) -> Iterator[Meeting]:
    """A coordinator of so many replicas, in a thread."""
    meeting = Meeting(replicas)
    try:
        yield meeting
    finally:
        meeting.end()


class Job:
    """Replicas in processes. All have ended when the context ends."""

    def __init__(self, folder: Path, meeting: Meeting, until: int, **order: Any) -> None:
        self._folder = folder
        self._order = Order(meeting.address, folder, until, **order)
        self._logs: list[Path] = []
        self._counted: dict[int, tuple[int, int]] = {}
        self.processes: list[Any] = []

    def start(self, doom: tuple[int, str] | None = None) -> list[Any]:
        """Start the ranks of one replica; only the last one is doomed."""
        width, number = self._order.width, len(self._logs) // self._order.width
        for place in range(width):
            log = self._folder / f"replica{number}.{place}"
            fate = doom if place == width - 1 else None
            order = replace(self._order, log=log, doom=fate, place=place)
            process = forked().Process(target=train, args=(order,))
            process.start()
            self._logs.append(log)
            self.processes.append(process)
        return self.processes[-width:]

    def logged(self, number: int, steps: int) -> Log:
        """What a rank has written down as soon as it has done so many steps."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self._logs[number].exists():
                log = Log.of(self._logs[number])
                if len(log.losses) >= steps:
                    return log
            time.sleep(0.01)
        raise TimeoutError(f"rank {number} does no {steps} steps")

    def living(self) -> list[Any]:
        return [process for process in self.processes if process.is_alive()]

    def stacks(self) -> str:
        """Where the living ranks stand."""
        for process in self.living():
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        files = [log.with_suffix(".stacks") for log in self._logs]
        return "\n".join(f"{each.stem}: {each.read_text('utf-8')}" for each in files)

    def progress(self, replicas: int, steps: int) -> None:
        """Until so many replicas have done so many more steps."""
        before = [self._steps(number) for number in range(len(self._logs))]
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            more = [self._steps(number) - count for number, count in enumerate(before)]
            if sum(each >= steps for each in more) >= replicas:
                return
            time.sleep(0.02)
        raise TimeoutError(f"fewer than {replicas} replicas go on")

    def _steps(self, number: int) -> int:
        """How many steps a rank has written down; what has been counted is not read again."""
        offset, count = self._counted.get(number, (0, 0))
        if self._logs[number].exists():
            with self._logs[number].open("rb") as log:
                log.seek(offset)
                text = log.read()
            end = text.rfind(b"\n") + 1
            offset, count = offset + end, count + text[:end].count(b'"step"')
            self._counted[number] = offset, count
        return count

    def stop(self) -> list[Log]:
        """Kill all, and see what they have done."""
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)
        return [Log.of(log) for log in self._logs]

    def wait(self) -> list[Log]:
        """When all have ended."""
        for process in self.processes:
            process.join(DEADLINE_S)
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            raise TimeoutError(f"replicas that do not end: {codes}")
        return [Log.of(log) for log in self._logs]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def undisturbed(folder: Path, until: int, **order: Any) -> list[Log]:
    """The run of one replica, by rank."""
    folder.mkdir()
    with coordinated(1) as meeting, Job(folder, meeting, until, **order) as job:
        job.start()
        return job.wait()


def step_indices(step: int) -> set[tuple[int, int]]:
    return {(step, index) for index in range(MICROBATCHES)}
