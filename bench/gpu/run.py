"""`python -m bench.gpu`: run the checks one after the other, each in its own process, and write the
table after each.

Owns: the options, the size of the state, the time. If the device, the host or the disk cannot hold
the state, a smaller one is taken, and the report says so.
Invariants: a check that raises, dies or does not end is recorded, and the next one runs. When the
time of the run is up, the checks that are left are recorded as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench import harness
from bench.gpu import figures
from bench.gpu.checks import CHECKS, Entry
from bench.gpu.child import run_task
from bench.gpu.facts import host_facts
from bench.gpu.figures import FAILED, MEASURED, Figure
from bench.gpu.report import Report
from bench.gpu.task import Task

GIGABYTES, SMOKE_BYTES = 12.0, 2 << 20
# Of what is free, as multiples of the state: retired files beside the newest step and a partial
# one; staging memory and what DCP stages; gradients, and room for the scratch of a comparison.
DISK_STATES, HOST_STATES, DEVICE_STATES = 3.5, 2.5, 2.0
PEERS = tuple(entry.peer for entry in CHECKS.values() if entry.peer)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="of the state")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), metavar="NAME", help="checks")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="none: no peers")
    parser.add_argument("--seconds", type=float, default=540.0, help="for the whole run")
    parser.add_argument("--device", default="cuda", help="cpu runs what makes sense there")
    parser.add_argument("--dir", type=Path, help="the storage under test (default: below --out)")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/gpu")
    parser.add_argument("--smoke", action="store_true", help="a tiny state, seconds; not a result")
    parser.add_argument("--in-process", action="store_true", help="no process per check (smoke)")
    options = parser.parse_args(arguments)
    if options.in_process and not options.smoke:
        parser.error("--in-process is for --smoke: figures need a process per check")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} finds no CUDA device here; --smoke --device cpu runs what "
            "needs none"
        )
    return options


def chosen(options: argparse.Namespace) -> dict[str, Entry]:
    """The checks of this run and the ceilings that they need, in their order."""
    asked = {
        name
        for name, entry in CHECKS.items()
        if (options.only is None or name in options.only)
        and (not entry.peer or entry.peer in options.peers)
    }
    asked |= {needed for name in asked for needed in CHECKS[name].needs}
    return {name: entry for name, entry in CHECKS.items() if name in asked}


def fitting(wanted: int, directory: Path, device: torch.device) -> int:
    """As many bytes of state as were asked for, or as fit."""
    room = [
        shutil.disk_usage(directory).free / DISK_STATES,
        harness.available_memory() / HOST_STATES,
    ]
    if device.type == "cuda":
        room.append(_device_memory() / DEVICE_STATES)
    return int(min(wanted, *room))


def _device_memory() -> int:
    """Asked in another process: this one must not take memory of the device with a context."""
    words = "import torch; print(torch.cuda.mem_get_info()[0])"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


class Runner:
    """Runs checks until the time is up."""

    def __init__(self, options: argparse.Namespace, state_bytes: int, root: Path) -> None:
        self._options = options
        self._state_bytes = state_bytes
        self._root = root
        self._ends = time.monotonic() + options.seconds
        self.found: dict[str, float] = {}

    def run(self, name: str, entry: Entry) -> list[Figure]:
        left = self._ends - time.monotonic()
        if left <= 0:
            return [dataclasses.replace(figures.waiting(name), reason="the time of the run was up")]
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self._root) as directory:
            task = Task(
                name, self._options.device, directory, self._state_bytes, self.found,
                self._options.smoke,
            )  # fmt: skip
            found = self._figures(task, entry, min(entry.deadline_s, left))
        self.found |= {
            each.name: each.value
            for each in found
            if each.verdict == MEASURED and isinstance(each.value, float)
        }
        return found

    def _figures(self, task: Task, entry: Entry, deadline_s: float) -> list[Figure]:
        with tempfile.TemporaryDirectory(dir=self._options.out) as exchange:
            result = Path(exchange, "figures")
            result.touch()
            reason = ""
            if self._options.in_process:
                run_task(task, entry.run, result)
            else:
                reason = self._in_own_process(task, result, deadline_s)
            found = [Figure(**json.loads(line)) for line in result.read_text().splitlines()]
        if reason or not found:
            found.append(figures.failed(task.check, reason or "it found nothing"))
        return found

    def _in_own_process(self, task: Task, result: Path, deadline_s: float) -> str:
        """Run a check in a process of its own; why it did not end well, or ""."""
        spec = result.with_name("task.json")
        spec.write_text(json.dumps(dataclasses.asdict(task)))
        path = [str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (self._options.out / "checks.log").open("a") as log:
            print(f"== {task.check}", file=log, flush=True)
            with subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.child", str(spec), str(result)],
                cwd=harness.ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process:
                return _ending(process, deadline_s)


def _ending(process: subprocess.Popen[bytes], deadline_s: float) -> str:
    try:
        code = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return f"it did not end in {deadline_s:.0f} s"
    finally:
        # Also the processes that a check has left behind: theirs is the session it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return f"its process ended with {code}: see checks.log" if code else ""


def main(arguments: list[str] | None = None) -> int:
    """0 when no check failed; a figure that missed its target is in the table."""
    options = parse(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    parent = options.dir or options.out
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=parent) as root:
        wanted = SMOKE_BYTES if options.smoke else int(options.gigabytes * harness.GB)
        state_bytes = fitting(wanted, Path(root), torch.device(options.device))
        words = sys.argv[1:] if arguments is None else arguments
        facts = host_facts(Path(root), words) | {"state_bytes": state_bytes, "asked_bytes": wanted}
        checks = chosen(options)
        report = Report(options.out, facts, list(checks))
        runner = Runner(options, state_bytes, Path(root))
        for name, entry in checks.items():
            begin = time.monotonic()
            found = runner.run(name, entry)
            report.add(name, found, time.monotonic() - begin)
            _tell(name, found, time.monotonic() - begin)
    print(f"{options.out / 'gpu.md'}: {dict(report.counts)}")
    return 1 if report.counts[FAILED] else 0


def _tell(name: str, found: list[Figure], seconds: float) -> None:
    print(f"{name} ({seconds:.1f} s)")
    for each in found:
        value = each.reason if each.value is None else each.value
        print(f"  {each.verdict:9}{each.name}: {value} {each.unit} {each.expected}", flush=True)
