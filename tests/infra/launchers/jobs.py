"""What workers tell in a folder of a test, as worker.py says; how they are ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import statehold
from support.agents import wait_ended, wait_for

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0


class Told:
    """A job below a folder. Its logs have names log-..."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, *paths: str, **more: str) -> dict[str, str]:
        """Of the processes; paths: where they find modules, besides statehold and the tests."""
        found = [str(Path(statehold.__file__).parents[1]), str(ROOT / "tests"), *paths]
        found_at = os.pathsep.join(found)
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found_at, **more}

    def told(self, name: str, node: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [each for each in events if name in each and node in (None, each["node"])]

    def wait_for(self, name: str, count: int, is_running: Callable[[], bool]) -> None:
        """Return once workers have told so much; fail if the job has ended before."""

        def enough() -> bool:
            return len(self.told(name)) >= count or not is_running()

        wait_for(enough, self.log, DEADLINE_S)
        assert len(self.told(name)) >= count, self.log()

    def starts(self) -> list[tuple[int, int]]:
        """From which step workers went on, and among how many; in the order of the events."""
        return [(each["start"], each["ranks"]) for each in self.told("start")]

    def pids(self, node: str | None = None) -> list[int]:
        return [each["pid"] for each in self.told("start", node)]

    def go(self) -> None:
        (self.folder / "go").touch()

    def log(self) -> str:
        logs = sorted(self.folder.glob("log-*"))
        return "\n".join(f"{each.name}:\n{each.read_text()[-4000:]}" for each in logs)

    def end_workers(self) -> None:
        """Kill what is left of them; return when all have ended."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
