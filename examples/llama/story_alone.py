"""The demo on one process: train, die in the middle of a save, resume, get the same losses.

    1  a reference run, uninterrupted, that saves nothing
    2  the same run saving at every step, in a process that kills itself with SIGKILL while a save
       is under way: after save() returned, before the step is committed
    3  the same command again: it resumes from the newest committed step and finishes
    4  every loss of 2 and 3 against that of 1, bit for bit
    5  what the saves cost, and a plot of both loss curves

Owns the order of these. Invariants: it raises DemoError unless the process died in the middle of a
save and all losses are equal. Leaves training to train.py, measuring and plotting to report.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import report
from journal import read_events
from story import (
    Demo,
    DemoError,
    committed_steps,
    compare,
    die_in_save,
    heading,
    prepare,
    show_run,
)

HERE = Path(__file__).resolve().parent


# -- the process that dies ---------------------------------------------------------------------


def train_until_killed(kill_at: int, arguments: Sequence[str]) -> None:
    """The body of the process that dies."""
    import config as settings
    from train import train

    start = settings.parse(arguments)
    train(
        start,
        lambda save, display: die_in_save(
            save, display, kill_at=kill_at, run=start.run, between=("staged", "committed")
        ),
    )


# -- the process that watches ------------------------------------------------------------------


def _options(demo: Demo, run: Path, label: str) -> list[str]:
    """The command line of train.py. The checksums tell a wrong state from other arithmetic."""
    return [*demo.train_options(run, label), "--checksums"]


def run_reference(demo: Demo) -> None:
    """Phase 1."""
    heading(1, "the reference: uninterrupted, saves nothing")
    arguments = [*_options(demo, demo.reference, "reference"), "--no-save"]
    code = call("train.py", arguments)
    if code != 0:
        raise DemoError(f"the reference run ended with {code}")


def run_killed(demo: Demo) -> int:
    """Phase 2: train until the process dies in a save; the step of that save."""
    heading(
        2, f"the same, saving at every step, until it kills itself in a save (from {demo.kill_at})"
    )
    arguments = ["--die-at", str(demo.kill_at), *_options(demo, demo.run, "killed")]
    code = call("demo.py", arguments)
    if code != -signal.SIGKILL:
        raise DemoError(f"the run should have died by SIGKILL in a save, and ended with {code}")
    partials = sorted(demo.run.glob("step-*.partial"))
    if len(partials) != 1:
        raise DemoError(f"expected one unfinished step in {demo.run}, found {len(partials)}")
    show_run(demo.run)
    return int(partials[0].name.removeprefix("step-").removesuffix(".partial"))


def run_resumed(demo: Demo, killed_in: int) -> int:
    """Phase 3: the same command to the end; the step it resumed from."""
    heading(3, "the same command again: resumes from the newest committed step")
    newest = committed_steps(demo.run)[-1]
    arguments = _options(demo, demo.run, "resumed")
    code = call("train.py", arguments)
    if code != 0:
        raise DemoError(f"the resumed run ended with {code}")
    starts = [record["step"] for record in read_events(demo.run / "log.jsonl", "start")]
    if starts != [0, newest] or newest >= killed_in:
        raise DemoError(f"killed in {killed_in}, newest committed {newest}, starts at {starts}")
    return newest


def carry_out(demo: Demo) -> None:
    """All five phases."""
    began = time.monotonic()
    prepare(demo)
    run_reference(demo)
    killed_in = run_killed(demo)
    resumed_from = run_resumed(demo, killed_in)
    heading(4, "the losses, bit for bit")
    compare(demo)
    heading(5, "what the saves cost")
    measured = report.measure(demo.reference / "log.jsonl", demo.run / "log.jsonl")
    print(report.table(measured))
    print()
    print(report.ascii_plot(measured, killed_in))
    print(report.save_plot(measured, killed_in, resumed_from, demo.out / "losses.png"))
    print(f"\nkilled in the save of step {killed_in}, resumed from step {resumed_from}, "
          f"equal bit for bit; {time.monotonic() - began:.0f} s")  # fmt: skip


def call(program: str, arguments: Sequence[str], errors: int | None = None) -> int:
    """Run a program of this example to its end; its exit status. errors: a file for its stderr.

    By default torch's threads spin while they wait for each other. On a machine with other work
    that makes a step ten times as long and hides what saving costs; sleeping changes no number.
    """
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    words = [sys.executable, str(HERE / program), *arguments]
    return subprocess.call(words, env=environment, stderr=errors)
