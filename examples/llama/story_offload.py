"""The demo of offloading: state that does not fit into memory trains on paths, dies, and resumes.

    1  a reference: torch's fused AdamW on float32 masters, all in memory, uninterrupted
    2  the same under a limit of memory that the kernel enforces, which it must hit
    3  under this limit with the state on two paths, in a process that kills itself with SIGKILL in
       the middle of an update
    4  the same command again: it resumes from the newest committed step and finishes
    5  every loss, and all weights, masters and moments at the end, against those of 1, bit for bit
    6  what an update moves and what it hides, and a plot of the last one

Owns the order of these. Invariants: it raises DemoError unless the limit was hit, the process died
in an update, and all is equal. Leaves training to train.py, measuring to report_offload.py.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report_offload
from journal import read_events
from story import Demo, DemoError, committed_steps, compare, heading, prepare, show_run
from story_alone import call

if TYPE_CHECKING:
    import statehold
    from statehold import offload

MODEL = ("--dim", "768", "--layers", "16", "--heads", "12", "--kv-heads", "4", "--seq", "64",
         "--batch", "2", "--dtype", "bfloat16", "--lr", "3e-4", "--subgroup", "8MiB")  # fmt: skip
RATES = ("600MB", "300MB")
STACK_BYTES = 2 << 20  # of each thread of the processes that train


# -- the process that dies ---------------------------------------------------------------------


def train_until_killed(kill_at: int, arguments: Sequence[str]) -> None:
    """The body of the process that dies in an update."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import config as settings
    from train import train

    updates = iter(range(1, 1 << 30))
    begun: queue.SimpleQueue[offload.AdamW] = queue.SimpleQueue()

    def before_update(optimizer: Any, *_: object) -> None:
        if next(updates) >= kill_at:
            begun.put(optimizer)

    register_optimizer_step_pre_hook(before_update)
    # Under the limit there may be no memory for the stack of one more thread.
    threading.Thread(target=lambda: die_in_update(begun.get()), daemon=True).start()
    train(settings.parse(arguments), lambda save, _: _commit_first(save))


def _commit_first(save: statehold.Save) -> None:
    """There is a step to resume from, however early the process dies."""
    if save.step == 1:
        save.wait("committed")


def die_in_update(optimizer: offload.AdamW) -> None:
    """Die by SIGKILL when half of the state has been written by an update."""
    before = optimizer.stats
    while True:
        now = optimizer.stats
        written = _written(now) - _written(before)
        if written > now.state_bytes // 2:
            print(
                f"killed  in update {now.updates + 1}: {written / 1e6:.0f} MB of "
                f"{now.state_bytes / 1e6:.0f} MB of state are written; now SIGKILL",
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)


def _written(stats: offload.Stats) -> int:
    return sum(path.written_bytes for path in stats.paths)


# -- the process that watches ------------------------------------------------------------------


def carry_out(demo: Demo) -> None:
    """All six phases."""
    began = time.monotonic()
    prepare(demo)
    paths = demo.offload or [f"{demo.out}/path-{nth}={rate}" for nth, rate in enumerate(RATES)]
    for path in paths:
        Path(path.partition("=")[0]).mkdir(parents=True, exist_ok=True)
    tiers = ["--offload", ",".join(paths), "--staging", "32MiB"]
    # What is freed goes back to the kernel, and so is no longer counted: by default, malloc keeps
    # what a save or restore has had, for itself.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    # A stack counts as a whole. 60 threads, with 8 MiB each, would take more than the limit.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    limit = ["--memory", str(demo.memory_mib)]
    options = [*MODEL, *demo.options]

    heading(1, "the reference: torch's fused AdamW on float32 masters, all in memory")
    reference = [*demo.train_options(demo.reference, "reference"), *options, "--no-save"]
    _succeed([*reference, "--checksums"])

    heading(2, f"the same with {demo.memory_mib} MiB beyond weights and gradients (RLIMIT_DATA)")
    if demo.memory_mib:
        refuse(demo, [*options, *limit, "--no-save"])
    else:
        print("   left out: --memory 0 sets no limit")

    heading(3, f"under this limit with the state on {len(paths)} paths, until it kills itself")
    run = [*demo.train_options(demo.run, "killed"), *options, *tiers, *limit]
    code = call("demo.py", ["--die-in-update", str(demo.kill_at), *run])
    if code != -signal.SIGKILL:
        raise DemoError(f"the run should have died by SIGKILL in an update, and ended with {code}")
    show_run(demo.run)
    newest = committed_steps(demo.run)[-1]

    heading(4, "the same command again: resumes from the newest committed step")
    _succeed([*run, "--label", "resumed"])
    log = demo.run / "log.jsonl"
    starts = [record["step"] for record in read_events(log, "start")]
    if starts != [0, newest]:
        raise DemoError(f"the newest committed step was {newest}, and the runs began at {starts}")

    heading(5, "the losses and the state, bit for bit")
    compare(demo)
    compare_states(demo, [*run, "--memory", "0", "--checksums", "--label", "compared"])

    heading(6, "what an update moves, and what it hides")
    measured = report_offload.measure(log, paths)
    print(report_offload.table(measured))
    print(report_offload.save_plot(measured, demo.out / "timeline.png"))
    print(f"\nkilled in update {demo.kill_at}, resumed from step {newest}, "
          f"equal bit for bit; {time.monotonic() - began:.0f} s")  # fmt: skip


def refuse(demo: Demo, options: Sequence[str]) -> None:
    """Phase 2: torch's optimizer has to fail under the limit; prints what it said."""
    path = demo.out / "refused.txt"
    with path.open("w") as errors:
        words = [*demo.train_options(demo.out / "refused", "refused"), *options]
        code = call("train.py", words, errors.fileno())
    if code == 0:
        raise DemoError("torch's optimizer trained under the limit: the state is too small")
    said = path.read_text().strip().splitlines()[-1]
    if "memory" not in said.lower():
        raise DemoError(f"torch's optimizer failed for another reason than memory; see {path}")
    print(f"   {said[:160]}")


def _succeed(arguments: Sequence[str]) -> None:
    code = call("train.py", arguments)
    if code != 0:
        raise DemoError(f"train.py ended with {code}")


def compare_states(demo: Demo, again: Sequence[str]) -> None:
    """Weights, masters and moments after the last step, as a restore finds them."""
    _succeed(again)
    found = [_state_at(log / "log.jsonl", demo.steps) for log in (demo.reference, demo.run)]
    if found[0] != found[1]:
        raise DemoError(f"the states at the end differ: sha256 {found[0]}, and {found[1]}")
    print(f"   weights, masters and moments are equal: sha256 {found[0][:16]}...")


def _state_at(log: Path, step: int) -> str:
    return next(each["sha256"] for each in read_events(log, "state") if each["step"] == step)
