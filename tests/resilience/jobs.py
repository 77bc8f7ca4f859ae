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
from typing import Any, NamedTuple, Protocol

from torch import nn

from resilience.replica import (
    BATCH,
    MICROBATCHES,
    SAMPLES,
    SEED,
    Order,
    Vote,
    model_of,
    optimizer_of,
    train,
)
from statehold.resilience import Replicas
from statehold.resilience.control import Server
from statehold.resilience.protocol.coordinator import Coordinator
from support.forked import forked

UNTIL = 12  # the end of most runs
DEADLINE_S = 60
SETTLE_S = 30.0  # of a replica that starts slowly


class Commit(NamedTuple):
    """That a replica has committed a step under the epoch of its vote."""

    step: int
    loss: str
    state: int
    name: str
    epoch: int
    at: float


@dataclass(frozen=True)
class Log:
    """What a replica has done."""

    losses: dict[int, str]
    shares: dict[int, list[int]]
    norms: dict[int, float]
    computed: Counter[tuple[int, int]]
    samples: dict[tuple[int, int], list[int]]
    votes: list[Vote]
    commits: list[Commit]
    seconds: dict[int, float]
    times: list[float]  # of commits
    errors: list[str]
    facts: list[dict[str, str]]  # of the errors
    weights: int | None

    @classmethod
    def of(cls, path: Path) -> Log:
        """Of a file that may not be there yet, and whose last line may be cut off."""
        text = path.read_text("utf-8") if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        steps = [line for line in lines if "step" in line]
        weights = [line["weights"] for line in lines if "weights" in line]
        computed = [line["computed"] for line in lines if "computed" in line]
        return cls(
            {line["step"]: line["loss"] for line in steps},
            {line["step"]: line["share"] for line in steps},
            {line["step"]: line["norm"] for line in steps},
            Counter((step, index) for step, index, _ in computed),
            {(step, index): samples for step, index, samples in computed},
            [Vote(*line["vote"]) for line in lines if "vote" in line],
            [Commit(*(line[each] for each in Commit._fields)) for line in steps],
            {line["step"]: line["seconds"] for line in steps},
            [line["at"] for line in steps],
            [line["error"] for line in lines if "error" in line],
            [line["facts"] for line in lines if "error" in line],
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


class Place(Protocol):
    """Where replicas meet: a Meeting, or an Office."""

    @property
    def address(self) -> str: ...


class Job:
    """Replicas in processes. All have ended when the context ends."""

    def __init__(self, folder: Path, meeting: Place, until: int, **order: Any) -> None:
        self._folder = folder
        self._order = Order(meeting.address, folder, until, **order)
        self._logs: list[Path] = []
        self._counted: dict[int, tuple[int, int]] = {}
        self.processes: list[Any] = []

    def start(self, doom: tuple[int, str] | None = None, **order: Any) -> list[Any]:
        """Start the ranks of one replica; only the last one is doomed. order: other than others."""
        width, number = self._order.width, len(self._logs) // self._order.width
        for place in range(width):
            log = self._folder / f"replica{number}.{place}"
            fate = doom if place == width - 1 else None
            mine = replace(self._order, log=log, doom=fate, place=place, **order)
            process = forked().Process(target=train, args=(mine,))
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
        files = [log.with_suffix(".stacks") for log in self._logs if log.exists()]
        return "\n".join(f"{each.stem}: {each.read_text('utf-8')}" for each in files)

    def progress(self, replicas: int, steps: int) -> list[int]:
        """Until so many replicas have done so many more steps. The numbers of these ranks."""
        before = self.steps()
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            more = [now - count for now, count in zip(self.steps(), before, strict=True)]
            found = [number for number, each in enumerate(more) if each >= steps]
            if len(found) >= replicas:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"fewer than {replicas} replicas go on")

    def steps(self) -> list[int]:
        """How many steps each rank has done."""
        return [self._steps(number) for number in range(len(self._logs))]

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

    def wait(self, deadline_s: float = DEADLINE_S) -> list[Log]:
        """When all have ended."""
        for process in self.processes:
            process.join(deadline_s)
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


def undisturbed(folder: Path, until: int, *, replicas: int = 1, **order: Any) -> list[Log]:
    """A run that nothing happens to, by rank."""
    folder.mkdir()
    with coordinated(replicas) as meeting, Job(folder, meeting, until, **order) as job:
        for _ in range(replicas):
            job.start()
        return job.wait(10 * DEADLINE_S)


def step_indices(step: int) -> set[tuple[int, int]]:
    return {(step, index) for index in range(MICROBATCHES)}


def assert_like(log: Log, alone: Log) -> None:
    """The same losses and weights as those of UNTIL steps, bit for bit, and no microbatch twice."""
    assert log.losses == {step: alone.losses[step] for step in log.losses}
    assert not [each for each, times in log.computed.items() if times > 1]
    if UNTIL - 1 in log.losses:
        assert log.weights == alone.weights


def replica(address: str | None, model: nn.Module | None = None, **options: object) -> Replicas:
    """One in this process, like those of a Job."""
    model = model or model_of()
    facts: dict[str, Any] = {
        "microbatches": MICROBATCHES, "samples": SAMPLES, "batch": BATCH, "seed": SEED, **options
    }  # fmt: skip
    return Replicas(model, optimizer_of(model), coordinator=address, **facts)
