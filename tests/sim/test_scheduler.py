"""A seed of the simulation decides all: the same seed, the same schedule, the same failure."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from sim import campaign
from sim.seeds import Report, run_seed
from statehold._core import WriteJob
from statehold.checkpoint.save.handle import Work
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.checkpoint.save.writes import Ordered, Segments, start_write
from statehold.errors import StateholdError
from statehold.io.clients import open_engine
from statehold.layout.plan import plan_save
from statehold.tensors.columns import Tensors
from support.in_memory import SimFs
from support.scheduler import Deadlock
from support.stepped import simulated

REPLAYS = int(os.environ.get("STATEHOLD_SIM_REPLAYS", "4"))
FIRST, BATCH = 200_000, 4

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("no_logs"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("begin", range(FIRST, FIRST + REPLAYS, BATCH))
def test_the_same_seed_gives_the_same_schedule_and_another_seed_another(begin: int) -> None:
    digests = set()
    for seed in range(begin, begin + BATCH):
        first, second = run_seed(seed), run_seed(seed)
        assert first.schedule == second.schedule, seed
        assert not first.violations, first
        digests.add(first.digest)
    assert len(digests) == BATCH


def replayed(command: list[str], hash_seed: str) -> str:
    """What another process says of a seed."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=Path(campaign.__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.thorough
def test_the_command_of_a_report_replays_it_in_another_process() -> None:
    """A process that runs nothing else: what other tests leave behind may change a schedule."""
    here = run_seed(FIRST + 1)
    command = re.findall(r"replay it: \S+ (.*)", str(here))[0].split()
    told = replayed(command, "0")
    assert f"seed {FIRST + 1}, schedule " in told
    assert replayed(command, "1") == told


def announce_before_the_sync(self: Pipeline, work: Work) -> None:
    """Pipeline._write_out with a defect: the bytes become durable (D2) when another thread comes to
    it, and the step is committed meanwhile."""
    work.save.record(files=1)
    work.job.wait_written(None)
    threading.Thread(target=finish_quietly, args=(work.job,)).start()


def finish_quietly(job: WriteJob) -> None:
    for _ in range(6):
        time.sleep(0)  # others may go on meanwhile
    with contextlib.suppress(StateholdError):
        job.finish()


@pytest.mark.thorough
def test_a_wrong_order_is_found_and_its_seed_finds_it_every_time() -> None:
    with mock.patch.object(Pipeline, "_write_out", announce_before_the_sync):
        found = next(filter(_is_violated, map(run_seed, range(FIRST, FIRST + 200))))
        for _ in range(min(REPLAYS, 20)):
            again = run_seed(found.seed)
            assert again.violations == found.violations
            assert again.schedule == found.schedule
    assert not run_seed(found.seed).violations


def _is_violated(report: Report) -> bool:
    return bool(report.violations)


def take_two(first: threading.Lock, second: threading.Lock) -> None:
    with first, second:
        pass


def deadlock_of(seed: int) -> str:
    """What is said when two tasks have taken two locks in opposite order, and wait for ever."""
    try:
        with simulated(seed), ThreadPoolExecutor(2) as pool:
            one, other = threading.Lock(), threading.Lock()
            for _ in range(20):
                pool.submit(take_two, one, other)
                pool.submit(take_two, other, one)
    except Deadlock as deadlock:
        return str(deadlock)
    return ""


def test_a_deadlock_shows_the_stack_of_every_task() -> None:
    first, second = ([deadlock_of(seed) for seed in range(20)] for _ in range(2))
    assert first == second
    assert "" in first  # a seed without it
    report = next(filter(None, first))
    assert report.count("waits for: a lock") == 2
    assert report.count("in take_two\n") == 2
    assert "in deadlock_of\n" in report


def test_time_passes_when_nothing_else_can_happen() -> None:
    begin_s = time.monotonic()
    told = []

    def tell(name: str, after_s: float) -> None:
        time.sleep(after_s)
        told.append((name, round(time.monotonic())))

    with simulated(0) as turns:
        threads = [
            threading.Thread(target=tell, args=each) for each in (("day", 86400), ("hour", 3600))
        ]
        for thread in threads:
            thread.start()
        assert not threading.Event().wait(60)
        assert 60 <= turns.now_s < 61
        for thread in threads:
            thread.join()
    assert told == [("hour", 3600), ("day", 86400)]
    assert time.monotonic() - begin_s < 3600


def test_what_waits_for_ever_ends_with_the_run() -> None:
    begun = []

    def wait() -> None:
        begun.append(threading.current_thread())
        threading.Event().wait()

    with simulated(0):
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(1)
    begun[0].join(60)
    assert not begun[0].is_alive()


def dawdle() -> None:
    """Others may go on meanwhile, a hundred times."""
    for _ in range(100):
        time.sleep(0)


def test_an_engine_is_closed_when_its_last_transfer_has_ended(fs: SimFs) -> None:
    """However late the disk has its turn: here, when nobody else can go on."""
    with simulated(0) as turns, ThreadPoolExecutor(1) as pool:
        turns.disk_weight = 1e-9
        engine = open_engine(fs, 1 << 20, 1 << 20, 1)
        plan = plan_save([], step=1)
        nothing = Ordered(Tensors(), Segments.of(plan, Tensors().structure))
        start_write(engine, plan, nothing, fs.open_write("/x", plan.file_bytes))
        pool.submit(dawdle)
        assert len(fs.waiting) == 1
        engine.close()
        assert not fs.waiting
