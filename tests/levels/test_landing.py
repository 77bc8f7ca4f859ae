"""Where the saves of several ranks go when a level takes none: all of them to the same next one."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from statehold import Checkpointer, Directory, Memory
from statehold.errors import (
    NoSpaceError,
    PeerFailedError,
    PeerLostError,
    StorageError,
    UnsupportedValueError,
    UsageError,
)
from statehold.testing import ranks_that_meet
from support.faults import DEADLINE_S, SMALL, Holdup
from support.in_memory import MemoryBoard, SimFs, checkpointer_on
from support.inside import end, inside
from support.levels import (
    FAR,
    LATER,
    NEAR,
    files,
    remove,
    settle,
    status,
    step_path,
    steps_at,
    two,
)
from support.rank_states import blank, check, state
from support.ranks import Ranks

SIZE = 3


def job(fs: SimFs, size: int = SIZE, **options: Any) -> Ranks:
    return Ranks(fs, size, run="/run", levels=two(far=LATER), **options)


def saved(ranks: Ranks, *steps: int) -> None:
    for step in steps:
        ranks.save(step, lambda rank, step=step: state(rank, step))
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))


def check_newest(ranks: Ranks, step: int) -> None:
    found = [blank() for _ in range(ranks.size)]
    got = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    assert got == [step] * ranks.size
    for rank, each in enumerate(found):
        check(each, rank, step)


def refuse(ranks: Ranks, rank: int, *levels: int) -> list[int]:
    """From now on this rank can open no file at the levels; the list empties it again."""
    refusing = list(levels)
    for level in levels:
        store = inside(ranks.ckpts[rank]).levels.near[level].store
        data_file = store.data_file

        def fail(*args: Any, level: int = level, do: Any = data_file) -> Any:
            if level in refusing:
                raise NoSpaceError("full", errno=errno.ENOSPC, path=f"level {level}")
            return do(*args)

        store.data_file = fail  # type: ignore[method-assign]
    return refusing


def partials(fs: SimFs) -> list[str]:
    return [name for root in (NEAR, FAR) for name, _ in fs.listdir(root) if "partial" in name]


@pytest.mark.parametrize("rank", range(SIZE))
def test_all_ranks_go_to_the_next_level_when_one_of_them_has_to(rank: int, caplog: Any) -> None:
    fs = SimFs(seed=1)
    with job(fs) as ranks:
        saved(ranks, 1)
        refusing = refuse(ranks, rank, 0)
        saved(ranks, 2, 3)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1], [1, 2, 3])
        assert {status(each).newest for each in ranks.ckpts[:1]} == {3}
        check_newest(ranks, 3)
        refusing.clear()
        saved(ranks, 4)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1, 4], [1, 2, 3])
        check_newest(ranks, 4)
        assert not partials(fs)
    assert caplog.text.count("level near cannot take step 2; saves go to level far") == 1
    assert "cannot take step 3" not in caplog.text
    assert caplog.text.count("level near takes steps again, from step 4 on") == 1


@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_only_when_no_level_is_left_does_a_save_of_ranks_fail(rank: int) -> None:
    fs = SimFs(seed=1)
    with job(fs) as ranks:
        saved(ranks, 1)
        refusing = refuse(ranks, rank, 0, 1)
        failures = ranks.failures(2, lambda rank: state(rank, 2))
        for other, error in enumerate(failures):
            if other == rank:
                assert isinstance(error, NoSpaceError)
                assert error.path == "level 0"
            else:
                assert isinstance(error, PeerFailedError)
                assert (error.rank, "level 0" in error.reason) == (rank, True)
        refusing.clear()
        ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
        saved(ranks, 3)
        check_newest(ranks, 3)
        assert not partials(fs)


def test_two_ranks_are_refused_at_two_levels() -> None:
    with job(SimFs(seed=1)) as ranks:
        saved(ranks, 1)
        refuse(ranks, 1, 0)
        refuse(ranks, 2, 1)
        failures = ranks.failures(2, lambda rank: state(rank, 2))
        assert [type(error) for error in failures] == [
            PeerFailedError, NoSpaceError, PeerFailedError,
        ]  # fmt: skip


def test_a_first_level_that_no_rank_can_make() -> None:
    fs = SimFs(seed=1)
    fs.write_file(NEAR, b"a file")
    with job(fs) as ranks:
        saved(ranks, 1, 2)
        assert steps_at(fs, FAR) == [1, 2]


def test_a_step_that_is_at_the_first_level_is_not_saved_again_behind_it() -> None:
    with job(SimFs(seed=1)) as ranks:
        saved(ranks, 1)
        refuse(ranks, 1, 0)
        failures = ranks.failures(1, lambda rank: state(rank, 7))
        assert isinstance(failures[1], NoSpaceError)
        check_newest(ranks, 1)


def test_a_level_that_is_another_jobs_is_left_alone() -> None:
    fs = SimFs(seed=1)
    with checkpointer_on(fs, FAR, **SMALL) as owner:
        owner.save(1, state(0, 1)).wait("committed", DEADLINE_S)
        fs.mkdir(f"{FAR}/step-000000000002.partial")
        with job(fs) as ranks:
            refuse(ranks, 1, 0)
            failures = ranks.failures(2, lambda rank: state(rank, 2))
            assert isinstance(failures[1], NoSpaceError)
        assert [name for name, _ in fs.listdir(FAR) if "partial" in name] == [
            "step-000000000002.partial"
        ]


def test_what_is_no_refusal_fails_the_save_for_all() -> None:
    with job(SimFs(seed=1)) as ranks:
        saved(ranks, 1)
        store = inside(ranks.ckpts[2]).levels.near[0].store

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        store.data_file = fail  # type: ignore[method-assign, assignment]
        refuse(ranks, 1, 0)
        failures = ranks.failures(2, lambda rank: state(rank, 2))
        assert "ZeroDivisionError" in str(failures[2])
        for error in failures[:2]:
            assert isinstance(error, PeerFailedError)
            assert error.rank == 2


# -- the ranks wait for each other, and not for long -----------------------------------------------


def be_patient_for(ranks: Ranks, timeout_s: float) -> None:
    """How long each waits for the others, from now on."""
    for ckpt in ranks.ckpts:
        peers = inside(ckpt).peers
        assert peers is not None
        peers.timeout_s = timeout_s


@pytest.mark.parametrize("failing", [0, SIZE - 1])
def test_a_rank_that_could_not_begin_ends_the_meeting_at_once(failing: int) -> None:
    """Or the others would wait for its file until their deadline, and blame it for that."""
    with job(SimFs(seed=1)) as ranks:
        saved(ranks, 1)

        def bad(rank: int) -> dict[str, Any]:
            return {**state(rank, 2), "x": object()} if rank == failing else state(rank, 2)

        failures = ranks.failures(2, bad)
        for rank, error in enumerate(failures):
            if rank == failing:
                assert isinstance(error, UnsupportedValueError)
            else:
                assert isinstance(error, PeerFailedError)
                assert error.rank == failing
        ranks.outcomes(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
        saved(ranks, 3)
        check_newest(ranks, 3)


@pytest.mark.parametrize("lost", [0, SIZE - 1])
def test_a_rank_that_does_not_come_is_named_in_time(lost: int) -> None:
    with job(SimFs(seed=1)) as ranks:
        saved(ranks, 1)
        be_patient_for(ranks, 1.0)

        def save(rank: int) -> None:
            if rank != lost:
                ranks.ckpts[rank].save(2, state(rank, 2)).wait("committed", DEADLINE_S)

        outcomes = ranks.outcomes(save)
        for rank, error in enumerate(outcomes):
            if rank != lost:
                assert isinstance(error, PeerLostError)
                assert error.ranks == (lost,)


def test_a_level_that_cannot_be_prepared_by_rank_0_is_passed_over(monkeypatch: Any) -> None:
    fs = SimFs(seed=1)
    with job(fs) as ranks:
        place = inside(ranks.ckpts[0]).levels.near[0]
        fired = []

        def fail(_: Any) -> None:
            fired.append(1)
            raise StorageError("away", errno=errno.EIO, path=NEAR)

        monkeypatch.setattr(place, "prepare", fail)
        saved(ranks, 1)
        assert fired
        assert steps_at(fs, FAR) == [1]
        check_newest(ranks, 1)


# -- ranks with different levels -------------------------------------------------------------------

DIFFERENT = {
    "3 levels, and rank 0 has 2": [*two(far=LATER), Directory(path="/more", name="more")],
    "1 levels, and rank 0 has 2": two(far=LATER)[:1],
    "level 2 (far): every is 7, on rank 0 1000000": two(far={"every": 7}),
    "level 1 (near): keep is 9, on rank 0 None": two(near={"keep": 9}, far=LATER),
    "level 2 (far): name is 'afar', on rank 0 'far'": [
        two()[0],
        Directory(path=FAR, name="afar", every=LATER["every"]),
    ],
    "level 1 (near): kind is 'Memory', on rank 0 'Directory'": [
        Memory(path=NEAR, name="near", keep=1),
        two(far=LATER)[1],
    ],
}


class Unlike(Ranks):
    """A job whose rank 1 has levels of its own."""

    def __init__(self, levels: list[Any]) -> None:
        self._own = {"levels": levels}
        super().__init__(SimFs(seed=1), SIZE, run="/run", levels=two(far=LATER))

    def _opened(self, options: dict[str, Any]) -> list[Checkpointer]:
        board, disks = MemoryBoard(), [self.fs] * self.size
        alike = ranks_that_meet(board, disks, self.run, **options)
        alike[1] = ranks_that_meet(board, disks, self.run, **{**options, **self._own})[1]
        return alike


@pytest.mark.parametrize("difference", DIFFERENT)
def test_ranks_with_different_levels_are_told_at_their_first_save(difference: str) -> None:
    with Unlike(DIFFERENT[difference]) as ranks:
        for _ in range(2):
            failures = ranks.failures(1, lambda rank: state(rank, 1))
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
            for rank, error in enumerate(failures):
                assert isinstance(error, UsageError if rank == 1 else PeerFailedError)
                assert difference in str(error)
        assert ranks.ckpts[0].steps() == []
        ranks.outcomes(lambda rank: end(ranks.ckpts[rank], flush=False))


def test_ranks_with_different_levels_are_told_when_they_restore() -> None:
    (difference, levels), *_ = DIFFERENT.items()
    with Unlike(levels) as ranks:
        outcomes = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(blank()))
        assert isinstance(outcomes[1], UsageError)
        assert difference in str(outcomes[1])
        for error in (outcomes[0], outcomes[2]):
            assert isinstance(error, PeerFailedError)
            assert (error.rank, difference in error.reason) == (1, True)


def test_ranks_of_which_one_has_no_first_save_compare_their_levels_no_more() -> None:
    """The failure of that save raises an error once; it does not stick."""
    with job(SimFs(seed=1)) as ranks:
        failures = ranks.failures(1, lambda rank: {"x": object()} if rank == 1 else state(rank, 1))
        assert isinstance(failures[1], UnsupportedValueError)
        ranks.outcomes(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
        saved(ranks, 2)
        check_newest(ranks, 2)


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_saved_behind_the_first_level_goes_on_from_there(lost: bool) -> None:
    """From where the step is to the levels behind it; the first level gets the next save."""
    fs = SimFs(seed=1)
    levels = [*two(far=LATER), Directory(path="/more", name="more", every=LATER["every"])]
    with Ranks(fs, SIZE, run="/run", levels=levels) as ranks:
        saved(ranks, 1)
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        refusing = refuse(ranks, 1, 0)
        saved(ranks, 2)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1], [1, 2])
        refusing.clear()
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        assert (steps_at(fs, NEAR), steps_at(fs, "/more")) == ([1], [1, 2])
        assert files(fs, "/more", 2) == files(fs, FAR, 2)
        if not lost:
            saved(ranks, 3)
            assert steps_at(fs, NEAR) == [1, 3]
            return
    # A job that begins with the step at the farther levels alone goes on with it, too.
    remove(fs, step_path("/more", 2))
    with Ranks(fs, 2, run="/run", levels=levels) as ranks:
        ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))
        assert steps_at(fs, "/more") == [1, 2]


@pytest.mark.parametrize("hanging", [0, SIZE - 1])
def test_a_rank_whose_level_hangs_is_named_in_time(hanging: int) -> None:
    with job(SimFs(seed=1)) as ranks:
        saved(ranks, 1)
        be_patient_for(ranks, 1.0)
        holdup = Holdup(ranks.ckpts[hanging])
        saves = ranks.begin(2, lambda rank: state(rank, 2))
        for rank, save in enumerate(saves):
            if rank != hanging:
                with pytest.raises(PeerLostError) as caught:
                    save.wait("committed", DEADLINE_S)
                assert caught.value.ranks == (hanging,)
        holdup.release()
        with pytest.raises((PeerLostError, PeerFailedError)):
            saves[hanging].wait("committed", DEADLINE_S)
        be_patient_for(ranks, DEADLINE_S)
        ranks.outcomes(lambda rank: ranks.ckpts[rank].save(3, state(rank, 3)))  # tells the failure
        saved(ranks, 4)
        check_newest(ranks, 4)
