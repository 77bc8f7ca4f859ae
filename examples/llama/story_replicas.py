"""The demo of resilience: replicas die and hang in the middle of a step, and the loss is the same.

    1  a reference run of all replicas that nothing happens to
    2  the same run. In one step, a replica kills itself with SIGKILL, and a second one while it
       computes what the first one has left. In a later step a third one stops (SIGSTOP): its lease
       ends, and the others go on. A new process joins. Then the stopped one goes on (SIGCONT): what
       it had computed is dropped, and it joins again
    3  every loss and every state of every replica against those of 1, bit for bit
    4  each sample is counted once, whoever has died
    5  who has contributed what to which step, and a plot of the timeline

Owns the order of these. Invariants: it raises DemoError unless all of this was seen. Every replica
runs replica.py; how it is started is in replica_job.py. Leaves figures to report_replicas.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import report_replicas
from journal import Journal, read_events
from replica_job import ReplicaJob
from report_replicas import STRUCK
from story import Demo, DemoError, heading, prepare, same_losses

# Small, because this is about replicas, which share few cores here: options of train.py.
SIZES = ("--dim", "128", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--seq", "64",
         "--batch", "4", "--lease-s", "1.5")  # fmt: skip
FIXED = ("--no-save", "--checksums", "--threads", "1")
STEPS_TO_HANG = 4  # after the step with the kills
STEPS_AT_END = 5  # two to join and to take the state, and then with everybody
HUNG = 3


# -- what a replica does -------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """A replica gets the signal in that step, when it has computed `after` of its microbatches."""

    signal: signal.Signals
    step: int
    after: int


@dataclass(frozen=True)
class Hold:
    """A replica goes on after that step when the file is there.

    Mostly it is. On a busy machine, the run would end before everybody is back.
    """

    step: int
    file: Path


def train_replica(
    coordinator: str,
    number: int,
    arguments: list[str],
    shows: bool,
    fate: Fate | None,
    hold: Hold | None,
) -> None:
    """The body of a replica."""
    import config as settings
    from replica import Microbatch, train

    # The coordinator says the same, and the story shows it.
    logging.getLogger("statehold").addHandler(logging.NullHandler())
    start = settings.parse([*arguments, "--label", label(number)])

    def in_microbatch(microbatch: Microbatch, computed: int) -> None:
        if fate and (microbatch.step + 1, computed) == (fate.step, fate.after):
            strike(start.run, number, fate)

    def after_step(step: int) -> None:
        while hold and step == hold.step and not hold.file.exists():
            time.sleep(0.01)

    train(start, coordinator, in_microbatch, after_step, quiet=not shows or number > 0)


def strike(run: Path, number: int, fate: Fate) -> None:
    """Write down what happens now, and let it happen."""
    words = f"{fate.signal.name} in step {fate.step}, in its microbatch number {fate.after + 1}"
    print(f"             replica {number} gives itself {words}", flush=True)
    with contextlib.closing(Journal(run / STRUCK)) as journal:
        facts = {"replica": number, "step": fate.step, "signal": fate.signal.name}
        journal.write("struck", **facts, at=time.time())
        os.kill(os.getpid(), fate.signal)
        journal.write("continued", **facts, at=time.time())  # after SIGSTOP and SIGCONT


def label(number: int) -> str:
    """What a replica is called, and its log."""
    return f"replica-{number}"


# -- what the watching process does --------------------------------------------------------------


def microbatches(demo: Demo) -> int:
    """Of a step: so many that each survivor takes over one, when the first replica is lost."""
    return demo.replicas * (demo.replicas - 1)


def options(demo: Demo, run: Path) -> list[str]:
    """The command line of replica.py; what the user gave wins over sizes."""
    count = ["--accumulate", str(microbatches(demo))]
    return [*SIZES, *demo.train_options(run, "replica"), *FIXED, *count]


def run_reference(demo: Demo) -> None:
    """Phase 1."""
    heading(1, f"the reference: {demo.replicas} replicas, and nothing happens to them")
    arguments = options(demo, demo.reference)
    with ReplicaJob(demo.replicas, train_replica, shows=False) as replicas:
        for _ in range(demo.replicas):
            replicas.start(arguments, True, None, None)
        codes = [replicas.wait(number) for number in range(demo.replicas)]
    if any(codes):
        raise DemoError(f"the replicas of the reference ended with {codes}")


def run_disturbed(demo: Demo) -> None:
    """Phase 2."""
    heading(2, "the same, but two are killed in a step, one hangs, and two come back")
    arguments = options(demo, demo.run)
    share = microbatches(demo) // demo.replicas
    hold = Hold(demo.steps - STEPS_AT_END, demo.run / "everybody-is-back")
    fates = {
        1: Fate(signal.SIGKILL, demo.kill_at, share - 1),
        2: Fate(signal.SIGKILL, demo.kill_at, share),  # in the one that it has taken over
        HUNG: Fate(signal.SIGSTOP, demo.kill_at + STEPS_TO_HANG, share),
    }
    with ReplicaJob(demo.replicas, train_replica, shows=True) as replicas:
        for number in range(demo.replicas):
            replicas.start(arguments, False, fates.get(number), None if number else hold)
        codes = [replicas.wait(number) for number in (1, 2)]
        if codes != [-signal.SIGKILL] * 2:
            raise DemoError(f"replicas 1 and 2 should have died by SIGKILL, and ended with {codes}")
        stopped = wait_until_stopped(demo.run, replicas)
        replicas.wait_for(rf"replica {HUNG} is out: the lease", since=stopped)
        new = replicas.start(arguments, False, None, None)
        replicas.note(f"a new process is replica {new}")
        replicas.wait_for(rf"replica {new} has connected")  # it joins at the end of a step
        replicas.note(f"SIGCONT to replica {HUNG}")
        continued = time.time()
        replicas.send(HUNG, signal.SIGCONT)
        replicas.wait_for(rf"replica {HUNG} has connected", since=continued)
        hold.file.touch()
        rest = [number for number in range(new + 1) if number not in (1, 2)]
        codes = [replicas.wait(number) for number in rest]
    if any(codes):
        raise DemoError(f"the replicas that went on ended with {codes}")


def wait_until_stopped(run: Path, replicas: ReplicaJob) -> float:
    """When replica HUNG has stopped itself."""
    for _ in replicas.looks(f"the SIGSTOP of replica {HUNG}"):
        for each in report_replicas.struck(run):
            if each["replica"] == HUNG:
                return float(each["at"])
        if replicas.processes[HUNG].exitcode is not None:
            break
        time.sleep(0.05)
    raise DemoError(f"replica {HUNG} came to the end before it could hang")


def check(demo: Demo) -> None:
    """Phases 3 and 4."""
    heading(3, "the losses and the states, bit for bit")
    compare(demo)
    heading(4, "each sample is counted once")
    count(demo)


def compare(demo: Demo) -> None:
    """Phase 3: losses and states of all replicas, as far as each has come."""
    reference = report_replicas.read(demo.reference)[0].log
    expected = states(reference)
    every_step = set(range(1, demo.steps + 1))
    replicas = report_replicas.read(demo.run)
    if expected.keys() != every_step or replicas[0].steps.keys() != every_step:
        raise DemoError("a run did not log every step")
    for replica in replicas:
        found = same_losses(reference, replica.log)
        if different := states(replica.log).items() - expected.items():
            raise DemoError(f"replica {replica.number} has other states: {sorted(different)[:3]}")
        print(f"   replica {replica.number}: {len(found)} losses and states equal the reference "
              "in every bit")  # fmt: skip


def states(log: Path) -> dict[int, str]:
    """The checksum of model and optimizer after each step."""
    return {each["step"]: each["sha256"] for each in read_events(log, "state")}


def count(demo: Demo) -> None:
    """Phase 4: the shares of all replicas, step by step."""
    expected, found = (
        report_replicas.ledger(report_replicas.read(run)) for run in (demo.reference, demo.run)
    )
    steps, indices = range(1, demo.steps + 1), range(microbatches(demo))
    each_once = Counter((step, index) for step in steps for index in indices)
    for which, ledger in (("reference", expected), ("run with failures", found)):
        if wrong := (each_once - ledger.counted) + (ledger.counted - each_once):
            raise DemoError(f"the {which} does not count each microbatch once: {sorted(wrong)[:8]}")
    lost, repeated = expected.samples - found.samples, found.samples - expected.samples
    print(f"   {found.samples.total()} samples counted, "
          f"{lost.total()} lost, {repeated.total()} repeated")  # fmt: skip
    print(f"   {found.computed.total()} microbatches computed, {found.counted.total()} counted: "
          f"the other {found.dropped} were of replicas that were lost")  # fmt: skip
    if lost or repeated:
        raise DemoError("the samples are not those of the reference")
    if found.repeated:
        raise DemoError(f"{found.repeated} microbatches were computed twice by one replica")


def check_returns(demo: Demo) -> None:
    """The replicas that came back contribute; what the stopped one had computed is dropped."""
    replicas = report_replicas.read(demo.run)
    hang = demo.kill_at + STEPS_TO_HANG
    for replica in (replicas[HUNG], replicas[-1]):
        if not replica.steps.get(demo.steps, {}).get("share"):
            raise DemoError(f"replica {replica.number} does not take part in the last step")
    if hang in replicas[HUNG].steps:
        raise DemoError(f"replica {HUNG} came back with the gradients of step {hang}")


def carry_out(demo: Demo) -> None:
    """All five phases."""
    fewest = demo.kill_at + STEPS_TO_HANG + 1 + STEPS_AT_END
    if demo.steps < fewest:
        raise DemoError(f"{demo.steps} steps are too few: the story takes {fewest}")
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the replicas share the processors
    os.environ.setdefault("STATEHOLD_SECRET", secrets.token_hex(32))  # for the processes of the job
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a connection that ends is no news here
    prepare(demo)
    run_reference(demo)
    run_disturbed(demo)
    check(demo)
    check_returns(demo)
    heading(5, "the timeline")
    print(report_replicas.timeline(demo.run))
    print()
    print(report_replicas.pauses(demo.reference, demo.run))
    print(report_replicas.save_plot(demo.reference, demo.run, demo.out / "timeline.png"))
    print(f"\nreplicas 1 and 2 killed in step {demo.kill_at}, replica {HUNG} stopped in step "
          f"{demo.kill_at + STEPS_TO_HANG}, two came back; equal bit for bit; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
