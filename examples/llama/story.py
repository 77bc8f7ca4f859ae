"""What all demos share: where they put things, how a process dies in a save, how losses compare.

Owns Demo, DemoError, the output directory, and the comparison bit for bit. Invariants: nothing is
removed but what an earlier demo left. Leaves the order of events to the stories.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from journal import StepRecord, read_events, read_steps

if TYPE_CHECKING:
    import statehold
    from display import Display

MARKER = "this-is-a-demo"  # says that a directory may be removed by the next demo
RUN_OPTIONS = ("--save-every", "1", "--keep", "3", "--staging", "256MiB", "--warmup", "10")


class DemoError(Exception):
    """The demo did not show what it claims."""


class OtherArithmetic(DemoError):
    """Two processes computed different losses from equal states, so the demo can show nothing.

    About one process in forty did on some machines, before it had saved or restored anything.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What to do: where, how many steps, when to die, and further options of train.py."""

    out: Path
    steps: int
    kill_at: int
    options: tuple[str, ...]
    ranks: int = 1
    replicas: int = 0
    offload: Sequence[str] | None = None
    memory_mib: int = 0
    serving: bool = False

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


def die_in_save(
    save: statehold.Save,
    display: Display,
    *,
    kill_at: int,
    run: Path,
    between: tuple[Literal["begun", "staged"], Literal["written", "committed"]],
) -> None:
    """Die by SIGKILL as soon as a save from `kill_at` on has got between two events.

    The training thread looks as often as it can, because a save of this size is committed within
    some tens of milliseconds. A save that was faster than this thread lets the run go on.
    """
    after, before = between
    if save.step < kill_at:
        return
    while not save.done(before) and save.error is None:
        if (after == "begun" or save.done(after)) and unfinished(run, save.step):
            reached = ", ".join(
                f"{event} {'yes' if save.done(event) else 'no'}"
                for event in ("staged", "written", "committed")
            )
            display.note(f"in the save of step {save.step}: {reached}; now SIGKILL")
            # The note took time: check that the save has not gone on.
            if unfinished(run, save.step) and not save.done(before):
                os.kill(os.getpid(), signal.SIGKILL)
            display.note(f"step {save.step} was {before} first; trying the next save")


def unfinished(run: Path, step: int) -> bool:
    """Whether a save of this step has begun, and the step is not visible yet."""
    return any(run.glob(f"step-{step:012d}.*partial"))


def compare(demo: Demo) -> None:
    """Every loss against the reference, as text of its exact bits."""
    logs = demo.reference / "log.jsonl", demo.run / "log.jsonl"
    threads = {record["threads"] for log in logs for record in read_events(log, "start")}
    if len(threads) != 1:
        raise DemoError(f"the runs used different numbers of threads: {sorted(threads)}")
    found = same_losses(*logs)
    every_step = set(range(1, demo.steps + 1))
    if {record.step for record in found} != every_step:
        raise DemoError("a run did not log every step")
    again = len(found) - demo.steps
    print(
        f"   all {len(found)} losses equal the reference in every bit "
        f"({demo.steps} steps, {again} of them trained twice: before the kill and after it)"
    )


def same_losses(reference: Path, log: Path) -> list[StepRecord]:
    """The steps of a log, whose losses have to be those of the reference, bit for bit."""
    expected = {record.step: record for record in read_steps(reference)}
    found = read_steps(log)
    if missing := {record.step for record in found} - set(expected):
        raise DemoError(f"the reference did not log every step: {sorted(missing)[:8]}")
    different = [record for record in found if record.loss_hex != expected[record.step].loss_hex]
    for record in different[:8]:
        wanted = expected[record.step].loss_hex
        print(f"   step {record.step}: expected {wanted}, got {record.loss_hex}")
    if different:
        first = different[0]
        problem = f"{len(different)} of {len(found)} losses differ from the reference"
        if first.began_with and first.began_with == expected[first.step].began_with:
            raise OtherArithmetic(f"{problem}, and step {first.step} began with an equal state")
        raise DemoError(problem)
    return found


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
        megabytes = {path.name: path.stat().st_size / 1e6 for path in sorted(directory.iterdir())}
        if len(megabytes) > 3:  # several ranks
            listed = f"{len(megabytes)} files, {sum(megabytes.values()):.1f} MB: "
            listed += ", ".join(list(megabytes)[:3]) + ", ..."
        else:
            listed = ", ".join(f"{name} ({size:.1f} MB)" for name, size in megabytes.items())
        print(f"     {directory.name:<26} {listed}", flush=True)


def prepare(demo: Demo) -> None:
    """An empty output directory; nothing but an earlier demo is ever removed."""
    if demo.out.exists() and any(demo.out.iterdir()):
        if not (demo.out / MARKER).exists():
            raise DemoError(f"{demo.out} holds something that is not a demo; choose another --out")
        shutil.rmtree(demo.out)
    demo.out.mkdir(parents=True, exist_ok=True)
    (demo.out / MARKER).touch()
