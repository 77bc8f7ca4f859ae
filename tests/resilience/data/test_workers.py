"""Workers of a loader as real processes: how they draw, fail, die and end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from statehold.errors import ClosedError, DatasetError, WorkerLostError
from statehold.resilience.data import workers as module
from statehold.resilience.data.course import Course
from statehold.resilience.data.loader import Loader
from support.faults import DEADLINE_S

FORK = multiprocessing.get_context("fork")
COURSE = Course(size=100, batch=2, microbatches=6, seed=1)


class Samples(torch.utils.data.Dataset[Any]):
    """What a sample is, is up to the test."""

    def __init__(self, get: Callable[[int], Any]) -> None:
        self._get = get

    def __getitem__(self, number: int) -> Any:
        return self._get(number)


def named(step: int, index: int) -> Any:
    return SimpleNamespace(step=step, index=index)


def make(get: Callable[[int], Any], workers: int = 1, **options: Any) -> Loader:
    options = {"multiprocessing_context": FORK, **options}
    return Loader(Samples(get), COURSE, workers=workers, **options)


def has_ended(pid: int) -> bool:
    """Waits for a process that need not be a child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], DEADLINE_S)[0])
    finally:
        os.close(pidfd)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_processes_draw_what_the_trainer_would_draw() -> None:
    def get(number: int) -> Any:
        return {"number": number, "torch": torch.rand(2), "numpy": numpy.random.random(3)}

    with make(get, workers=2) as loader, make(get, workers=0) as here:
        loader.expect([(5, index) for index in range(6)])
        for index in (0, 1, 5, 2, 3, 4):
            batch, same = loader.batch(named(5, index)), here.batch(named(5, index))
            assert batch.keys() == same.keys()
            assert all(torch.equal(batch[key], same[key]) for key in batch)


def test_both_processes_draw_at_once() -> None:
    """Each one waits until the other one draws, too."""
    barrier = FORK.Barrier(2)

    def get(number: int) -> int:
        if number in (COURSE.samples(0, 0)[0], COURSE.samples(0, 1)[0]):
            barrier.wait(DEADLINE_S)
        return os.getpid()

    with make(get, workers=2) as loader:
        loader.expect([(0, 0), (0, 1)])
        pids = {pid for index in (0, 1) for pid in loader.batch(named(0, index)).tolist()}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_data_set_that_fails_in_a_worker() -> None:
    def get(number: int) -> int:
        if number == COURSE.samples(3, 0)[1]:
            raise FileNotFoundError(2, "no such file", "shard")
        return number

    with make(get) as loader:
        loader.expect([(3, 0), (3, 1)])
        with pytest.raises(DatasetError, match="could not be drawn") as caught:
            loader.batch(named(3, 0))
        assert loader.batch(named(3, 1)).tolist() == COURSE.samples(3, 1)
    assert caught.value.facts == {
        "step": 3,
        "microbatch": 0,
        "samples": ", ".join(map(str, COURSE.samples(3, 0))),
        "error": "FileNotFoundError: [Errno 2] no such file: 'shard'",
    }
    assert "in get\n" in str(caught.value.__cause__), "the traceback of the worker"


class Reluctant:
    """Can be sent, and not received."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("batch", "error"),
    [(threading.Lock, "TypeError: cannot pickle"), (Reluctant, "ValueError: invalid literal")],
)
def test_a_batch_that_cannot_travel(batch: Callable[[], Any], error: str) -> None:
    def collate(numbers: list[int]) -> Any:
        return batch() if numbers == COURSE.samples(0, 0) else numbers

    with make(int, collate_fn=collate) as loader:
        with pytest.raises(DatasetError) as caught:
            loader.batch(named(0, 0))
        assert loader.batch(named(0, 1)) == COURSE.samples(0, 1)
    assert caught.value.facts["error"].startswith(error)


def test_each_process_is_prepared() -> None:
    numbers: list[int] = []
    with make(lambda _: numbers[0], worker_init_fn=numbers.append) as loader:
        assert loader.batch(named(0, 0)).tolist() == [0, 0]

    def fail(number: int) -> None:
        raise RuntimeError("not ready")

    with make(int, worker_init_fn=fail) as loader:
        with pytest.raises(DatasetError) as caught:
            loader.batch(named(0, 0))
        assert caught.value.facts["error"] == "RuntimeError: not ready"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "by signal 9 (Killed)"),
        (lambda: os._exit(3), "with the exit status 3"),
    ],
)
def test_a_process_that_dies_while_it_draws(end: Callable[[], None], words: str) -> None:
    """The other process lives, and what it has drawn is there. Nothing else is drawn."""

    def get(number: int) -> int:
        if number == COURSE.samples(0, 1)[0]:
            end()
        return number

    with make(get, workers=2, prefetch=3) as loader:
        loader.expect([(0, 0), (0, 1), (0, 2)])
        assert loader.batch(named(0, 0)).tolist() == COURSE.samples(0, 0)
        with pytest.raises(WorkerLostError, match="a process that draws samples has ended") as lost:
            loader.batch(named(0, 1))
        with pytest.raises(WorkerLostError):
            loader.batch(named(0, 5))
    assert lost.value.facts["ended"] == words
    assert lost.value.facts["while it drew"] == "microbatch 1 of step 0"


def test_an_idle_process_that_is_killed() -> None:
    with make(lambda _: os.getpid()) as loader:
        os.kill(loader.batch(named(0, 0))[0].item(), signal.SIGKILL)
        with pytest.raises(WorkerLostError) as lost:
            loader.batch(named(0, 1))
    assert lost.value.facts["ended"] == "by signal 9 (Killed)"


def test_a_signal_to_the_process_group_does_not_end_it() -> None:
    with make(lambda _: os.getpid()) as loader:
        pid = loader.batch(named(0, 0))[0].item()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert loader.batch(named(0, 1))[0].item() == pid


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    gc.collect()  # what earlier tests have left
    threads, files = threading.active_count(), descriptors()
    yield
    assert multiprocessing.active_children() == []
    assert threading.active_count() <= threads  # fewer, if one of an earlier test ends meanwhile
    assert descriptors() <= files


@pytest.mark.usefixtures("nothing_stays")
def test_closing_ends_what_the_loader_has_begun() -> None:
    with make(lambda _: os.getpid(), workers=2) as loader:
        loader.expect([(0, 0), (0, 1), (0, 2)])
        loader.batch(named(0, 0))
    loader.close()
    with pytest.raises(ClosedError):
        loader.batch(named(0, 1))


def test_an_idle_process_ends_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does what it has to do at its end, such as the removal of temporary directories, while
    the trainer waits for it."""
    (go_on, go), (done, tell) = os.pipe(), os.pipe()

    def end() -> None:
        os.read(go_on, 1)
        os.write(tell, b"x")

    def join(process: BaseProcess, timeout: float | None = None) -> None:
        os.write(go, b"x")
        waits(process, timeout)

    waits = BaseProcess.join
    with make(int, worker_init_fn=lambda _: Finalize(None, end, exitpriority=0)) as loader:
        loader.batch(named(0, 0))
        monkeypatch.setattr(BaseProcess, "join", join)
    os.close(tell)
    assert os.read(done, 1) == b"x"
    for each in (go_on, go, done):
        os.close(each)


@pytest.mark.usefixtures("nothing_stays")
def test_closing_kills_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, told = os.pipe()

    def hang(number: int) -> None:
        os.write(told, b"x")
        signal.pause()

    with make(hang) as loader:
        loader.expect([(0, 0), (0, 1)])
        os.read(begun, 1)
        monkeypatch.setattr(module, "GRACE_S", 0.0)
    os.close(begun)
    os.close(told)


@pytest.mark.usefixtures("nothing_stays")
def test_a_loader_that_is_dropped_without_close() -> None:
    loader = make(int)
    loader.expect([(0, 0)])
    del loader


def test_a_fork_cannot_use_the_loader_of_its_parent() -> None:
    with make(int) as loader:
        if (child := os.fork()) == 0:
            try:
                loader.batch(named(0, 0))
            except ClosedError:
                loader.close()
                os._exit(42)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert loader.batch(named(0, 0)).tolist() == COURSE.samples(0, 0)


def test_processes_end_with_a_trainer_that_is_killed() -> None:
    """The idle one and the busy one, although another fork of the trainer lives on."""
    told, tell = FORK.Pipe(duplex=False)

    def hang(number: int) -> int:
        if number == COURSE.samples(0, 1)[0]:
            tell.send(os.getpid())
            signal.pause()
        return os.getpid()

    def train() -> None:
        loader = make(hang, workers=2)
        tell.send(loader.batch(named(0, 0))[0].item())
        if bystander := os.fork():
            tell.send(bystander)
            loader.expect([(0, 1)])
        signal.pause()

    trainer = FORK.Process(target=train)
    trainer.start()
    idle, bystander, busy = (told.recv() for _ in range(3))
    assert len({idle, busy, trainer.pid}) == 3
    trainer.kill()
    try:
        assert has_ended(idle)
        assert has_ended(busy)
        os.kill(bystander, 0)
    finally:
        for pid in (idle, busy, bystander):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    trainer.join()


def test_processes_end_with_a_trainer_that_does_not_close() -> None:
    told, tell = FORK.Pipe(duplex=False)
    alive: list[Loader] = []

    def train() -> None:
        alive.append(loader := make(lambda _: os.getpid(), workers=2))
        tell.send(loader.batch(named(0, 0))[0].item())

    trainer = FORK.Process(target=train)
    trainer.start()
    worker = told.recv()
    trainer.join(DEADLINE_S)
    assert trainer.exitcode == 0
    assert has_ended(worker)
