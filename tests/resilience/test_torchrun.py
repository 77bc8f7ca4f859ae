"""Replicas under the real torchrun: one of it for each node, or one for each replica of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from resilience.jobs import DEADLINE_S, Log, coordinated, undisturbed

UNTIL = 12
SCRIPT = Path(__file__).with_name("launched.py")
needs_time = pytest.mark.skipif(
    os.environ.get("STATEHOLD_REPLICAS_DEMO") != "1", reason="STATEHOLD_REPLICAS_DEMO=1"
)


@dataclass
class Nodes:
    """Torchruns of two ranks each. They hold near the end until `go` exists."""

    folder: Path
    coordinator: str
    dooms: Mapping[str, tuple[int, str]]
    width: int = 1
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def go(self) -> Path:
        return self.folder / "go"

    def start(self, node: str, *options: str) -> subprocess.Popen[bytes]:
        spec: dict[str, Any] = {
            "node": node, "folder": str(self.folder), "coordinator": self.coordinator,
            "dooms": self.dooms, "width": self.width, "until": UNTIL,
            "hold": [UNTIL - 4, str(self.go)],
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *options,
            str(SCRIPT), json.dumps(spec),
        ]  # fmt: skip
        with (self.folder / f"{node}.printed").open("wb") as printed:
            launcher = subprocess.Popen(command, stdout=printed, stderr=printed)
        self.launchers.append(launcher)
        return launcher

    def codes(self) -> list[int]:
        return [each.wait(DEADLINE_S) for each in self.launchers]

    def log(self, name: str) -> Log:
        return Log.of(self.folder / name)


@contextlib.contextmanager
def nodes(folder: Path, coordinator: str, **options: Any) -> Iterator[Nodes]:
    made = Nodes(folder, coordinator, **options)
    try:
        yield made
    finally:
        for each in made.launchers:
            each.terminate()
        for each in made.launchers:
            each.wait(DEADLINE_S)


@needs_time
def test_torchrun_of_a_node_starts_lost_replicas_again(tmp_path: Path) -> None:
    """Each rank is a replica. torchrun ends the other one of the node, and starts both again."""
    alone = undisturbed(tmp_path / "alone", UNTIL)[0]
    dooms = {"a.0.1": (4, "sum")}
    with coordinated(4) as meeting, nodes(tmp_path, meeting.address, dooms=dooms) as job:
        job.start("a", "--max-restarts", "1")
        job.start("b")
        meeting.wait_for("has connected", times=6)
        job.go.touch()
        assert job.codes() == [0, 0]
    assert max(job.log("a.0.1").losses) == 3
    for name in ("a.1.0", "a.1.1", "b.0.0", "b.0.1"):
        log = job.log(name)
        assert log.losses == {step: alone.losses[step] for step in log.losses}
        assert log.weights == alone.weights
    for name in ("a.1.0", "a.1.1"):
        assert job.log(name).shares[UNTIL - 1]
    assert len(job.log("b.0.0").losses) == UNTIL


@needs_time
def test_torchrun_of_a_replica_is_started_again(tmp_path: Path) -> None:
    """Two replicas of two ranks (FSDP2), each with a torchrun, which ends when a rank is lost."""
    whole = undisturbed(tmp_path / "whole", UNTIL, width=2)
    dooms = {"a.0.1": (4, "sum")}
    with coordinated(2) as meeting, nodes(tmp_path, meeting.address, dooms=dooms, width=2) as job:
        lost = job.start("a")
        job.start("b")
        assert lost.wait(DEADLINE_S) == 1
        job.start("c")
        meeting.wait_for("has connected", times=6)
        job.go.touch()
        assert job.codes() == [1, 0, 0]
    for name in ("b.0.0", "b.0.1", "c.0.0", "c.0.1"):
        log, same = job.log(name), whole[int(name[-1])]
        assert log.losses == {step: same.losses[step] for step in log.losses}
        assert log.weights == same.weights
    assert job.log("c.0.0").shares[UNTIL - 1]
