"""Containers as clusters start them, of bwrap: what a job sees of the host, and how it is ended.

Owns: the processes of a container, and what the job in it has said.
Invariant: a container ends with the `with` block of its Pod.
Not here: limits of memory and of processors, which a job takes from a control group (trainer).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.training import Training

TRAINER = Path(__file__).with_name("trainer.py")
END_S = 240.0
NEEDED = pytest.mark.programs("bwrap", root=True)
WHOLE = ("--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent")


@functools.cache
def undisturbed(width: int, steps: int) -> tuple[str, ...]:
    """The losses of the steps from 1 on, without a Checkpointer."""
    training = Training(width=width)
    return tuple(training.step().hex() for _ in range(steps))


class Pod:
    """A container with the trainer in it. arguments: of bwrap, besides those of every container."""

    def __init__(
        self, arguments: Sequence[str], run: Path, last: int, log: Path, **options: Any
    ) -> None:
        self.width = options.get("width", 64)
        self._log = log
        self._said: list[dict[str, Any]] = []
        command = [
            "bwrap", *arguments, sys.executable, str(TRAINER), str(run), str(last),
            json.dumps(options),
        ]  # fmt: skip
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def job(self) -> int:
        """The process of the trainer, as the host numbers it."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, step: int) -> None:
        """Return once this step is committed."""
        while not (self._said and self._said[-1].get("step") == step):
            self._hear(f"step {step}")

    def _hear(self, what: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the job ended before {what}\n{self.log()[-3000:]}"
        self._said.append(json.loads(line))

    def end(self) -> int:
        """Wait for its end; the exit code."""
        assert self.process.stdout is not None
        self._said += [json.loads(line) for line in self.process.stdout if line.endswith("\n")]
        return self.process.wait(END_S)

    def said(self, name: str) -> list[Any]:
        return [event[name] for event in self._said if name in event]

    def check(self, restored: int | None, last: int) -> None:
        """The job went on from `restored` to `last`, with the losses of an undisturbed one."""
        assert self.said("restored") == [restored]
        begin = restored or 0
        assert self.said("step") == [*range(begin + 1, last + 1)]
        assert self.said("loss") == [*undisturbed(self.width, last)[begin:]]


def in_(folder: Path, name: str = "run") -> Path:
    """A run that a container may write to, whatever else is read-only."""
    path = folder / "volume"
    path.mkdir(exist_ok=True)
    os.chmod(path, 0o755)
    return path / name
