"""Saves by several ranks, as threads: who writes what, who waits for whom, and how they fail."""

from __future__ import annotations

import errno
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from statehold import Save, errors
from statehold.checkpoint.save.handle import Passage
from statehold.errors import (
    NoSpaceError,
    PeerFailedError,
    PeerLostError,
    ReplicasDifferError,
    RunBusyError,
    StateholdError,
    StepOrderError,
    StorageError,
    UnsupportedValueError,
    UsageError,
)
from statehold.ranks.board import StoreBoard
from support.faults import DEADLINE_S, must, spy_on
from support.in_memory import SimFs
from support.inside import inside, passage, trainer
from support.rank_states import OWN_BYTES, SAME_BYTES, blank, check, state
from support.ranks import RUN, Ranks

SIZE = 4


def check_step(ranks: Ranks, step: int) -> None:
    """The newest step is `step`, and every rank gets its own state back."""
    found = [blank() for _ in range(ranks.size)]
    got = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    assert got == [step] * ranks.size
    for rank, each in enumerate(found):
        check(each, rank, step)


def check_old_step(ranks: Ranks, step: int) -> None:
    found = [blank() for _ in range(ranks.size)]
    ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank], step))
    for rank, each in enumerate(found):
        check(each, rank, step)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(SimFs(seed=1), SIZE) as ranks:
        yield ranks


def saved(ranks: Ranks, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ranks.save(step, lambda rank, step=step: state(rank, step))


@pytest.mark.thorough
def test_what_all_ranks_hold_alike_is_written_once_from_the_third_save_on(ranks: Ranks) -> None:
    for step in range(1, 6):
        saves = ranks.save(step, lambda rank, step=step: state(rank, step))
        written = ranks.data_bytes(step)
        if step < 3:
            assert written == [SAME_BYTES + OWN_BYTES] * SIZE
        else:
            assert sorted(written) == [OWN_BYTES] * (SIZE - 1) + [SAME_BYTES + OWN_BYTES]
        for rank, save in enumerate(saves):
            name = f"rank-{rank:05d}-of-{SIZE:05d}.safetensors"
            size = ranks.fs.stat_bytes(f"{RUN}/step-{step:012d}/{name}")
            assert save.stats.written_bytes == size
            assert save.stats.state_bytes == SAME_BYTES + OWN_BYTES
            assert save.stats.balance == saves[0].stats.balance
    for step in range(1, 6):
        check_old_step(ranks, step)


@pytest.mark.thorough
def test_a_late_rank_holds_up_no_training_thread(ranks: Ranks) -> None:
    for late in (SIZE - 1, 0):
        step = 10 - late
        early = [rank for rank in range(SIZE) if rank != late]

        def train(rank: int, step: int = step) -> Any:
            save = ranks.ckpts[rank].save(step, state(rank, step))
            ranks.ckpts[rank].gate(DEADLINE_S)
            return save.wait("staged", DEADLINE_S)

        saves = ranks.outcomes(lambda rank, late=late: None if rank == late else train(rank))
        # All of them are back, though the late rank has not even called save().
        for rank in early:
            assert saves[rank].done("staged")
            assert not saves[rank].done("committed")
        assert step not in ranks.ckpts[early[0]].steps()
        ranks.outcomes(lambda rank, late=late: train(rank) if rank == late else None)
        for rank in early:
            saves[rank].wait("committed", DEADLINE_S)
        check_step(ranks, step)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_value_that_one_rank_cannot_save_fails_all_at_once(ranks: Ranks, failing: int) -> None:
    saved(ranks, 1, 3)

    def bad(rank: int) -> dict[str, Any]:
        return {**state(rank, 4), "step": object() if rank == failing else 4}

    failures = ranks.failures(4, bad)
    for rank, error in enumerate(failures):
        if rank == failing:
            assert type(error) is UnsupportedValueError
        else:
            assert type(error) is PeerFailedError
            assert error.rank == failing
            assert "step" in error.reason
            assert "object" in error.reason
            assert error.facts["still safe"] == "step 3 and older"
    assert ranks.ckpts[0].steps() == [1, 2, 3]
    check_step(ranks, 3)
    saved(ranks, 4, 8)
    check_step(ranks, 8)
    assert sorted(ranks.data_bytes(8))[0] == OWN_BYTES


def test_ranks_that_save_different_steps_are_told(ranks: Ranks) -> None:
    saved(ranks, 1, 1)

    def act(rank: int) -> Any:
        step = 3 if rank == 2 else 2
        return ranks.ckpts[rank].save(step, state(rank, step)).wait("committed", DEADLINE_S)

    for error in ranks.outcomes(act):
        assert type(error) is PeerFailedError
        assert error.rank == 2
    assert ranks.ckpts[0].steps() == [1]
    saved(ranks, 4, 4)
    check_step(ranks, 4)
    assert ranks.names() == ["step-000000000001", "step-000000000004"]


def test_an_older_step_is_refused_on_all_ranks_and_the_next_save_goes_on(ranks: Ranks) -> None:
    saved(ranks, 1, 2)
    assert {type(error) for error in ranks.failures(1, state)} == {StepOrderError}
    saved(ranks, 3, 3)
    check_step(ranks, 3)


def test_replicas_that_drift_apart_fail_the_save_and_are_kept_apart(ranks: Ranks) -> None:
    saved(ranks, 1, 4)
    assert min(ranks.data_bytes(4)) == OWN_BYTES

    def drifted(rank: int, step: int) -> dict[str, Any]:
        found = state(rank, step)
        found["w"][7] += rank == 1
        return found

    first, *others = ranks.failures(5, lambda rank: drifted(rank, 5))
    assert type(first) is ReplicasDifferError
    assert "w" in first.facts["tensor"]
    assert all(type(other) is PeerFailedError and other.rank == 0 for other in others)
    assert ranks.ckpts[0].steps() == [1, 2, 3, 4]
    # Save 6 was planned with what save 4 taught, so it is noticed there as well.
    ranks.failures(6, lambda rank: drifted(rank, 6))
    for step in range(7, 10):
        ranks.save(step, lambda rank, step=step: drifted(rank, step))
        assert ranks.data_bytes(step) == [SAME_BYTES + OWN_BYTES] * SIZE
    found = [blank() for _ in range(SIZE)]
    ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    assert [int(each["w"][7]) - 7 * 31 - 9 for each in found] == [0, 1, 0, 0]


def test_after_a_failed_save_all_is_learned_anew(ranks: Ranks) -> None:
    saved(ranks, 1, 4)
    ranks.failures(5, lambda rank: {**state(rank, 5), "step": object() if rank == 1 else 5})
    written = []
    for step in range(6, 11):
        saved(ranks, step, step)
        written.append(max(ranks.data_bytes(step)) + min(ranks.data_bytes(step)))
    once, many = SAME_BYTES + 2 * OWN_BYTES, 2 * (SAME_BYTES + OWN_BYTES)
    assert written == [once, many, many, once, once]


def test_a_storage_error_of_one_rank_fails_all_with_its_reason(ranks: Ranks) -> None:
    saved(ranks, 1, 2)
    fired = threading.Event()

    def before(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "open_write":
            fired.set()
            raise StorageError("the disk of rank 3 is gone", path=str(args[0]))

    spied = inside(ranks.ckpts[3]).levels.store
    fs = spied.fs
    spy_on(ranks.ckpts[3], before)
    failures = ranks.failures(3, lambda rank: state(rank, 3))
    assert fired.is_set()
    assert type(failures[3]) is StorageError
    for error in failures[:3]:
        assert type(error) is PeerFailedError
        assert (error.rank, "the disk of rank 3 is gone" in error.reason) == (3, True)
    spied.fs = fs
    saved(ranks, 4, 4)
    check_step(ranks, 4)


def waits_for(event: threading.Event) -> Callable[[str, tuple[Any, ...]], None]:
    """Holds a rank before it opens its file."""

    def before(operation: str, _args: tuple[Any, ...]) -> None:
        if operation == "open_write":
            must(event.wait(DEADLINE_S))

    return before


def test_a_slow_rank_is_told_the_reason_and_not_what_came_of_it(ranks: Ranks) -> None:
    """Rank 0 gives up and clears the directory while rank 1 has not opened its file."""
    saved(ranks, 1, 2)
    cleared = threading.Event()

    spy_on(ranks.ckpts[1], waits_for(cleared))

    def act(rank: int) -> Any:
        found = {**state(rank, 3), "step": object() if rank == 2 else 3}
        save = ranks.ckpts[rank].save(3, found)
        if rank == 0:
            passage(save).wait_ended("committed", DEADLINE_S)
            inside(ranks.ckpts[0]).pipeline.drain()
            cleared.set()
        return save.wait("committed", DEADLINE_S)

    failures = ranks.outcomes(act)
    assert type(failures[2]) is UnsupportedValueError
    for rank in (0, 1, 3):
        assert type(failures[rank]) is PeerFailedError, failures[rank]
        assert failures[rank].rank == 2
    saved(ranks, 4, 4)
    check_step(ranks, 4)


def test_a_rank_that_has_failed_leaves_the_directory_to_rank_0(ranks: Ranks) -> None:
    """Rank 3 clears what it has made while rank 0 is about to make its file."""
    saved(ranks, 1, 2)
    returned, cleared = threading.Event(), threading.Event()

    def fail(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "open_write":
            must(returned.wait(DEADLINE_S))  # else save() itself raises the error
            raise StorageError("the disk of rank 3 is gone", path=str(args[0]))

    for rank in range(3):
        spy_on(ranks.ckpts[rank], waits_for(cleared))
    spy_on(ranks.ckpts[3], fail)

    def act(rank: int) -> Any:
        save = ranks.ckpts[rank].save(3, state(rank, 3))
        if rank == 3:
            returned.set()
            passage(save).wait_ended("committed", DEADLINE_S)
            inside(ranks.ckpts[3]).pipeline.drain()
            cleared.set()
        return save.wait("committed", DEADLINE_S)

    failures = ranks.outcomes(act)
    for rank in range(3):
        assert type(failures[rank]) is PeerFailedError, failures[rank]
        assert failures[rank].rank == 3


def test_a_rank_that_ends_holds_no_save_of_the_others(ranks: Ranks) -> None:
    """They may have begun two. The second one waited for peer_timeout_s."""
    saved(ranks, 1, 2)
    begun = threading.Barrier(4)

    def act(rank: int) -> Any:
        ckpt = ranks.ckpts[rank]
        saves = [ckpt.save(step, state(rank, step)) for step in (3, 4) if rank != 3]
        begun.wait(DEADLINE_S)
        if rank == 3:
            error = ValueError("of the training")
            ckpt.__exit__(type(error), error, None)
        found = []
        for save in saves:
            with pytest.raises(PeerFailedError) as caught:
                save.wait("committed", DEADLINE_S)
            found.append(caught.value)
        return found

    for found in ranks.outcomes(act)[:3]:
        assert [each.rank for each in found] == [3, 3]
        assert all("of the training" in str(each) for each in found)


def test_rank_0_is_told_the_reason_where_others_have_cleared_the_directory(ranks: Ranks) -> None:
    """The last of the others removes the empty directory, in which rank 0 is about to write."""
    saved(ranks, 1, 2)
    returned, cleared, left = threading.Event(), threading.Event(), threading.Semaphore(0)

    def fail(operation: str, args: tuple[Any, ...]) -> None:
        if operation == "open_write":
            must(returned.wait(DEADLINE_S))  # else save() itself raises the error
            raise StorageError("the disk of rank 3 is gone", path=str(args[0]))

    spy_on(ranks.ckpts[0], waits_for(cleared))
    spy_on(ranks.ckpts[3], fail)

    def act(rank: int) -> Any:
        save = ranks.ckpts[rank].save(3, state(rank, 3))
        if rank == 3:
            returned.set()
        if rank > 0:
            passage(save).wait_ended("committed", DEADLINE_S)
            inside(ranks.ckpts[rank]).pipeline.drain()
            left.release()
        else:
            for _ in range(3):
                must(left.acquire(timeout=DEADLINE_S))
            cleared.set()
        return save.wait("committed", DEADLINE_S)

    failures = ranks.outcomes(act)
    assert type(failures[0]) is PeerFailedError, failures[0]
    assert failures[0].rank == 3


def test_a_rank_that_saves_early_after_a_restore_is_not_swept_away(ranks: Ranks) -> None:
    """Rank 0 clears what a crash left when it first saves; others may be at work by then."""
    saved(ranks, 1, 2)
    with Ranks(ranks.fs, SIZE, run=RUN) as others:
        ranks.outcomes(lambda rank: ranks.ckpts[rank].close())
        check_step(others, 2)
        early = others.outcomes(
            lambda rank: others.ckpts[rank].save(3, state(rank, 3)) if rank else None
        )
        for save in early[1:]:
            save.wait("written", DEADLINE_S)
        others.outcomes(lambda rank: None if rank else others.ckpts[0].save(3, state(0, 3)))
        for save in early[1:]:
            save.wait("committed", DEADLINE_S)
        check_step(others, 3)


def test_retired_files_are_overwritten_by_the_rank_that_wrote_them() -> None:
    fs = SimFs(seed=2)
    with Ranks(fs, SIZE, keep=2) as ranks:
        reused = []
        for step in range(1, 9):
            saves = ranks.save(step, lambda rank, step=step: state(rank, step))
            reused.append([save.stats.reused for save in saves])
            assert ranks.ckpts[0].steps() == list(range(max(1, step - 1), step + 1))
        assert reused[:3] == [[False] * SIZE] * 3
        assert reused[4:] == [[True] * SIZE] * 4
        check_step(ranks, 8)
        pattern = r"step-\d{12}|\.spare"
        assert all(re.fullmatch(pattern, name) for name in ranks.names()), ranks.names()
    assert fs.listdir(RUN) == [("step-000000000007", True), ("step-000000000008", True)]


def test_rewind_gives_up_newer_steps_once_for_all_ranks(ranks: Ranks) -> None:
    saved(ranks, 1, 5)
    given_up = ranks.each(lambda rank: ranks.ckpts[rank].rewind(3))
    assert given_up == [[4, 5]] * SIZE
    assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[1, 2, 3]] * SIZE
    check_step(ranks, 3)
    ranks.save(4, lambda rank: state(rank, 4))
    check_step(ranks, 4)


def test_many_saves_in_a_row_without_waiting(ranks: Ranks) -> None:
    def train(rank: int) -> list[int]:
        saves = []
        for step in range(1, 13):
            saves.append(ranks.ckpts[rank].save(step, state(rank, step)))
            ranks.ckpts[rank].gate(DEADLINE_S)
        return [save.wait("committed", DEADLINE_S).step for save in saves]

    got = ranks.each(train)
    assert got == [list(range(1, 13))] * SIZE
    check_step(ranks, 12)
    assert ranks.data_bytes(12).count(OWN_BYTES) == SIZE - 1


def test_the_run_goes_on_with_another_number_of_ranks(ranks: Ranks) -> None:
    saved(ranks, 1, 4)
    ranks.outcomes(lambda rank: ranks.ckpts[rank].close())
    with Ranks(ranks.fs, 2) as fewer:
        saved(fewer, 5, 7)
        check_step(fewer, 7)
        assert fewer.ckpts[0].steps() == list(range(1, 8))
        found = blank()
        parts = {"only": ["w", "step"]}
        fewer.each(lambda rank: fewer.ckpts[rank].restore(found if rank else blank(), 4, **parts))
        assert torch.equal(found["w"], state(0, 4)["w"])


def test_ranks_make_the_run_directory_together() -> None:
    """One comes between two questions of another, and makes what that is about to make."""
    with Ranks(SimFs(seed=5), 2, run="/a/b/c") as ranks:
        first, second = (inside(ckpt).levels.store for ckpt in ranks.ckpts)
        asked = threading.Event()

        def between(operation: str, _args: tuple[Any, ...]) -> None:
            if operation == "stat_bytes" and not asked.is_set():
                asked.set()
                second.create()

        spy_on(ranks.ckpts[0], between)
        first.create()
        assert asked.is_set()
        assert ranks.fs.is_dir("/a/b/c")


@pytest.mark.parametrize("failing", [0, 2])
def test_ranks_that_go_on_after_a_failure_save_again(ranks: Ranks, failing: int) -> None:
    """A rank that hears of an earlier failure does not begin, and so fails the save of the others.
    It must not report that again, or the ranks would fail one another's saves for ever."""

    def train(rank: int) -> tuple[list[int], list[int]]:
        raised, failed = [], []
        for step in range(1, 9):
            found = {**state(rank, step), "step": object() if (rank, step) == (failing, 3) else 0}
            try:
                save = ranks.ckpts[rank].save(step, found)
            except StateholdError:
                raised.append(step)
                continue
            must(passage(save).wait_ended("committed", DEADLINE_S))
            failed += [step] if save.error else []
        return raised, failed

    for rank, told in enumerate(ranks.each(train)):
        assert told == (([3], [4]) if rank == failing else ([4], [3]))
    assert ranks.ckpts[0].steps() == [1, 2, 5, 6, 7, 8]


def test_a_step_saved_again_replaces_it_on_all_ranks(ranks: Ranks) -> None:
    saved(ranks, 1, 2)
    ranks.save(2, lambda rank: {**state(rank, 2), "seed": "second"})
    found = [{**blank(), "seed": None} for _ in range(SIZE)]
    ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    assert [each["seed"] for each in found] == ["second"] * SIZE
    assert ranks.ckpts[0].steps() == [1, 2]
    saved(ranks, 3, 3)
    check_step(ranks, 3)


def test_a_run_that_another_job_saves_into_is_refused_on_all_ranks(ranks: Ranks) -> None:
    saved(ranks, 1, 2)
    with Ranks(ranks.fs, SIZE) as others:
        first, *rest = others.failures(3, lambda rank: state(rank, 3))
        assert type(first) is RunBusyError
        for error in rest:
            assert type(error) is PeerFailedError
            assert "already saving into" in error.reason
        check_step(others, 2)  # reading is for everybody
    saved(ranks, 3, 5)
    check_step(ranks, 5)
    assert ranks.names() == [f"step-{step:012d}" for step in range(1, 6)]


def test_a_restore_beside_a_save_under_way(ranks: Ranks) -> None:
    """The training thread's rounds and the background's do not disturb each other."""
    saved(ranks, 1, 2)
    go_on = threading.Event()

    def hold(operation: str, _args: tuple[Any, ...]) -> None:
        if operation == "write_file":
            must(go_on.wait(DEADLINE_S))

    spy_on(ranks.ckpts[3], hold)
    saves = ranks.begin(3, lambda rank: state(rank, 3))
    check_step(ranks, 2)
    go_on.set()
    for save in saves:
        save.wait("committed", DEADLINE_S)
    check_step(ranks, 3)


def test_a_full_disk_fails_all_ranks_and_spares_the_older_steps() -> None:
    fs = SimFs(seed=6)
    with Ranks(fs, SIZE) as ranks:
        saved(ranks, 1, 2)
        fs.fail_next("open_write", errno.ENOSPC)
        failures = ranks.failures(3, lambda rank: state(rank, 3))
        assert fs.fired
        kinds = [type(error) for error in failures]
        assert kinds.count(NoSpaceError) == 1
        assert kinds.count(PeerFailedError) == SIZE - 1
        check_step(ranks, 2)
        saved(ranks, 4, 4)
        check_step(ranks, 4)


def test_others_are_told_of_a_failure_before_their_files_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would fail because of files that are gone, and not know why."""
    with Ranks(SimFs(seed=7), SIZE) as ranks:
        saved(ranks, 1, 2)
        happened: list[str] = []

        def removing(operation: str, args: tuple[object, ...]) -> None:
            if operation in ("unlink", "rmdir") and ".partial" in str(args[0]):
                happened.append("removed")

        def failing(operation: str, args: tuple[object, ...]) -> None:
            if operation == "open_write":
                raise errors.storage_error("open_write", errno.ENOSPC, str(args[0]))
            removing(operation, args)

        peers = inside(ranks.ckpts[0]).peers
        conclude = peers.conclude

        def concluding(*args: object) -> None:
            happened.append("told")
            conclude(*args)

        monkeypatch.setattr(peers, "conclude", concluding)
        for rank, ckpt in enumerate(ranks.ckpts):  # whoever comes first removes the files
            spy_on(ckpt, removing if rank else failing)
        failures = ranks.failures(3, lambda rank: state(rank, 3))
        ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
    assert [type(error) for error in failures] == [NoSpaceError] + [PeerFailedError] * (SIZE - 1)
    assert happened[0] == "told"
    assert "removed" in happened


def test_a_failure_that_one_rank_has_yet_to_hear_of_ends_a_restore_on_all(ranks: Ranks) -> None:
    saved(ranks, 1, 2)
    saves = ranks.begin(3, lambda rank: state(rank, 3))
    ranks.each(lambda rank: saves[rank].wait("committed", DEADLINE_S))
    fake = StorageError("the disk of rank 2 is gone")
    late = Passage(4, 0.0)
    late.fail(fake)
    trainer(ranks.ckpts[2]).watched.append(late)
    found = [blank() for _ in range(SIZE)]
    outcomes = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    assert outcomes[2] is fake
    assert all(type(outcomes[rank]) is PeerFailedError for rank in (0, 1, 3))
    assert all(torch.equal(each["w"], blank()["w"]) for each in found)
    got = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank]))
    assert got == [3] * SIZE


def test_a_step_that_is_no_number_in_the_first_save_of_one_rank_is_told(ranks: Ranks) -> None:
    def begin(rank: int) -> Save:
        step: Any = "one" if rank == 1 else 1
        return ranks.ckpts[rank].save(step, state(rank, 1)).wait("committed", DEADLINE_S)

    outcomes = ranks.outcomes(begin)
    assert type(outcomes[1]) is UsageError
    assert all(type(outcomes[rank]) is PeerFailedError for rank in (0, 2, 3))


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "metric": (3, {"metrics": {"loss": torch.ones(())}}),
    "tag": (3, {"tags": "one"}),
    "step": ("three", {}),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_a_call_that_one_rank_has_refused_fails_no_other_save(refused: str) -> None:
    step, said = REFUSED[refused]
    with Ranks(SimFs(seed=1), 2) as ranks:
        saved(ranks, 1, 2)

        def save(rank: int) -> Save:
            asked = (step, said) if rank else (3, {})
            save = ranks.ckpts[rank].save(asked[0], state(rank, 3), **asked[1])
            return save.wait("committed", DEADLINE_S)

        other, own = ranks.outcomes(save)
        assert type(own) is UsageError
        assert type(other) is PeerFailedError
        saved(ranks, 4, 8)
        assert ranks.ckpts[0].steps() == [1, 2, 4, 5, 6, 7, 8]


ALIKE: dict[str, Callable[[Any], Any]] = {
    "rewind(1)": lambda ckpt: ckpt.rewind(1),
    "rewind(3)": lambda ckpt: ckpt.rewind(3),
    "restore()": lambda ckpt: ckpt.restore(blank()),
    "restore(step=2)": lambda ckpt: ckpt.restore(blank(), 2),
}


@pytest.mark.parametrize(("of_rank_0", "other"), [*itertools.permutations(ALIKE, 2)])
def test_ranks_that_call_different_things_are_told_and_pair_again(
    of_rank_0: str, other: str
) -> None:
    calls = [of_rank_0, other]
    with Ranks(SimFs(seed=1), 2) as ranks:
        saved(ranks, 1, 3)
        for error in ranks.outcomes(lambda rank: ALIKE[calls[rank]](ranks.ckpts[rank])):
            assert type(error) is PeerFailedError
            assert error.rank == 1
            assert error.reason == f"it called {other}, and rank 0 called {of_rank_0}"
        assert ranks.ckpts[0].steps() == [1, 2, 3]
        check_step(ranks, 3)


@pytest.mark.parametrize("alone", [0, 1])
def test_after_a_call_that_one_rank_made_alone_all_pair_again(alone: int) -> None:
    with Ranks(SimFs(seed=1), 2) as ranks:
        saved(ranks, 1, 3)
        all_peers = [inside(ckpt).peers for ckpt in ranks.ckpts]
        for peers in all_peers:
            peers.timeout_s = 0.0
        for _ in range(2):
            with pytest.raises(PeerLostError):
                ranks.ckpts[alone].restore(blank())
        for peers in all_peers:
            peers.timeout_s = DEADLINE_S
        check_step(ranks, 3)
        assert ranks.each(lambda rank: ranks.ckpts[rank].rewind(2)) == [[3]] * 2


def test_the_second_save_under_way_does_not_wait_again_for_a_dead_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Ranks(SimFs(seed=1), 2) as ranks:
        saved(ranks, 1, 1)
        ckpt, begun, lost_s, until_s = ranks.ckpts[0], threading.Event(), [], []
        timeout_s = inside(ckpt).peers.timeout_s

        def full(self: StoreBoard, group: str, size: int, until: float) -> list[int]:
            must(begun.wait(DEADLINE_S))
            lost_s.append(time.monotonic())
            until_s.append(until)
            return [1]

        monkeypatch.setattr(StoreBoard, "full", full)
        saves = [ckpt.save(step, state(0, step)) for step in (2, 3)]
        begun.set()
        for each in saves:
            with pytest.raises(PeerLostError, match="ranks did not arrive within") as caught:
                each.wait("committed", DEADLINE_S)
            assert caught.value.ranks == (1,)
        assert until_s[1] < lost_s[0] + timeout_s


CALLS = {
    "save": lambda ckpt: ckpt.save(2, state(0, 2)).wait("committed", DEADLINE_S),
    "restore": lambda ckpt: ckpt.restore(blank()),
    "rewind": lambda ckpt: ckpt.rewind(1),
    "flush": lambda ckpt: ckpt.flush(),
    "save by another": lambda ckpt: ckpt.save(2, state(1, 2)).wait("committed", DEADLINE_S),
}


@pytest.mark.parametrize("call", CALLS)
def test_who_calls_alone_is_told_that_every_rank_has_to(call: str) -> None:
    with Ranks(SimFs(seed=1), 2) as ranks:
        saved(ranks, 1, 1)
        for ckpt in ranks.ckpts:
            inside(ckpt).peers.timeout_s = 0.2
        alone = ranks.ckpts[1 if call == "save by another" else 0]
        with pytest.raises(PeerLostError) as caught:
            CALLS[call](alone)
        assert "every rank has to call save(), restore()" in str(caught.value)
        assert 'coordination="none"' in str(caught.value)
