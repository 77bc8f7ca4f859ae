"""Small jobs of several processes on this machine, for tests of what is distributed.

Starting a job costs seconds, so one job runs many checks: functions of a module that are called
`check_...` and take a Job. Every rank runs all of them in the same order; a check that fails on
one rank ends the job, because the others may wait for it in a collective.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from statehold.tensors.captured import Capture
from statehold.tensors.kinds import capture
from support.forked import forked

TIMEOUT = timedelta(seconds=60)
OK = "ok"


@dataclass(frozen=True)
class Job:
    """What a check knows of its job."""

    rank: int
    size: int
    folder: Path

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found


def captured(state: Mapping[str, Any]) -> Capture:
    """This rank's part of a state."""
    return capture(state, distributed.get_rank())


def checks_of(module: str) -> dict[str, Callable[[Job], None]]:
    """The checks of a module by name, in the order of the file."""
    members = vars(importlib.import_module(module))
    return {name: value for name, value in members.items() if name.startswith("check_")}


def run_job(module: str, size: int) -> dict[str, str]:
    """Run the checks of `module` on `size` ranks; "ok" or what went wrong, by check."""
    with tempfile.TemporaryDirectory() as folder:
        forked()
        multiprocessing.start_processes(
            _rank, (module, size, folder), nprocs=size, start_method="forkserver"
        )
        outcomes: dict[str, str] = {}
        for name in checks_of(module):
            texts = [_read(Path(folder) / f"{name}.{rank}") for rank in range(size)]
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text != OK]
            outcomes[name] = "\n".join(wrong) or OK
        return outcomes


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else "did not get that far"


def _rank(rank: int, module: str, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/meeting", TIMEOUT, rank=rank, world_size=size
    )
    job = Job(rank, size, Path(folder))
    try:
        for name, check in checks_of(module).items():
            text = _outcome(check, job)
            (Path(folder) / f"{name}.{rank}").write_text(text, "utf-8")
            if text != OK:
                os._exit(0)  # the others see the connection break, where they wait for this rank
            distributed.barrier()
    except RuntimeError:
        os._exit(0)
    distributed.destroy_process_group()


def _outcome(check: Callable[[Job], None], job: Job) -> str:
    try:
        torch.manual_seed(0)
        check(job)
    except BaseException:
        return traceback.format_exc()
    return OK
