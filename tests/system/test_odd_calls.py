"""Calls that are interrupted, do less than asked, or hang: no trainer notices."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import statehold
from statehold import errors
from support.contents import FITS, THREADS, check_restored, committed, content
from support.faults import DEADLINE_S
from support.faulty import CUT, FAIL, HOLD, INTERRUPT, fault, move_clock
from support.inside import inside
from support.victims import Victims

RESTARTED = [
    "open", "pwrite", "pread", "write", "read", "fsync", "fdatasync", "ftruncate", "fallocate"
]  # fmt: skip
# The most bytes that one call transfers: less than a buffer, less than a manifest.
TRANSFERS = {"pwrite": 64 << 10, "pread": 64 << 10, "write": 256, "read": 256}


def interrupted(folder: Path) -> None:
    run = folder / "run"
    with statehold.Checkpointer(run, keep=1, **THREADS) as ckpt:
        committed(ckpt, 1)
        for step, function in enumerate(RESTARTED, 2):
            with fault(function, run, INTERRUPT, value=errno.EINTR) as faults:
                committed(ckpt, step)
                check_restored(ckpt, step)
            assert faults.fired > 0, function
            check_restored(ckpt, step)


def cut_short(folder: Path, odd_bytes: int) -> None:
    run = folder / "run"
    with statehold.Checkpointer(run, keep=1, **THREADS) as ckpt:
        committed(ckpt, 1)
        for step, (function, most_bytes) in enumerate(TRANSFERS.items(), 2):
            with fault(function, run, CUT, value=most_bytes - odd_bytes) as faults:
                committed(ckpt, step)
                check_restored(ckpt, step)
            assert faults.fired > 1, function
            check_restored(ckpt, step)


def test_interrupted_calls_are_made_again(victims: Victims, tmp_path: Path) -> None:
    victims.run(interrupted, tmp_path)


# Of an unaligned direct transfer, what follows the last page boundary is moved again.
@pytest.mark.parametrize("odd_bytes", [0, 100])
def test_short_transfers_are_gone_on_with(victims: Victims, tmp_path: Path, odd_bytes: int) -> None:
    victims.run(cut_short, tmp_path, odd_bytes)


def no_progress(folder: Path) -> None:
    """A transfer that never moves a page is an error, not a loop."""
    run = folder / "run"
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1)
        with fault("pwrite", run, CUT, value=100) as faults:
            with pytest.raises(errors.StorageError) as caught:
                ckpt.save(2, content(2)).wait("committed", DEADLINE_S)
            assert faults.fired > 0
        assert caught.value.errno == errno.EIO
        check_restored(ckpt, 1)
        committed(ckpt, 3)
        check_restored(ckpt, 3)


def test_transfers_that_get_nowhere_are_an_error(victims: Victims, tmp_path: Path) -> None:
    victims.run(no_progress, tmp_path)


def failing_reads(folder: Path, function: str, harmless: int) -> None:
    run, passed = folder / "run", []
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1)
        committed(ckpt, 2)
        with fault(function, run) as counting:
            ckpt.restore(content(0))
        for nth in range(1, counting.calls + 1):
            with fault(function, run, FAIL, nth=nth, value=errno.EIO) as failing:
                number = restored_or_errno(ckpt)
                assert number in (0, errno.EIO)
                if number == 0:
                    passed.append(nth)
                assert failing.fired == 1, f"{failing.calls} calls, not {counting.calls}"
            # A disk that fails is not a step that is damaged: nothing was set aside.
            assert ckpt.steps() == [1, 2]
            check_restored(ckpt, 2)
        last = list(range(1, counting.calls + 1))[counting.calls - harmless :]
        assert passed == last, f"{passed} of {counting.calls} calls"


def restored_or_errno(ckpt: statehold.Checkpointer) -> int:
    try:
        ckpt.restore(content(0))
    except errors.StorageError as error:
        return error.errno
    return 0


# The last opens are for direct reads, and to read memory where it lies: without them all goes
# through the page cache.
@pytest.mark.parametrize(("function", "harmless"), [("open", 2), ("read", 0), ("pread", 0)])
def test_failing_reads_are_errors_and_set_nothing_aside(
    victims: Victims, quick: Path, function: str, harmless: int
) -> None:
    victims.run(failing_reads, quick, function, harmless)


# In the order of a save; "" is the run directory; only D7 and R2 sync it.
HELD = [
    ("mkdir", ".partial"), ("open", ".partial"), ("fallocate", ".partial"), ("pwrite", ".partial"),
    ("fdatasync", ".partial"), ("fsync", ".partial"), ("write", ".partial"), ("rename", ".partial"),
]  # fmt: skip


def held(folder: Path) -> None:
    run = folder / "run"
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1, FITS)
        for step, (function, path) in enumerate(HELD, 2):
            with fault(function, path, HOLD, nth=1) as holding:
                save = ckpt.save(step, content(step, FITS))  # returns, though that call hangs
                holding.wait_fired()
                claimed, steps = save.done("committed"), ckpt.steps()
                holding.release()
                save.wait("committed", DEADLINE_S)
            assert not claimed, function
            assert step not in steps, function
            check_restored(ckpt, step, FITS)


def test_save_returns_while_a_call_hangs(victims: Victims, quick: Path) -> None:
    victims.run(held, quick)


YEAR_S = 365 * 24 * 3600


def jumping_clock(folder: Path) -> None:
    run = folder / "run"
    with statehold.Checkpointer(run, keep=2, **THREADS) as ckpt:
        for step, years in enumerate([0, 80, -40, 30, -50, 0], 1):
            with fault("fdatasync", run, HOLD, nth=1) as holding:
                save = ckpt.save(step, content(step, FITS))
                holding.wait_fired()
                move_clock(years * YEAR_S)
                with pytest.raises(errors.WaitTimeout):
                    save.wait("committed", 0.05)
                holding.release()
                save.wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain()
            assert ckpt.steps() == [step - 1, step][step == 1 :], years
            stats = save.stats
            assert stats.committed_s is not None
            assert 0.05 <= stats.committed_s < DEADLINE_S
            check_restored(ckpt, step, FITS)
    with statehold.Checkpointer(run, keep=2, **THREADS) as ckpt:
        check_restored(ckpt, 6, FITS)


def test_a_wall_clock_that_jumps_disturbs_nothing(victims: Victims, quick: Path) -> None:
    victims.run(jumping_clock, quick)
