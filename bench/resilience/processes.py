"""Processes of jobs of replicas, and what they have written down.

Invariants: what was started has ended when its context ends. A log has one JSON document a line.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import harness

END_S = 30.0
TO_NOWHERE: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

Processes = list["subprocess.Popen[str]"]


@contextlib.contextmanager
def ended(processes: Processes) -> Iterator[Processes]:
    """Launchers end what they have started when they are asked to, and not when they are killed."""
    try:
        yield processes
    finally:
        for each in processes:
            each.send_signal(signal.SIGTERM)
        for each in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(END_S)
            each.kill()
            each.wait()


@contextlib.contextmanager
def coordinated(replicas: int) -> Iterator[str]:
    """A coordinator of so many replicas; its address."""
    words = ["coordinate", "--host", "127.0.0.1", "--port", 0, "--replicas", replicas]
    coordinator = harness.start("statehold", *words, stdout=-1)
    with coordinator, ended([coordinator]):
        assert coordinator.stdout is not None
        yield coordinator.stdout.readline().split()[-1]


def lines(log: Path) -> list[dict[str, Any]]:
    """All complete ones: their writer may have been killed."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
