"""Jobs of tests: folders with a trainer and a script of docs/cluster.md; what ranks tell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.slurm.cluster import DEADLINE_S, Cluster
from infra.slurm.trainer import EVERY, HOLD, STEPS
from support.agents import steps_in, wait_for
from support.documents import blocks

PAGE = Path(__file__).parents[3] / "docs/cluster.md"
SCRIPTS = [each.code for each in blocks(PAGE) if each.code.startswith("#!/bin/bash")]
SRUN, WARNED_SHELL = [each for each in SCRIPTS if "-eq 75 ]" in each]
(TORCHRUN,) = (each for each in SCRIPTS if "torchrun" in each)
(TASK,) = (each.code for each in blocks(PAGE) if "tatehold-agent" in each.code)

WHOLE = list(range(1, STEPS + 1))
SAVED = HOLD // EVERY * EVERY  # the newest step of a job that waits in the middle


class Job:
    """A run of two ranks below `folder`, in one job or several, one after another."""

    def __init__(
        self, cluster: Cluster, folder: Path, script: str, memory: Path | None = None
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.run, self.number = folder / "run", ""
        self.near = memory or self.run  # where saves go first
        folder.mkdir()
        shutil.copy(Path(__file__).with_name("trainer.py"), folder / "train.py")
        (folder / "job.sh").write_text(script)

    def start(self, *options: str) -> None:
        self.number = self.cluster.submit(self.folder / "job.sh", *options)

    def start_and_hold(self, *options: str, ranks: int = 2) -> None:
        """Return when all ranks wait in the middle of the training, and all saves are committed."""
        self.start(*options)
        self.wait_for(lambda: self._holding() == ranks, "the ranks do not get to their step")
        # The job may see another /dev/shm at this path.
        saves = Path(f"/proc/{self.pid(0)}/root") / self.near.relative_to("/")
        self.wait_for(lambda: steps_in(saves)[-1:] == [SAVED], "a save is not committed")

    def close(self) -> None:
        """End what a test that failed has left."""
        if self.number:
            self.cluster.end(self.number)

    def reach_its_limit(self) -> None:
        """Let its time be over in one to two minutes; return when it has left because of that.

        The next start has time enough, whatever the machine does meanwhile.
        """
        hours, minutes, _ = self.cluster.facts(self.number)["RunTime"].split(":")
        self._limit(60 * int(hours) + int(minutes) + 2)
        self.wait_for(lambda: self.cluster.facts(self.number)["Restarts"] == "1", "no restart")
        self._limit(60)

    def _limit(self, minutes: int) -> None:
        self.cluster.tell("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def go(self) -> None:
        (self.folder / "go").touch()

    def ended(self) -> dict[str, str]:
        """The facts about the job at its end."""
        return self.cluster.ended(self.number)

    def wait_for(self, fact: Callable[[], Any], what: str) -> None:
        wait_for(fact, lambda: f"{what}\n{self.log()}", DEADLINE_S)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else "no log"

    def told(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"told-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def starts(self, rank: int = 0) -> list[int]:
        """The steps from which the rank has gone on, job after job."""
        return [event["start"] for event in self.told(rank) if "start" in event]

    def steps(self, rank: int = 0) -> list[int]:
        """The steps that the rank has trained, in this order, those that it repeated again."""
        return [event["step"] for event in self.told(rank) if "step" in event]

    def losses(self) -> list[set[tuple[int, str]]]:
        """All losses of each rank. A step that was repeated with another loss has two."""
        return [
            {(event["step"], event["loss"]) for event in self.told(rank) if "step" in event}
            for rank in range(2)
        ]

    def pid(self, rank: int) -> int:
        return int([event["pid"] for event in self.told(rank) if "pid" in event][-1])

    def _holding(self) -> int:
        return sum(any("holding" in event for event in self.told(rank)) for rank in range(2))
