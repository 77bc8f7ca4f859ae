"""The n-th call of a system function fails, for every n of a save: on real files, with threads.

What was committed stays restorable bit for bit, a step whose sync failed is never claimed, and the
next save works. Only what cleans up behind a committed step may fail without an error.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import statehold
from statehold import errors
from support.contents import THREADS, check_restored, committed, content
from support.faults import DEADLINE_S
from support.faulty import FAIL, fault
from support.inside import inside
from support.victims import Victims


def walk(folder: Path, function: str, error: str, harmless: list[int]) -> None:
    """Every call of `function` in a save fails once; all but `harmless` ones fail the save."""
    run, number = folder / "run", getattr(errno, error)
    kind = errors.NoSpaceError if error in ("ENOSPC", "EDQUOT") else errors.StorageError
    with statehold.Checkpointer(run, keep=1, **THREADS) as ckpt:
        for newest in range(1, 4):  # until retired files are there to be overwritten
            committed(ckpt, newest)
        with fault(function, run) as counting:
            committed(ckpt, 4)
        total, newest, passed = counting.calls, 4, []
        assert total > 0, "this save never calls it"
        for nth in range(1, total + 1):
            step = newest + 1
            with fault(function, run, FAIL, nth=nth, value=number) as failing:
                found = failure(ckpt, step)
                assert failing.fired == 1, (nth, failing.calls)
            if found is None:
                passed.append(nth)
                newest = step
            else:
                assert type(found) is kind
                assert (found.errno, found.path[: len(str(run))]) == (number, str(run))
                newest = step if step in ckpt.steps() else newest
            check_restored(ckpt, newest)
            for _ in range(2):  # until there is something to overwrite again
                newest += 1
                committed(ckpt, newest)
        assert passed == harmless, f"{passed} of {total} calls"
        check_restored(ckpt, newest)


def failure(ckpt: statehold.Checkpointer, step: int) -> errors.StorageError | None:
    """The error of a save, wherever it comes up; None if the step was committed."""
    save = None
    try:
        save = ckpt.save(step, content(step))
        save.wait("committed", DEADLINE_S)
    except errors.StorageError as error:
        assert save is None or not save.done("committed")
        return error
    finally:
        inside(ckpt).pipeline.drain()
    return None


def last_sync(folder: Path) -> None:
    """D7 fails, after the rename: the step is not claimed, and the error says that it is there."""
    run = folder / "run"
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1)
        with fault("fsync", run, FAIL, nth=3, value=errno.EIO):
            found = failure(ckpt, 2)
        assert found is not None
        assert found.path == str(run)
        assert found.facts["published"].startswith("yes, and whole")
        assert "nothing was published" not in str(found)
        assert found.facts["still safe"] == "step 1 and older"
        check_restored(ckpt, 2)
        committed(ckpt, 3)
        check_restored(ckpt, 3)


@pytest.mark.thorough
def test_a_step_whose_last_sync_fails_is_not_claimed(victims: Victims, quick: Path) -> None:
    victims.run(last_sync, quick)


# Function, errno, and the calls that only look for something to reuse, or clean up.
CALLS: list[tuple[str, str, list[int]]] = [
    ("pwrite", "EIO", []), ("pwrite", "ENOSPC", []), ("fallocate", "EDQUOT", []),
    ("fdatasync", "EIO", []), ("write", "EIO", []), ("mkdir", "EIO", []),
    ("fsync", "EIO", [4]), ("rename", "EIO", [1, 3, 4]), ("open", "EIO", [1, 2, 7, 8]),
    ("unlink", "EIO", [1]), ("rmdir", "EIO", [1]), ("ftruncate", "EIO", []),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("function", "error", "harmless"), CALLS)
def test_every_call_may_fail(
    victims: Victims, quick: Path, function: str, error: str, harmless: list[int]
) -> None:
    victims.run(walk, quick, function, error, harmless)
