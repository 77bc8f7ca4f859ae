"""SIGTERM in the middle of a save: no step or a whole one; with a handler that exits, a whole one.

Also what a job that dies leaves to the next one: its run is free at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import statehold
from statehold import errors
from support.contents import FITS, THREADS, check_restored, committed, content
from support.faults import must
from support.faulty import HOLD, Fault, fault
from support.victims import Victims


class Job:
    """A fork that tells when it has got somewhere, and waits there to be killed."""

    def __init__(self, body: Callable[[Callable[[], None]], None]) -> None:
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            body(self._reached)
            os._exit(0)
        os.close(self._tell)
        must(os.read(told, 1) == b"!", "the job ended before it got there")
        os.close(told)

    def _reached(self) -> None:
        """A signal may come before the wait begins. pause() would not see it, and its handler
        would never run; the byte that it leaves ends this wait."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        os.write(self._tell, b"!")
        while True:
            os.read(woken, 1)

    def kill(self, number: signal.Signals) -> int:
        os.kill(self.pid, number)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def saving(run: Path, function: str, path: str, reached: Callable[[], None]) -> None:
    ckpt = statehold.Checkpointer(run, **THREADS)
    committed(ckpt, 1, FITS)
    with fault(function, path, HOLD, nth=1) as held:
        ckpt.save(2, content(2, FITS))
        held.wait_fired()
        reached()


def terminated(folder: Path, function: str, path: str, steps: list[int]) -> None:
    run = folder / "run"
    job = Job(lambda reached: saving(run, function, path, reached))
    assert job.kill(signal.SIGTERM) == -signal.SIGTERM
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        assert ckpt.steps() == steps
        check_restored(ckpt, steps[-1], FITS)
        committed(ckpt, 3, FITS)
        check_restored(ckpt, 3, FITS)
    assert sorted(os.listdir(run))[1:] == [f"step-{step:012d}" for step in (*steps, 3)]


MOMENTS = [
    ("open", ".partial", [1]), ("pwrite", ".partial", [1]), ("fdatasync", ".partial", [1]),
    ("rename", ".partial", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "path", "steps"), MOMENTS)
def test_sigterm_leaves_no_step_or_a_whole_one(
    victims: Victims, tmp_path: Path, function: str, path: str, steps: list[int]
) -> None:
    victims.run(terminated, tmp_path, function, path, steps)


def leave(run: Path, reached: Callable[[], None]) -> None:
    def exit_now(*_: object) -> None:
        Fault().release()
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, exit_now)
    saving(run, "fdatasync", ".partial", reached)


def terminated_with_a_handler(folder: Path) -> None:
    run = folder / "run"
    assert Job(lambda reached: leave(run, reached)).kill(signal.SIGTERM) == 143
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        assert ckpt.steps() == [1, 2]
        check_restored(ckpt, 2, FITS)


def test_a_handler_that_exits_leaves_the_save_to_be_finished(
    victims: Victims, tmp_path: Path
) -> None:
    victims.run(terminated_with_a_handler, tmp_path)


def second_job(folder: Path) -> None:
    """Kept out with the first one's name while that lives, let in the moment it is dead."""
    run = folder / "run"
    job = Job(lambda reached: saving(run, "fdatasync", ".partial", reached))
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        for _ in range(2):
            with pytest.raises(errors.RunBusyError) as caught:
                ckpt.save(2, content(2, FITS))
            assert f"process {job.pid} on" in caught.value.facts["held by"]
        check_restored(ckpt, 1, FITS)
        assert job.kill(signal.SIGKILL) == -signal.SIGKILL
        committed(ckpt, 2, FITS)
        check_restored(ckpt, 2, FITS)


def test_a_second_job_waits_for_the_first_to_die_and_no_longer(
    victims: Victims, tmp_path: Path
) -> None:
    victims.run(second_job, tmp_path)


def outliving_worker(folder: Path) -> None:
    """A fork that was made while its parent held the run, as data-loading workers are."""
    run = folder / "run"
    read, write = os.pipe()

    def body(reached: Callable[[], None]) -> None:
        with statehold.Checkpointer(run, **THREADS) as ckpt:
            committed(ckpt, 1, FITS)
            worker = os.fork()
            if worker == 0:
                signal.pause()
                os._exit(0)
            os.write(write, worker.to_bytes(4, "little"))
            reached()

    job = Job(body)
    worker = int.from_bytes(os.read(read, 4), "little")
    assert job.kill(signal.SIGKILL) == -signal.SIGKILL
    os.kill(worker, 0)  # it is still there
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 2, FITS)
        check_restored(ckpt, 2, FITS)
    os.kill(worker, signal.SIGKILL)


def test_a_worker_that_outlives_its_job_holds_nothing(victims: Victims, tmp_path: Path) -> None:
    victims.run(outliving_worker, tmp_path)


def test_the_name_of_a_dead_host_in_a_lock_holds_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").write_text("process 4194304 on a-host-that-is-gone\n")
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1, FITS)
        check_restored(ckpt, 1, FITS)
        assert f"process {os.getpid()} on" in (run / ".lock").read_text()
