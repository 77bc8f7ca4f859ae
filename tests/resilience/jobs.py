"""Jobs of replicas for tests: a coordinator in a thread, replicas in processes, and their logs."""

from __future__ import annotations

import contextlib
import json
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
    computed: Counter[tuple[int, int]]
    seconds: dict[int, float]
    weights: int | None

    @classmethod
    def of(cls, path: Path) -> Log:
        text = path.read_text("utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        steps = [line for line in lines if "step" in line]
        weights = [line["weights"] for line in lines if "weights" in line]
        return cls(
            {line["step"]: line["loss"] for line in steps},
            Counter(
                (each[0], each[1]) for line in lines for each in [line.get("computed")] if each
            ),
            {line["step"]: line["seconds"] for line in steps},
            weights[0] if weights else None,
        )


class Meeting:
    """Where replicas meet: the address of a coordinator, and what it has reported."""

    def __init__(self) -> None:
        self.address = ""
        self.events: list[str] = []
        self._changed = threading.Condition()

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
def coordinated(replicas: int, port: int = 0) -> Iterator[Meeting]:
    """A coordinator of so many replicas, in a thread."""
    meeting = Meeting()
    server = Server(Coordinator(replicas, SETTLE_S), "127.0.0.1", port, meeting.report)
    meeting.address = f"127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield meeting
    finally:
        server.stop()
        thread.join()
        server.close()


class Job:
    """Replicas in processes. All have ended when the context ends."""

    def __init__(self, folder: Path, meeting: Meeting, until: int, **order: Any) -> None:
        self._folder = folder
        self._order = Order(meeting.address, folder, until, **order)
        self._logs: list[Path] = []
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
