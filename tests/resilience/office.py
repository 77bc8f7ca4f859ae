"""Office: a real process of `statehold coordinate`, which can be killed, stopped and started again.

What it reports is in `events`, with the time at which it was read. Another process at the same
address adds to them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

DEADLINE_S = 60


class Event(NamedTuple):
    at: float
    text: str


class Office:
    """replicas, settle_s: as for the command. The process runs when this returns."""

    def __init__(self, replicas: int, settle_s: float) -> None:
        self.events: list[Event] = []
        self._words = ["--host", "127.0.0.1", "--replicas", str(replicas)]
        self._words += ["--settle", str(settle_s)]
        self._changed = threading.Condition()
        self._begun = self._port = 0
        self._process: subprocess.Popen[str]
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """A process that knows nothing, at the address of the one before."""
        command = [sys.executable, "-m", "statehold", "coordinate", "--port", str(self._port)]
        begun = self._begun = len(self.events)
        self._process = subprocess.Popen(
            [*command, *self._words], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()
        line = self.wait_for("coordinating at", since=begun)
        self._port = int(re.search(r":(\d+)$", line.text)[1])  # type: ignore[index]

    def knows(self, pid: int) -> bool:
        """Whether that process has connected to the coordinator that runs now."""
        return any(f"-{pid}-" in each.text for each in self.events[self._begun :])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._begun = len(self.events)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def wait_for(self, text: str, *, without: str | None = None, since: int = 0) -> Event:
        """Until an event from that number on has the text in it, and not the other one."""

        def found() -> Event | None:
            events = (each for each in self.events[since:] if text in each.text)
            return next((e for e in events if without is None or without not in e.text), None)

        with self._changed:
            event = self._changed.wait_for(found, DEADLINE_S)
        if event is None:
            raise TimeoutError(f"no event with {text} and without {without}")
        return event

    def _read(self, lines: Any) -> None:
        for line in lines:
            with self._changed:
                self.events.append(Event(time.monotonic(), line.strip()))
                self._changed.notify_all()
        lines.close()

    def __enter__(self) -> Office:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
