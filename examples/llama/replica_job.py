"""Replicas in processes, and the coordinator at which they meet: `statehold coordinate`.

Owns these processes, and the words in which the coordinator's reports are shown: a replica is
called by its number in the order of starts. Invariants: nothing is left running. A wait ends with
DemoError when it takes too long, or when a replica ends that should not.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import job
from story import DemoError

# How the coordinator names a replica: host, process, and a part that no other life has.
NAME = re.compile(r"\S+-(\d+)-[0-9a-f]{6}(?: rank 0)?")
SHOWN = re.compile(r"has connected|has gone|has left|is out|has \d+ replica")
DETAIL = re.compile(r", at step \d+$|: \[Errno.*")  # what a user does not ask for here
LOOK_EVERY_S = 1.0  # at the replicas, whether one has failed


class ReplicaJob:
    """replicas: as many begin together. body: what each of them does."""

    def __init__(self, replicas: int, body: Callable[..., None], *, shows: bool) -> None:
        self.address = ""
        self.processes: list[BaseProcess] = []
        self._replicas = replicas
        self._body = body
        self._shows = shows
        self._began = time.time()
        self._pids: dict[int, int] = {}
        self._events: list[tuple[float, str]] = []  # what the coordinator has said, and when
        self._changed = threading.Condition()

    def start(self, *arguments: Any) -> int:
        """Start body(address, number, *arguments) as one more replica; its number."""
        number = len(self.processes)
        process = job.start(self._body, self.address, number, *arguments)
        self.processes.append(process)
        assert process.pid is not None
        self._pids[process.pid] = number
        return number

    def send(self, number: int, signal_: signal.Signals) -> None:
        """Send a signal to a replica."""
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, signal_)

    def wait_for(self, pattern: str, *, since: float = 0.0) -> None:
        """Until the coordinator has said this, not before that time."""

        def is_said() -> bool:
            texts = (text for at, text in self._events if at >= since)
            return any(re.search(pattern, text) for text in texts)

        for _ in self.looks(pattern):
            with self._changed:
                if self._changed.wait_for(is_said, LOOK_EVERY_S):
                    return

    def wait(self, number: int) -> int:
        """Until a replica has ended; its exit status."""
        process = self.processes[number]
        for _ in self.looks(f"the end of replica {number}"):
            process.join(LOOK_EVERY_S)
            if process.exitcode is not None:
                break
        return process.exitcode or 0

    def looks(self, awaited: str) -> Iterator[None]:
        """Again and again, until something is wrong; a replica that was killed is not."""
        until = time.monotonic() + job.TIMEOUT_S
        while time.monotonic() < until:
            yield
            for number, process in enumerate(self.processes):
                if process.exitcode not in (None, 0, -signal.SIGKILL):
                    raise DemoError(f"replica {number} ended with {process.exitcode}")
            if self._coordinator.poll() is not None:
                raise DemoError(f"the coordinator ended with {self._coordinator.returncode}")
        raise DemoError(f"waited too long for {awaited}; last: {self._events[-5:]}")

    def note(self, text: str) -> None:
        """Show a line, with the seconds since the job began."""
        if self._shows:
            print(f"   {time.time() - self._began:6.2f} s  {text}", flush=True)

    def _read(self) -> None:
        assert self._coordinator.stdout is not None
        for line in self._coordinator.stdout:
            report = json.loads(line)
            text = NAME.sub(self._replica, report["event"])
            if SHOWN.search(text):
                self.note(DETAIL.sub("", text))
            with self._changed:
                self._events.append((report["time"], text))
                self._changed.notify_all()

    def _replica(self, name: re.Match[str]) -> str:
        number = self._pids.get(int(name[1]))
        return name[0] if number is None else f"replica {number}"

    def __enter__(self) -> ReplicaJob:
        command = [sys.executable, "-m", "statehold", "coordinate", "--json"]
        command += ["--host", "127.0.0.1", "--port", "0", "--replicas", str(self._replicas)]
        self._coordinator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for("coordinating at")
        self.address = self._events[0][1].rpartition(" ")[2]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        job.end(self.processes)
        self._coordinator.kill()
        self._coordinator.wait()
        self._reader.join()
        assert self._coordinator.stdout is not None
        self._coordinator.stdout.close()
