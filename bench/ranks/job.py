"""Starts the processes of a job, one a rank, and collects their records."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT
from bench.ranks.process import forked
from bench.ranks.task import Task

JOB_DEADLINE_S = 900
GRACE_S = 20  # for the other ranks, once one has failed


def run_job(tasks: Sequence[Task], out: Path) -> list[dict[str, Any]]:
    """A record a task, by processes of their own; what they print goes to out/cases.log."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=out) as exchange:
        folder = Path(exchange)
        spec = {"ranks": tasks[0].ranks, "port": _free_port()}
        values = [dataclasses.asdict(task) for task in tasks]
        (folder / "spec.json").write_text(json.dumps(spec | {"tasks": values}))
        with (out / "cases.log").open("a") as log:
            print(f"== {values}", file=log, flush=True)
            _run_processes(folder / "spec.json", spec | {"tasks": values}, log)
        seconds = time.perf_counter() - begin
        return [_record(task, index, folder, seconds) for index, task in enumerate(tasks)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_processes(path: Path, spec: dict[str, Any], log: Any) -> None:
    environment = {
        "MASTER_ADDR": "127.0.0.1",  # the checkpoint processes of DCP read it
        "MASTER_PORT": str(spec["port"]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = range(spec["ranks"])
    if spec["tasks"][0]["size"] == "smoke":
        _run_forked(path, ranks, environment, log)
        return
    words = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(words)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.ranks.process", str(path), str(rank)],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
        )
        for rank in ranks
    ]
    try:
        _wait_for_all(processes, time.monotonic() + JOB_DEADLINE_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run_forked(path: Path, ranks: range, environment: dict[str, str], log: Any) -> None:
    """The processes of smoke runs are forks of this one, which has imported torch for all jobs."""
    context = multiprocessing.get_context("fork")
    words = str(path), environment, log.name
    processes = [context.Process(target=forked, args=(rank, *words)) for rank in ranks]
    for each in processes:
        each.start()
    until = time.monotonic() + JOB_DEADLINE_S
    for each in processes:
        each.join(max(0.0, until - time.monotonic()))
        if each.exitcode != 0:
            until = min(until, time.monotonic() + GRACE_S)
    for each in processes:
        each.kill()


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    """Until all have ended, a deadline, or a while after one has failed."""
    for process in _in_any_order(processes, until):
        if process.returncode:
            until = min(until, time.monotonic() + GRACE_S)
            for other in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    other.wait(max(0.0, until - time.monotonic()))
            return


def _in_any_order(processes: Sequence[subprocess.Popen[bytes]], until: float) -> Any:
    left = list(processes)
    while left and time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            left[0].wait(0.2)
        for process in [each for each in left if each.poll() is not None]:
            left.remove(process)
            yield process


def _record(task: Task, index: int, folder: Path, seconds: float) -> dict[str, Any]:
    paths = [folder / f"{index}-{rank}.json" for rank in range(task.ranks)]
    ranks = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    errors = [f"rank {i}: {each['error']}" for i, each in enumerate(ranks) if "error" in each]
    errors += [f"rank {i} did not get that far" for i, each in enumerate(ranks) if not each]
    wrong = [f"rank {i}: {w}" for i, each in enumerate(ranks) if (w := each.get("difference"))]
    return {
        "task": dataclasses.asdict(task) | {"directory": ""},
        "status": "failed" if errors else "wrong" if wrong else "ok",
        "reason": "; ".join([*errors, *wrong]),
        "ranks": ranks,
        "job_s": seconds,
    }
