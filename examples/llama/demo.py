"""The proof: train, die in the middle of a save, resume, and get the same losses bit for bit.

    1  a reference run, uninterrupted, that saves nothing
    2  the same run saving at every step, in a process that kills itself with SIGKILL while a save
       is under way: after save() returned, before the step is committed
    3  the same command again: it resumes from the newest committed step and finishes
    4  every loss of 2 and 3 against that of 1, bit for bit
    5  what the saves cost, and a plot of both loss curves

Owns the order of these and the verdict. Holds: it ends with 0 only when the process died in the
middle of a save and all losses are equal. Leaves training to train.py, measuring and plotting to
report.py. Options it does not know go to train.py: demo.py --dim 128 --data ~/books.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import report
from journal import read_events, read_steps

if TYPE_CHECKING:
    import statehold
    from display import Display

HERE = Path(__file__).resolve().parent
MARKER = "this-is-a-demo"  # says that a directory may be removed by the next demo
RUN_OPTIONS = ("--save-every", "1", "--keep", "3", "--staging", "256MiB", "--warmup", "10")


class DemoError(Exception):
    """The demo did not show what it claims."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What to do: where, how many steps, when to die, and further options of train.py."""

    out: Path
    steps: int
    kill_at: int
    options: tuple[str, ...]

    @property
    def reference(self) -> Path:
        """The directory of the uninterrupted run."""
        return self.out / "reference"

    @property
    def run(self) -> Path:
        """The directory of the run that is killed and resumed."""
        return self.out / "run"

    def train_options(self, run: Path, label: str) -> list[str]:
        """The command line of train.py for one of the runs; later options win."""
        steps = ("--steps", str(self.steps), "--validate-every", str(self.steps))
        return ["--run", str(run), "--label", label, *steps, *RUN_OPTIONS, *self.options]


# -- the process that dies ---------------------------------------------------------------------


def kill_in_save(save: statehold.Save, display: Display, kill_at: int, partial: Path) -> None:
    """Die by SIGKILL as soon as a save from `kill_at` on is staged and not yet committed.

    The training thread looks as often as it can, because a save of this size is committed within
    some tens of milliseconds. A save that was faster than this thread lets the run go on.
    """
    if save.step < kill_at:
        return
    while not save.done("committed") and save.error is None:
        if save.done("staged") and partial.is_dir():
            reached = ", ".join(
                f"{event} {'yes' if save.done(event) else 'no'}"
                for event in ("staged", "written", "committed")
            )
            display.note(f"in the save of step {save.step}: {reached}; now SIGKILL")
            if partial.is_dir():  # the note took time; do not claim what is no longer true
                os.kill(os.getpid(), signal.SIGKILL)
            display.note(f"step {save.step} was committed first; trying the next save")


def train_until_killed(kill_at: int, arguments: Sequence[str]) -> None:
    """The body of the process that dies."""
    import config as settings
    from train import train

    start = settings.parse(arguments)
    train(
        start,
        lambda save, display: kill_in_save(
            save, display, kill_at, start.run / f"step-{save.step:012d}.partial"
        ),
    )


# -- the process that watches ------------------------------------------------------------------


def run_reference(demo: Demo) -> None:
    """Phase 1."""
    heading(1, "the reference: uninterrupted, saves nothing")
    arguments = [*demo.train_options(demo.reference, "reference"), "--no-save"]
    code = call("train.py", arguments)
    if code != 0:
        raise DemoError(f"the reference run ended with {code}")


def run_killed(demo: Demo) -> int:
    """Phase 2: train until the process dies in a save; the step of that save."""
    heading(
        2, f"the same, saving at every step, until it kills itself in a save (from {demo.kill_at})"
    )
    arguments = ["--die-at", str(demo.kill_at), *demo.train_options(demo.run, "killed")]
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
    arguments = demo.train_options(demo.run, "resumed")
    code = call("train.py", arguments)
    if code != 0:
        raise DemoError(f"the resumed run ended with {code}")
    starts = [record["step"] for record in read_events(demo.run / "log.jsonl", "start")]
    if starts != [0, newest] or newest >= killed_in:
        raise DemoError(f"killed in {killed_in}, newest committed {newest}, starts at {starts}")
    return newest


def compare(demo: Demo) -> None:
    """Phase 4: every loss against the reference, as text of its exact bits."""
    heading(4, "the losses, bit for bit")
    expected = {record.step: record.loss_hex for record in read_steps(demo.reference / "log.jsonl")}
    found = read_steps(demo.run / "log.jsonl")
    threads = {
        record["threads"]
        for run in (demo.reference, demo.run)
        for record in read_events(run / "log.jsonl", "start")
    }
    if len(threads) != 1:
        raise DemoError(f"the runs used different numbers of threads: {sorted(threads)}")
    every_step = set(range(1, demo.steps + 1))
    if set(expected) != every_step or {record.step for record in found} != every_step:
        raise DemoError("a run did not log every step")
    different = [record for record in found if record.loss_hex != expected[record.step]]
    for record in different[:8]:
        print(f"   step {record.step}: expected {expected[record.step]}, got {record.loss_hex}")
    if different:
        raise DemoError(f"{len(different)} of {len(found)} losses differ from the reference")
    again = len(found) - demo.steps
    print(
        f"   all {len(found)} losses equal the reference in every bit "
        f"({demo.steps} steps, {again} of them trained twice: before the kill and after it)"
    )


def carry_out(demo: Demo) -> None:
    """All five phases."""
    began = time.monotonic()
    prepare(demo)
    run_reference(demo)
    killed_in = run_killed(demo)
    resumed_from = run_resumed(demo, killed_in)
    compare(demo)
    heading(5, "what the saves cost")
    measured = report.measure(demo.reference / "log.jsonl", demo.run / "log.jsonl")
    print(report.table(measured))
    print()
    print(report.ascii_plot(measured, killed_in))
    print(report.save_plot(measured, killed_in, resumed_from, demo.out / "losses.png"))
    print(f"\nkilled in the save of step {killed_in}, resumed from step {resumed_from}, "
          f"equal bit for bit; {time.monotonic() - began:.0f} s")  # fmt: skip


# -- helpers -----------------------------------------------------------------------------------


def call(program: str, arguments: Sequence[str]) -> int:
    """Run a program of this example to its end; its exit status.

    By default torch's threads spin while they wait for each other. On a machine with other work
    that makes a step ten times as long and hides what saving costs; sleeping changes no number.
    """
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    return subprocess.call([sys.executable, str(HERE / program), *arguments], env=environment)


def heading(number: int, text: str) -> None:
    """Announce a phase, in order with what child processes print."""
    print(f"\n{number}. {text}", flush=True)


def committed_steps(run: Path) -> list[int]:
    """The committed steps of a run, oldest first, read off the directory names."""
    names = (re.fullmatch(r"step-(\d{12})", path.name) for path in run.iterdir())
    return sorted(int(name[1]) for name in names if name)


def show_run(run: Path) -> None:
    """Print what the killed process left behind."""
    print(f"   what it left in {run}:")
    for directory in sorted(run.glob("step-*")):
        files = [f"{p.name} ({p.stat().st_size / 1e6:.1f} MB)" for p in sorted(directory.iterdir())]
        print(f"     {directory.name:<26} {', '.join(files)}", flush=True)


def prepare(demo: Demo) -> None:
    """An empty output directory; nothing but an earlier demo is ever removed."""
    if demo.out.exists() and any(demo.out.iterdir()):
        if not (demo.out / MARKER).exists():
            raise DemoError(f"{demo.out} holds something that is not a demo; choose another --out")
        shutil.rmtree(demo.out)
    demo.out.mkdir(parents=True, exist_ok=True)
    (demo.out / MARKER).touch()


def parse(arguments: Sequence[str]) -> Demo:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train, kill the training in the middle of a save, resume, compare.",
        epilog="Other options go to train.py (see train.py --help): the size of the model, --data.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where (runs/demo)")
    parser.add_argument("--steps", type=int, default=40, help="steps to train (40)")
    parser.add_argument("--kill-at", type=int, help="first save to die in (half of the steps)")
    known, options = parser.parse_known_args(arguments)
    kill_at = known.kill_at or max(2, known.steps // 2)
    if not 2 <= kill_at <= known.steps:
        parser.error(f"--kill-at must be 2 to {known.steps}, so that a step is committed before")
    return Demo(out=known.out, steps=known.steps, kill_at=kill_at, options=tuple(options))


def main(arguments: Sequence[str]) -> int:
    """The demo, or (--die-at STEP, first) the process of it that dies; the exit status."""
    if arguments[:1] == ["--die-at"]:
        train_until_killed(int(arguments[1]), arguments[2:])
        return 0
    try:
        carry_out(parse(arguments))
    except DemoError as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
