"""The demo on several ranks: one is lost in the middle of a save, and the others say so.

    1  a reference run on all ranks, uninterrupted, that saves nothing
    2  the same run saving at every step; the last rank kills itself with SIGKILL in a save, and the
       saves of the survivors fail within the deadline, naming it
    3  resumed on as many ranks: every loss equals the reference's, bit for bit
    4  resumed from the same step on one rank less, and on one: the restored state is that of the
       reference bit for bit; the losses are not, because the ranks add in another order
    5  what the saves cost, and a plot of the loss curves

Owns the order of these. Invariants: it raises DemoError unless all of this was seen. Every rank
runs train.py; how it shares the model is in ranks.py, how it is started in job.py.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import differences
import job
import report
import statehold
from differences import Difference, difference
from display import Display
from journal import Journal, read_events
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

# Until a rank is lost; short only in the job that shall lose one: elsewhere ranks may be slow.
PEER_TIMEOUT_S = 5
LOST_A_PEER = 3  # exit status of a rank that gave up because another one was lost
LOG = "log.jsonl"
FAILURES = "failures.jsonl"
# Small, because this is about ranks, which share few cores here: (name, value) for train.py.
SIZES = ("--dim", "128", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--seq", "64")
SAVING = ("--staging", "64MiB", "--checksums", "--threads", "1")
SOURCE_LINE = re.compile(r"\[\S+:\d+\] ")  # of Gloo, at the beginning of its errors
OTHER_ORDER = """
   The state is equal. What is trained from it on other ranks is not: sums over the batch, and over
   the columns of a matrix, are taken in another order. By how much ("=" is bit for bit):
"""
# Rounding moves the losses of a small run by far less, a wrong state by far more.
LARGEST_DIFFERENCE = 1e-3


# -- what a rank does ----------------------------------------------------------------------------


def train_rank(arguments: Sequence[str]) -> None:
    """The body of a rank that trains to the end."""
    import config as settings
    from train import train

    train(settings.parse(arguments))


def train_until_lost(kill_at: int, arguments: Sequence[str]) -> None:
    """The body of a rank in the job that loses its last one."""
    import config as settings
    from train import train

    # The story shows once what every rank would log.
    logging.getLogger("statehold").addHandler(logging.NullHandler())
    start = settings.parse(arguments)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    saves: list[tuple[statehold.Save, float]] = []

    def after_save(save: statehold.Save, _: Display) -> None:
        saves.append((save, time.monotonic()))
        if rank == size - 1:
            display = Display(f"rank {rank}", start.config.steps)
            between = ("begun", "written")  # once written, the others could commit without us
            die_in_save(save, display, kill_at=kill_at, run=start.run, between=between)

    try:
        train(start, after_save)
    except (RuntimeError, statehold.StateholdError) as error:
        failed = [(save, began) for save, began in saves if save.error]
        if not failed:
            raise
        save, began = failed[0]
        record_failure(start.run, rank, save, time.monotonic() - began, error)
        sys.exit(LOST_A_PEER)


def record_failure(
    run: Path, rank: int, save: statehold.Save, seconds: float, error: BaseException
) -> None:
    """Tell the watching process how a save failed; `error` is what ended the training."""
    reason = SOURCE_LINE.sub("", str(error)).partition(". ")[0].splitlines()[0]
    Journal(run / FAILURES).write(
        "failure",
        rank=rank,
        step=save.step,
        lost=list(getattr(save.error, "ranks", ())),
        seconds=seconds,
        message=str(save.error),
        training=f"{type(error).__name__}: {reason}",
    )


# -- what the watching process does --------------------------------------------------------------


def tensor_parallel(ranks: int) -> int:
    """How many ranks share each matrix: pairs, where there are pairs."""
    return 2 if ranks % 2 == 0 else 1


def options(demo: Demo, run: Path, label: str, ranks: int) -> list[str]:
    """The command line of train.py for one of the runs; what the user gave wins."""
    fewer = demo.ranks - 1
    shares = (size // tensor_parallel(size) for size in (demo.ranks, fewer))
    batch = math.lcm(12, *shares)  # a batch that all of these numbers divide
    tp = str(tensor_parallel(ranks))
    sizes = [*SIZES, "--batch", str(batch)]
    return [*sizes, *demo.train_options(run, label), *SAVING, "--tp", tp]


def start(ranks: int, body: Callable[..., None], *arguments: Any) -> None:
    """Run a job in which every rank must end well."""
    codes = job.run(ranks, body, *arguments)
    if any(codes):
        raise DemoError(f"the ranks of a job ended with {codes}")


def run_reference(demo: Demo) -> None:
    """Phase 1."""
    heading(1, f"the reference on {demo.ranks} ranks: uninterrupted, saves nothing")
    arguments = options(demo, demo.reference, "reference", demo.ranks)
    start(demo.ranks, train_rank, [*arguments, "--no-save"])


def run_killed(demo: Demo) -> int:
    """Phase 2: train until a rank dies in a save; the step of that save."""
    victim = demo.ranks - 1
    heading(
        2, f"the same, saving at every step; rank {victim} dies in a save (from {demo.kill_at})"
    )
    arguments = options(demo, demo.run, "killed", demo.ranks)
    arguments += ["--peer-timeout-s", str(PEER_TIMEOUT_S)]
    codes = job.run(demo.ranks, train_until_lost, demo.kill_at, arguments)
    if codes != [LOST_A_PEER] * victim + [-signal.SIGKILL]:
        raise DemoError(
            f"rank {victim} should have died by SIGKILL in a save, and the others should have "
            f"ended with {LOST_A_PEER} for want of it; the ranks ended with {codes}"
        )
    failures = sorted(read_events(demo.run / FAILURES, "failure"), key=lambda each: each["rank"])
    told = {(each["step"], *each["lost"]) for each in failures}
    killed_in = failures[0]["step"]
    if len(failures) != victim or told != {(killed_in, victim)}:
        raise DemoError(f"every survivor's save should have named rank {victim}: {failures}")
    show_failures(failures)
    show_run(demo.run)
    return int(killed_in)


def show_failures(failures: Sequence[dict[str, Any]]) -> None:
    """Print the errors that the survivors got."""
    print(f"   what ended the training of rank 0: {failures[0]['training']}")
    for each in failures:
        print(f"   rank {each['rank']}: the save of step {each['step']} failed "
              f"{each['seconds']:.1f} s after it began, lost ranks: {each['lost']}")  # fmt: skip
    print("   the error of rank 0's save:")
    print("\n".join(f"     {line}" for line in failures[0]["message"].splitlines()), flush=True)


def run_resumed(demo: Demo, run: Path, ranks: int, killed_in: int) -> int:
    """Resume `run` on so many ranks and finish it; the step it resumed from."""
    newest = committed_steps(run)[-1]
    start(ranks, train_rank, options(demo, run, f"on {ranks}", ranks))
    starts = [(each["step"], each["ranks"]) for each in read_events(run / LOG, "start")]
    if starts != [(0, demo.ranks), (newest, ranks)] or newest >= killed_in:
        raise DemoError(f"killed in {killed_in}, newest committed {newest}, starts at {starts}")
    compare_state(demo, run, ranks, newest)
    return newest


def compare_state(demo: Demo, run: Path, ranks: int, step: int) -> None:
    """The restored state, whole, against the reference's after the same step."""
    expected = checksums(demo.reference)[step]
    # The log has this step twice: as it was trained, and as it was restored.
    found = [each["sha256"] for each in read_events(run / LOG, "state")
             if each["step"] == step]  # fmt: skip
    if found != [expected, expected]:
        raise DemoError(
            f"the state of step {step} on {ranks} ranks is not the reference's: "
            f"expected {expected[:16]}, trained and restored {[each[:16] for each in found]}"
        )
    print(f"   the state restored on {ranks} is that of the reference after step {step}, "
          f"bit for bit (sha256 {expected[:16]}...)", flush=True)  # fmt: skip


def checksums(run: Path) -> dict[int, str]:
    """The state after each step, by its checksum."""
    return {each["step"]: each["sha256"] for each in read_events(run / LOG, "state")}


def run_on_fewer(demo: Demo, runs: dict[int, Path], killed_in: int) -> list[Difference]:
    """Phase 4; how far these runs are from the reference."""
    heading(4, f"from the same step on {' and on '.join(map(str, runs))}: another layout")
    for ranks, run in runs.items():
        run_resumed(demo, run, ranks, killed_in)
    all_runs = {demo.ranks: demo.run, **runs}
    found = [
        difference(f"on {ranks}", demo.reference / LOG, run / LOG)
        for ranks, run in all_runs.items()
    ]
    print(OTHER_ORDER)
    print(differences.table(found))
    print("\n" + "\n".join(f"   {each}" for each in found), flush=True)
    if any(each.largest > LARGEST_DIFFERENCE for each in found):
        raise DemoError(f"a loss is further than {LARGEST_DIFFERENCE} from the reference")
    return found


def carry_out(demo: Demo) -> None:
    """All five phases."""
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the processors
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a wait that timed out is no news here
    prepare(demo)
    run_reference(demo)
    killed_in = run_killed(demo)
    runs = {ranks: demo.out / f"run-on-{ranks}" for ranks in sorted({demo.ranks - 1, 1})[::-1]}
    for run in runs.values():
        shutil.copytree(demo.run, run)
    heading(3, f"resumed on {demo.ranks} ranks from the newest committed step")
    resumed_from = run_resumed(demo, demo.run, demo.ranks, killed_in)
    compare(demo)
    if checksums(demo.run) != checksums(demo.reference):
        raise DemoError("the losses are equal, but not all states are")
    print("   and so is the state after every step", flush=True)
    found = run_on_fewer(demo, runs, killed_in)
    heading(5, f"what the saves cost rank 0 of {demo.ranks}, on {os.cpu_count()} processors")
    measured = report.measure(demo.reference / LOG, demo.run / LOG)
    print(report.table(measured))
    print()
    print(report.ascii_plot(measured, killed_in))
    print(differences.save_plot(measured.reference, found, killed_in, demo.out / "losses.png"))
    print(f"\nrank {demo.ranks - 1} killed in the save of step {killed_in}; resumed from step "
          f"{resumed_from} on {', '.join(map(str, [demo.ranks, *runs]))}; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
