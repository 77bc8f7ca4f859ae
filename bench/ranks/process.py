"""One rank of a job: meets the others, measures its tasks one after the other, writes its records.

`python -m bench.ranks.process SPEC RANK` is what run.py starts. A task that fails on this rank ends
the process, because the others may wait for it: their connections break, and they end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.ranks import parts
from bench.ranks.measure import measure
from bench.ranks.task import Task

TIMEOUT = timedelta(seconds=300)


def main() -> None:
    with contextlib.suppress(OSError):  # if memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    run(Path(sys.argv[1]), int(sys.argv[2]))


def forked(rank: int, path: str, environment: dict[str, str], log: str) -> None:
    """The same in a process that was forked, with an environment and a log of its own."""
    os.environ.update(environment)
    with open(log, "a") as target:
        for descriptor in (1, 2):
            os.dup2(target.fileno(), descriptor)
    run(Path(path), rank)


def run(path: Path, rank: int) -> None:
    spec = json.loads(path.read_text())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{spec['port']}",
        timeout=TIMEOUT,
        rank=rank,
        world_size=spec["ranks"],
    )
    parts.install()
    for index, values in enumerate(spec["tasks"]):
        result = _measured(Task(**values))
        path.with_name(f"{index}-{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            sys.stderr.flush()
            os._exit(1)  # not waiting for threads that wait for other ranks
        dist.barrier()
    dist.destroy_process_group()


def _measured(task: Task) -> dict[str, Any]:
    try:
        return measure(task)
    except Exception as error:  # said in the record, and in the log with its traceback
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
