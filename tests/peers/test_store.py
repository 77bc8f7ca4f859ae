"""Several ranks write one step: who does what, what is reused, and what a crash leaves."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from statehold.errors import InvariantError, StateholdError, StorageError
from statehold.format.saved import MANIFEST_NAME
from statehold.layout.plan import file_name
from statehold.steps.store import Store
from support.in_memory import SimFs

RUN, RANKS, TOKEN, OTHER = "/runs/x", 3, "5f3a09c1", "00000000"


def sealed(step: int) -> tuple[int, bytes]:
    """A step and its manifest, as far as the store minds."""
    return step, b"manifest of %d" % step


def data(rank: int) -> str:
    return file_name(rank, RANKS)


def stores(fs: Any, **options: Any) -> list[Store]:
    return [Store(fs, RUN, rank=rank, world_size=RANKS, **options) for rank in range(RANKS)]


def opened(fs: Any, **options: Any) -> list[Store]:
    ranks = stores(fs, **options)
    ranks[0].create()
    ranks[0].recover()
    return ranks


def write(store: Store, rank: int, step: int, attempt: str) -> bool:
    """D1 to D3 of one rank; says if its file was reused."""
    store.begin(step, attempt)
    file, reused = store.data_file(step, data(rank), 4096, attempt)
    file.close()
    store.seal(step, attempt, f"record-{rank}", b"%d of %d" % (rank, step))
    return reused


def save(ranks: list[Store], step: int, number: int) -> list[bool]:
    attempt = f"{TOKEN}-{number}"
    reused = [write(store, rank, step, attempt) for rank, store in enumerate(ranks)]
    ranks[0].commit(*sealed(step), attempt)
    ranks[0].retain()
    return reused


def names(fs: Any, path: str = RUN) -> list[str]:
    return sorted(name for name, _ in fs.listdir(path))


def check(fs: Any, step: int) -> None:
    """A committed step is whole: every rank's record and the manifest, as they were written."""
    path = f"{RUN}/step-{step:012d}"
    assert fs.read_file(f"{path}/{MANIFEST_NAME}", 99) == b"manifest of %d" % step
    for rank in range(RANKS):
        assert fs.read_file(f"{path}/record-{rank}", 99) == b"%d of %d" % (rank, step)
        assert fs.stat_bytes(f"{path}/{data(rank)}") is not None


def test_a_rank_may_begin_before_rank_0_clears_the_run() -> None:
    fs = SimFs(seed=1)
    ranks = stores(fs)
    ranks[2].create()
    reused = write(ranks[2], 2, 1, f"{TOKEN}-0")
    assert not reused
    ranks[0].recover(TOKEN)
    for rank in (0, 1):
        write(ranks[rank], rank, 1, f"{TOKEN}-0")
    ranks[0].commit(*sealed(1), f"{TOKEN}-0")
    check(fs, 1)


def test_ranks_may_be_ahead_of_one_that_does_not_know_the_token_yet() -> None:
    """Seed 9267: the sweep of a slow rank 0 removed what the others had written, and it committed.

    What dead jobs have left goes when rank 0 begins.
    """
    fs = SimFs(seed=1)
    ranks = stores(fs)
    ranks[2].create()
    dead = f"{RUN}/step-000000000001.99999999-0.partial", f"{RUN}/.shared/99999999-0-rank-00000-1"
    fs.mkdir(dead[0])
    write(ranks[2], 2, 1, f"{TOKEN}-0")
    fs.mkdir(f"{RUN}/.shared")
    fs.write_file(dead[1], b"")
    fs.write_file(f"{RUN}/.shared/{TOKEN}-0-rank-00002-1", b"")
    ranks[0].recover("")
    for rank in (0, 1):
        write(ranks[rank], rank, 1, f"{TOKEN}-0")
    ranks[0].commit(*sealed(1), f"{TOKEN}-0")
    check(fs, 1)
    assert names(fs, f"{RUN}/.shared") == [f"{TOKEN}-0-rank-00002-1"]
    assert names(fs) == [".shared", "step-000000000001"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_fill_one_directory_in_any_order(order: tuple[int, ...]) -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs)
    for rank in order:
        write(ranks[rank], rank, 7, f"{TOKEN}-0")
    assert names(fs) == [f"step-000000000007.{TOKEN}-0.partial"]
    assert ranks[1].steps() == []
    ranks[0].commit(*sealed(7), f"{TOKEN}-0")
    assert ranks[2].steps() == [7]
    check(fs, 7)


def test_a_step_saved_again_is_replaced() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs)
    save(ranks, 7, 0)
    save(ranks, 7, 1)
    assert ranks[0].steps() == [7]
    assert names(fs) == [".spare", "step-000000000007"]


def test_each_rank_overwrites_its_own_retired_file() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs, keep=1)
    reused = [save(ranks, step, step) for step in range(4)]
    assert reused == [[False] * 3, [False] * 3, [True] * 3, [True] * 3]
    assert names(fs) == [".spare", "step-000000000003"]
    for store in ranks:
        store.drop_spare()
    assert names(fs) == ["step-000000000003"]
    reused = [save(opened(fs, keep=1, reuse=False), step, step) for step in range(4, 7)]
    assert reused == [[False] * 3] * 3


def test_a_rank_that_misses_the_spare_files_writes_a_new_one() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs, keep=1)
    for step in range(2):
        save(ranks, step, step)
    attempt = f"{TOKEN}-2"
    reused = write(ranks[0], 0, 2, attempt)
    assert reused
    ranks[0].drop_spare()
    reused = write(ranks[1], 1, 2, attempt)
    assert not reused


class Stolen:
    """A file system on which, before `operation`, something else happens once."""

    def __init__(self, fs: SimFs, operation: str, before: Callable[[], Any]) -> None:
        self._fs, self._operation, self._before = fs, operation, before
        self.fired = 0

    def __getattr__(self, name: str) -> Any:
        if name == self._operation and not self.fired:
            self.fired = 1
            self._before()
        return getattr(self._fs, name)


def test_a_spare_file_deleted_while_it_is_taken_is_not_missed() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs, keep=1)
    for step in range(2):
        save(ranks, step, step)
    stolen = Stolen(fs, "rename", ranks[0].drop_spare)
    reused = write(Store(stolen, RUN, rank=1, world_size=RANKS), 1, 2, f"{TOKEN}-2")
    assert not reused
    assert stolen.fired


def test_a_spare_file_taken_while_it_is_deleted_is_not_missed() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs, keep=1)
    for step in range(2):
        save(ranks, step, step)
    stolen = Stolen(fs, "unlink", lambda: write(ranks[1], 1, 2, f"{TOKEN}-2"))
    ranks[0].fs = stolen
    ranks[0].drop_spare()
    assert stolen.fired
    assert ".spare" not in names(fs)
    assert data(1) in names(fs, f"{RUN}/step-000000000002.{TOKEN}-2.partial")


def test_only_rank_0_decides() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs)
    write(ranks[1], 1, 3, f"{TOKEN}-0")
    for forbidden in (
        ranks[1].recover,
        ranks[1].retain,
        lambda: ranks[1].rewind(0),
        lambda: ranks[1].quarantine(0),
        lambda: ranks[1].commit(*sealed(3), f"{TOKEN}-0"),
    ):
        with pytest.raises(InvariantError):
            forbidden()
    ranks[1].abandon(3, f"{TOKEN}-0")
    assert names(fs) == [f"step-000000000003.{TOKEN}-0.partial"]
    ranks[0].abandon(3, f"{TOKEN}-0")
    assert names(fs) == []


@pytest.mark.parametrize("bad", ["", "x", "../../etc-1", "5f3a09c1", "5f3a09c1-", "5F3A09C1-1"])
def test_an_attempt_is_a_token_and_a_number(bad: str) -> None:
    with pytest.raises(InvariantError):
        Store(SimFs(seed=1), RUN, world_size=2).partial(1, bad)


def test_leftovers_of_any_attempt_are_cleared_at_open() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs)
    save(ranks, 1, 0)
    for number in range(3):
        write(ranks[1], 1, 2, f"{OTHER}-{number}")
    opened(fs)
    assert names(fs) == ["step-000000000001"]


def test_attempts_that_ended_are_cleared_by_the_next_and_later_ones_are_not() -> None:
    fs = SimFs(seed=1)
    ranks = opened(fs)
    for attempt in (f"{OTHER}-9", f"{TOKEN}-1", f"{TOKEN}-2", f"{TOKEN}-3"):
        write(ranks[1], 1, 5, attempt)
    ranks[0].begin(5, f"{TOKEN}-2")
    assert names(fs) == [f"step-000000000005.{TOKEN}-{number}.partial" for number in (2, 3)]


class Mortal:
    """A file system whose machine stops before operation number `stop_at`."""

    def __init__(self, fs: SimFs, stop_at: int | None) -> None:
        self._fs, self._stop_at = fs, stop_at
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        self.count += 1
        if self._stop_at is not None and self.count >= self._stop_at:
            raise StorageError(f"the machine is off before {name}", errno=errno.EIO)
        return getattr(self._fs, name)


def saves_until(fs: SimFs, stop_at: int | None, first: int) -> tuple[int, int]:
    """Save three steps; (newest that was reported committed, operations)."""
    mortal, committed = Mortal(fs, stop_at), first - 1
    try:
        ranks = opened(mortal, keep=1)
        for step in range(first, first + 3):
            save(ranks, step, step)
            committed = step
    except StateholdError:
        assert stop_at is not None
    return committed, mortal.count


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_power_loss_before_every_operation(seed: int) -> None:
    _, operations = saves_until(SimFs(seed=seed), None, 1)
    assert operations > 60
    for stop_at in range(1, operations + 1):
        fs = SimFs(seed=seed * 1000 + stop_at, torn=0.5)
        committed, _ = saves_until(fs, stop_at, 1)
        fs.crash()
        found = Store(fs, RUN).steps()
        assert max(found, default=0) >= committed, f"step {committed} was lost at {stop_at}"
        for step in found:
            check(fs, step)
        saves_until(fs, None, 10)
        assert Store(fs, RUN).steps() == [12]
        check(fs, 12)
