"""A restore takes each file from the nearest level that has it intact."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from statehold.errors import (
    FormatVersionError,
    PeerFailedError,
    PeerLostError,
    StorageError,
)
from statehold.steps.store import Store
from support.faults import DEADLINE_S, must
from support.in_memory import SimFs
from support.inside import inside, promoter
from support.levels import FAR, NEAR, settle, status, step_path, steps_at, two
from support.rank_states import blank, check, state
from support.ranks import Ranks
from support.steps import document_of, seal

Damage = Callable[[SimFs, str], None]


def flipped(fs: SimFs, path: str) -> None:
    fs.corrupt(path, (fs.stat_bytes(path) or 0) * 2 // 3, 0x04)


def missing(fs: SimFs, path: str) -> None:
    fs.unlink(path)


def cut(fs: SimFs, path: str) -> None:
    whole = fs.read_file(path, 1 << 30)
    fs.unlink(path)
    fs.write_file(path, whole[:-1])


DAMAGES = {"flipped": flipped, "missing": missing, "cut": cut}


def file_name(kind: str, rank: int, size: int) -> str:
    if kind == "manifest":
        return "manifest.json"
    return f"rank-{rank:05d}-of-{size:05d}.{'json' if kind == 'record' else 'safetensors'}"


@pytest.fixture(params=[1, 2, 4])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def fs(size: int) -> SimFs:
    """Steps 1 and 2 at both levels."""
    fs = SimFs(seed=1)
    with job(fs, size) as ranks:
        for step in (1, 2):
            ranks.save(step, lambda rank, step=step: state(rank, step))
            ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
    must(steps_at(fs, FAR) == steps_at(fs, NEAR) == [1, 2])
    return fs


def job(fs: SimFs, size: int, **options: Any) -> Ranks:
    if size == 1:
        options["coordination"] = "none"
    return Ranks(fs, size, run="/run", levels=two(), **options)


def restored(fs: SimFs, size: int, step: int | None = None) -> list[int | Exception | None]:
    """Restore on all ranks, and compare."""
    with job(fs, size) as ranks:
        found = [blank() for _ in range(size)]
        outcomes = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(found[rank], step))
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, int):
                check(found[rank], rank, outcome)
    return outcomes


CASES = [
    (kind, damage) for kind, damage in itertools.product(("data", "manifest", "record"), DAMAGES)
]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_a_bad_copy_is_passed_over_and_named(fs, size, kind, damage, caplog) -> None:
    if size == 1 and kind == "record":
        kind = "data"  # one rank has no records
    name = file_name(kind, size - 1, size)
    DAMAGES[damage](fs, f"{step_path(NEAR, 2)}/{name}")
    got = restored(fs, size)
    assert got == [2] * size
    assert f"{name} of step 2 is not intact at level near" in caplog.text
    assert f"{step_path(NEAR, 2)}/{name}" in caplog.text
    assert f"{step_path(FAR, 2)}/{name}" not in caplog.text
    got = restored(fs, size, 2)
    assert got == [2] * size
    # Bad everywhere: the step before, and the damaged one is set aside at both levels.
    DAMAGES[damage](fs, f"{step_path(FAR, 2)}/{name}")
    got = restored(fs, size)
    assert got == [1] * size
    assert steps_at(fs, FAR) == steps_at(fs, NEAR) == [1]
    assert fs.is_dir(f"{step_path(FAR, 2)}.corrupt")
    assert fs.is_dir(f"{step_path(NEAR, 2)}.corrupt")


def test_one_file_is_bad_here_and_another_one_there(fs, size) -> None:
    flipped(fs, f"{step_path(NEAR, 2)}/{file_name('data', 0, size)}")
    other = file_name("manifest" if size == 1 else "data", size - 1, size)
    flipped(fs, f"{step_path(FAR, 2)}/{other}")
    got = restored(fs, size)
    assert got == [2] * size


def test_each_file_is_bad_somewhere(fs, size) -> None:
    names = sorted(name for name, _ in fs.listdir(step_path(NEAR, 2)))
    for at, name in enumerate(names):
        flipped(fs, f"{step_path((NEAR, FAR)[at % 2], 2)}/{name}")
    got = restored(fs, size)
    assert got == [2] * size


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_run_goes_on_after_a_step_that_was_bad_everywhere(fs, size) -> None:
    for root in (NEAR, FAR):
        flipped(fs, f"{step_path(root, 2)}/{file_name('data', 0, size)}")
    with job(fs, size) as ranks:
        got = ranks.each(lambda rank: ranks.ckpts[rank].restore(blank()))
        assert got == [1] * size
        ranks.save(2, lambda rank: state(rank, 2))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(fs, FAR) == steps_at(fs, NEAR) == [1, 2]


def test_all_ranks_go_on_after_a_rewind(fs, size) -> None:
    with job(fs, size) as ranks:
        ranks.save(3, lambda rank: state(rank, 3))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        given_up = ranks.each(lambda rank: ranks.ckpts[rank].rewind(1))
        assert given_up == [[2, 3]] * size
        assert steps_at(fs, FAR) == steps_at(fs, NEAR) == [1]
        ranks.save(2, lambda rank: state(rank, 2))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(fs, FAR) == steps_at(fs, NEAR) == [1, 2]


def test_a_newer_format_is_not_passed_over(fs, size) -> None:
    path = f"{step_path(NEAR, 2)}/manifest.json"
    document = document_of(fs.read_file(path, 1 << 20))
    document["version"] = 99
    fs.unlink(path)
    fs.write_file(path, seal(document))
    outcomes = restored(fs, size)
    assert {type(each) for each in outcomes} <= {FormatVersionError, PeerFailedError}


@pytest.fixture
def unlistable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of levels that cannot be listed."""
    steps, names = Store.steps, set()

    def listed(store: Store) -> list[int]:
        if store.name in names:
            raise StorageError("away", errno=errno.EIO, path=store.name)
        return steps(store)

    monkeypatch.setattr(Store, "steps", listed)
    return names


@pytest.mark.parametrize("name", ["near", "far"])
def test_a_level_that_cannot_be_listed_is_passed_over(fs, size, name, unlistable, caplog) -> None:
    unlistable.add(name)
    got = restored(fs, size)
    assert got == [2] * size
    assert f"cannot read level {name}" in caplog.text


def test_no_steps_because_nothing_can_be_read_is_an_error_not_a_new_run(
    fs, size, unlistable
) -> None:
    unlistable |= {"near", "far"}
    outcomes = restored(fs, size)
    assert {type(each) for each in outcomes} <= {StorageError, PeerFailedError}
    assert isinstance(outcomes[0], StorageError)


def test_what_only_a_level_away_has_is_no_new_run_either(size, unlistable) -> None:
    unlistable.add("far")
    outcomes = restored(SimFs(seed=1), size)
    assert isinstance(outcomes[0], StorageError)
    assert "give level far another place" in str(outcomes[0].hint)  # another run would not help


def test_a_value_that_one_rank_cannot_take_keeps_no_other_rank_waiting(fs, size) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"rank": 0}

        def load_state_dict(self, _: dict[str, Any]) -> None:
            raise ZeroDivisionError

    with job(fs, size) as ranks:
        states = [blank() for _ in range(size)]
        states[size - 1]["seed"] = Refuses()
        outcomes = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(states[rank]))
        assert isinstance(outcomes[-1], ZeroDivisionError)
        assert outcomes[:-1] == [2] * (size - 1)
        got = ranks.each(lambda rank: ranks.ckpts[rank].restore(blank()))
        assert got == [2] * size


def test_a_bad_copy_on_one_ranks_disk_alone(size) -> None:
    """Only one rank meets the error; all begin again, and nobody is left behind."""
    fs = SimFs(seed=1)
    with job(fs, size) as ranks:
        ranks.save(1, lambda rank: state(rank, 1))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        fired = threading.Event()
        [shelf] = inside(ranks.ckpts[size - 1]).levels.places[0].shelves()
        find = shelf.find

        def elsewhere(step: int, name: str, *needed: object) -> str:
            fired.set()
            return find(step + 7, name, *needed)  # where nothing is

        shelf.find = elsewhere  # type: ignore[method-assign]
        found = [blank() for _ in range(size)]
        got = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
        assert got == [1] * size
        assert fired.is_set()
        for rank in range(size):
            check(found[rank], rank, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("kind", ["data", "manifest"])
def test_a_step_is_not_given_up_for_a_disk_that_fails(fs, size, kind, times) -> None:
    """One copy is damaged, the other cannot be read now: nobody knows that the step is damaged. A
    disk that fails once is not taken for a step that a writer has replaced."""
    name = file_name(kind, size - 1, size)
    flipped(fs, f"{step_path(FAR, 2)}/{name}")
    fired = threading.Event()
    with job(fs, size) as ranks:
        for ckpt in ranks.ckpts:
            [shelf] = inside(ckpt).levels.places[0].shelves()
            left = iter(range(times))

            def fail(step: int, each: str, *more: Any, do: Any, left: Any = left) -> Any:
                if each == name and next(left, None) is not None:
                    fired.set()
                    raise StorageError("the disk fails", errno=errno.EIO, path=each)
                return do(step, each, *more)

            shelf.read = functools.partial(fail, do=shelf.read)  # type: ignore[method-assign]
            shelf.find = functools.partial(fail, do=shelf.find)  # type: ignore[method-assign]
        outcomes = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(blank()))
        assert {type(each) for each in outcomes} <= {StorageError, PeerFailedError}
        assert any(isinstance(each, StorageError) for each in outcomes)
    assert fired.is_set()
    assert steps_at(fs, NEAR) == steps_at(fs, FAR) == [1, 2]


# -- ranks that copy -------------------------------------------------------------------------------


def patience(ranks: Ranks, timeout_s: float) -> None:
    """How long ranks wait for each other from now on: short only once all have met."""
    for ckpt in ranks.ckpts:
        peers = inside(ckpt).peers
        must(peers)
        peers.timeout_s = timeout_s


def test_a_copy_is_committed_when_all_parts_are_there(size) -> None:
    fs = SimFs(seed=1)
    with job(fs, size) as ranks:
        go_on, waiting = threading.Event(), threading.Event()

        def hold() -> None:
            waiting.set()
            must(go_on.wait(DEADLINE_S))

        last = promoter(ranks.ckpts[size - 1])
        last.throttle.give_way = hold
        ranks.save(1, lambda rank: state(rank, 1))
        must(waiting.wait(DEADLINE_S))
        assert steps_at(fs, FAR) == []
        go_on.set()
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        assert steps_at(fs, FAR) == [1]
        assert [status(each).newest for each in ranks.ckpts] == [1] * size


@pytest.mark.parametrize("size", [2, 4], indirect=True)
def test_a_rank_that_cannot_copy_fails_the_copy_for_all_by_name(size) -> None:
    fs = SimFs(seed=1)
    with job(fs, size) as ranks:
        place = inside(ranks.ckpts[1]).levels.places[1]
        take = place.take

        def refuse(*_: Any) -> None:
            raise StorageError("away", errno=errno.EIO, path=FAR)

        place.take = refuse  # type: ignore[method-assign]
        ranks.save(1, lambda rank: state(rank, 1))
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        errors = [status(each).error for each in ranks.ckpts]
        assert isinstance(errors[1], StorageError)
        for each in errors[:1] + errors[2:]:
            assert isinstance(each, PeerFailedError)
            assert each.rank == 1
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1], [])
        place.take = take  # type: ignore[method-assign]
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(fs, FAR) == [1]
        assert not [name for name, _ in fs.listdir(FAR) if "partial" in name]
        assert [status(each).error for each in ranks.ckpts] == [None] * size


@pytest.mark.parametrize("size", [2, 4], indirect=True)
def test_a_rank_that_takes_no_part_is_given_up_and_shifts_nothing(size) -> None:
    """A rank that starts no copy fails that copy in time and is named. The next copies succeed."""
    fs = SimFs(seed=1)
    with job(fs, size) as ranks:
        ranks.save(1, lambda rank: state(rank, 1))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        patience(ranks, 1.0)
        promotions = inside(ranks.ckpts[1]).levels.promotions
        start = promotions.start
        promotions.start = lambda *_: None  # type: ignore[method-assign]
        ranks.save(2, lambda rank: state(rank, 2))
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        error = status(ranks.ckpts[0]).error
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1, 2], [1])
        promotions.start = start  # type: ignore[method-assign]
        patience(ranks, DEADLINE_S)
        for step in (3, 4):
            ranks.save(step, lambda rank, step=step: state(rank, step))
            ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        assert steps_at(fs, FAR) == [1, 3, 4]


@pytest.mark.parametrize("size", [2], indirect=True)
def test_a_rank_that_lags_behind_with_a_copy_holds_up_no_save(size) -> None:
    """Its commit thread does not wait for a copy that the others have given up."""
    fs = SimFs(seed=1)
    with job(fs, size) as ranks:
        ranks.each(lambda rank: inside(ranks.ckpts[rank]).peers.open())
        patience(ranks, 2.0)
        go_on, waiting = threading.Event(), threading.Event()
        last = promoter(ranks.ckpts[1])

        def hold() -> None:
            waiting.set()
            must(go_on.wait(DEADLINE_S))

        last.throttle.give_way = hold
        ranks.save(1, lambda rank: state(rank, 1))
        must(waiting.wait(DEADLINE_S))
        inside(ranks.ckpts[0]).levels.promotions.wait(DEADLINE_S)
        assert isinstance(status(ranks.ckpts[0]).error, PeerLostError)
        patience(ranks, DEADLINE_S)
        for step in (2, 3):
            ranks.save(step, lambda rank, step=step: state(rank, step))
        go_on.set()
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
        ranks.save(4, lambda rank: state(rank, 4))
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(fs, FAR)[-1] == 4


def test_other_ranks_copy_what_was_saved_before(fs, size) -> None:
    """The run goes on with another number of ranks: what they copy is the whole step."""
    other = {1: 3, 2: 1, 4: 3}[size]
    for name, _ in fs.listdir(step_path(FAR, 2)):
        fs.unlink(f"{step_path(FAR, 2)}/{name}")
    fs.rmdir(step_path(FAR, 2))
    with job(fs, other) as ranks:
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
    for root in (NEAR, FAR):
        digests = {
            name: hashlib.sha256(fs.read_file(f"{step_path(root, 2)}/{name}", 1 << 30)).hexdigest()
            for name, _ in fs.listdir(step_path(root, 2))
        }
        if root == NEAR:
            expected = digests
    assert digests == expected
