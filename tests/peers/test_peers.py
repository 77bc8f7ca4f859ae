"""Rounds of ranks: who is missing, who failed, and what a round costs and leaves behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from statehold.errors import (
    InvariantError,
    PeerFailedError,
    PeerLostError,
    StateholdError,
    StorageError,
)
from statehold.ranks.board import DirectoryBoard, StoreBoard
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers, job_token
from statehold.ranks.rounds import called
from support.boards import DEADLINE_S, KINDS, Maker, peers_of, together
from support.in_memory import MemoryBoard

SHORT_S = 0.2
NEVER_S = 1e6
SIZE = 5


@pytest.fixture(params=sorted(KINDS))
def make_any(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    return KINDS[request.param](tmp_path)


@pytest.fixture(params=["directory", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    return KINDS[request.param](tmp_path)


def test_a_job_whose_ranks_have_not_met_has_no_token(make: Maker) -> None:
    """Only rank 0 knows that: it makes the token. And they do not meet while it relies on that."""
    first, second = peers_of(make, 2)
    with job_token(None) as token:
        assert token is None
    with job_token(second) as token:
        assert token == ""
    with ThreadPoolExecutor(2) as pool:
        with job_token(first) as token:
            assert token is None
            with job_token(first) as other:  # as another thread of rank 0 sees it that is meeting
                assert other == ""
            meeting = [pool.submit(each.open) for each in (first, second)]
            assert first.token is second.token is None
        found = {each.result() for each in meeting}
    for each in (first, second):
        with job_token(each) as token:
            assert {token} == found


def save(one: Peers, seq: int) -> bytes:
    """A round as a save does it."""
    arrive(one, seq)
    return finish(one, seq)


def arrive(one: Peers, seq: int) -> None:
    one.arrive(seq, b"from %d" % one.rank)


def finish(one: Peers, seq: int) -> bytes:
    """The rest of the round of a rank that has arrived."""
    if one.rank:
        return one.outcome(seq)
    try:
        result = b", ".join(one.gather(seq))
    except StateholdError as error:
        one.conclude(seq, error)
        raise
    one.conclude(seq, result)
    return result


def everybody(size: int = SIZE) -> bytes:
    return b", ".join(b"from %d" % rank for rank in range(size))


def test_rounds_go_well_on_every_board(make_any: Maker) -> None:
    peers = peers_of(make_any, SIZE)
    tokens = together(peers, lambda one: one.open())
    assert len(set(tokens)) == 1
    assert {one.attempt(3) for one in peers} == {f"{tokens[0]}-3"}
    for seq in range(4):
        got = together(peers, lambda one, seq=seq: save(one, seq))
        assert got == [everybody()] * SIZE


def test_a_world_of_one(make: Maker) -> None:
    (alone,) = peers_of(make, 1)
    got = save(alone, 0)
    assert got == everybody(1)
    assert alone.agree("x", b"m", lambda messages: messages[0] * 2) == b"mm"


def test_the_committer_waits_for_the_slowest(make: Maker) -> None:
    peers = peers_of(make, 3)
    together(peers, lambda one: one.open())
    with ThreadPoolExecutor(2) as pool:
        rounds = [pool.submit(save, one, 0) for one in peers[:2]]
        while make().peek(f"{peers[0].open()}/save-0/1") is None:
            pass
        assert not any(each.done() for each in rounds)
        got = save(peers[2], 0)
        assert got == everybody(3)
        got = [each.result(DEADLINE_S) for each in rounds]
        assert got == [everybody(3)] * 2


def test_missing_ranks_are_named_on_all_ranks(make: Maker) -> None:
    peers = peers_of(make, SIZE, DEADLINE_S)
    together(peers, lambda one: one.open())
    peers[0].timeout_s = SHORT_S
    present = [peers[0], peers[2], peers[4]]
    for one in present:  # before anybody waits: on a busy machine one of them may be late
        arrive(one, 0)
    for error in together(present, lambda one: finish(one, 0)):
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1, 3)
        assert "1, 3" in str(error)


@pytest.mark.parametrize("waiting", [0, 1])
def test_saves_under_way_do_not_wait_one_after_the_other_for_a_rank_that_is_dead(
    make: Maker, waiting: int
) -> None:
    """Rank 0, and another one if rank 0 is dead. The second wait would not end in this life."""
    peers = peers_of(make, 2, DEADLINE_S)
    together(peers, lambda one: one.open())
    one = peers[waiting]
    wait = one.outcome if waiting else one.gather
    for seq, timeout_s, waiting_s in ((0, SHORT_S, 0.0), (1, NEVER_S, NEVER_S)):
        one.timeout_s = timeout_s
        arrive(one, seq)
        with pytest.raises(PeerLostError) as caught:
            wait(seq, waiting_s)
        assert caught.value.ranks == (1 - waiting,)
        if not waiting:
            one.conclude(seq, caught.value)
    one.timeout_s = DEADLINE_S  # a save that begins after that waits as long as usual
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(save, one, 2)
        assert save(peers[1 - waiting], 2) == everybody(2) == ended.result(DEADLINE_S)


def test_a_lost_committer_is_named(make: Maker) -> None:
    peers = peers_of(make, 3, SHORT_S)
    for one in peers:
        one.timeout_s = DEADLINE_S
    together(peers, lambda one: one.open())
    for one in peers:
        one.timeout_s = SHORT_S
    for error in together(peers[1:], lambda one: save(one, 0)):
        assert isinstance(error, PeerLostError)
        assert error.ranks == (0,)


def test_a_committer_that_arrived_is_given_time_to_name_the_missing(make: Maker) -> None:
    peers = peers_of(make, 2, DEADLINE_S)
    together(peers, lambda one: one.open())
    peers[1].timeout_s = SHORT_S
    peers[0].arrive(0, b"")
    with pytest.raises(PeerLostError) as caught:
        save(peers[1], 0)
    assert caught.value.ranks == (0,)
    peers[1].timeout_s = DEADLINE_S
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peers[1].outcome, 0)
        peers[0].conclude(0, PeerLostError("gone", ranks=[7, 8], hint="look"))
        with pytest.raises(PeerLostError) as caught:
            waiting.result(DEADLINE_S)
    assert caught.value.ranks == (7, 8)


def test_a_committer_that_came_at_the_last_moment_can_still_name_the_missing(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time to wait for them has only begun, and its word takes a moment to arrive."""
    peers = peers_of(make, 2, DEADLINE_S)
    together(peers, lambda one: one.open())
    board, given_s = peers[1].board, []

    def wait(keys: list[str], until: float) -> list[str]:
        given_s.append(until - time.monotonic())
        if len(given_s) == 1:
            peers[0].arrive(0, b"")
            return keys  # time is up
        peers[0].conclude(0, PeerLostError("gone", ranks=[7], hint="look"))
        return []

    monkeypatch.setattr(board, "wait", wait)
    peers[1].arrive(0, b"")
    with pytest.raises(PeerLostError) as caught:
        peers[1].outcome(0)
    assert caught.value.ranks == (7,)
    assert given_s[1] > 1.4 * DEADLINE_S


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_reaches_all_at_once(make: Maker, failing: int) -> None:
    """Long deadlines, and ranks that never come: only the failure can end the round."""
    peers = peers_of(make, SIZE)
    together(peers, lambda one: one.open())
    present = [one for one in peers if one.rank in {0, 1, 2}]

    def act(one: Peers) -> object:
        if one.rank == failing:
            return one.fail(0, StorageError("cannot write a block", path="/disk"))
        return save(one, 0)

    for one, result in zip(present, together(present, act), strict=True):
        if one.rank == failing:
            assert result is None
        else:
            assert isinstance(result, PeerFailedError)
            assert result.rank == failing
            assert "cannot write a block" in result.reason
            assert "/disk" in str(result)


def test_the_round_after_a_failure_goes_well(make_any: Maker) -> None:
    peers = peers_of(make_any, SIZE)

    def act(one: Peers) -> bytes:
        if one.rank == 3:
            one.fail(0, StorageError("no"))
        else:
            with pytest.raises(PeerFailedError):
                save(one, 0)
        return save(one, 1)

    got = together(peers, act)
    assert got == [everybody()] * SIZE


def test_a_late_rank_learns_that_it_was_given_up(make: Maker) -> None:
    peers = peers_of(make, 3)
    together(peers, lambda one: one.open())
    peers[0].timeout_s = SHORT_S
    for one in peers[:2]:
        arrive(one, 0)
    together(peers[:2], lambda one: finish(one, 0))
    with pytest.raises(PeerLostError) as caught:
        save(peers[2], 0)
    assert caught.value.ranks == (2,)
    peers[0].timeout_s = DEADLINE_S
    got = together(peers, lambda one: save(one, 1))
    assert got == [everybody(3)] * 3


def test_errors_of_the_committer_reach_the_others(make: Maker) -> None:
    peers = peers_of(make, 2)

    def act(one: Peers) -> bytes:
        one.arrive(0, b"")
        if one.rank == 0:
            one.gather(0)
            one.conclude(0, StorageError("cannot rename", path="/runs/x"))
        return one.outcome(0)

    for error in together(peers, act):
        assert isinstance(error, PeerFailedError)
        assert error.rank == 0
        assert "/runs/x" in error.reason


def test_a_failure_after_arriving_changes_nothing(make: Maker) -> None:
    peers = peers_of(make, 2)

    def act(one: Peers) -> bytes:
        one.arrive(0, b"")
        if one.rank == 1:
            one.fail(0, StorageError("too late"))
            return one.outcome(0)
        one.gather(0)
        one.conclude(0, b"committed")
        return b"committed"

    got = together(peers, act)
    assert got == [b"committed"] * 2


# -- agreements ----------------------------------------------------------------------------


def test_ranks_agree_while_a_save_is_under_way(make_any: Maker) -> None:
    """An agreement must not queue behind the waits of a background save."""
    peers = peers_of(make_any, 3)
    together(peers, lambda one: one.open())
    with ThreadPoolExecutor(3) as pool:
        saves = [pool.submit(save, one, 0) for one in peers[:2]]
        for turn in range(3):
            decided = together(peers, lambda one: one.agree("step", b"%d" % one.rank, max))
            assert decided == [b"2"] * 3, turn
        assert not any(each.done() for each in saves)
        saves.append(pool.submit(save, peers[2], 0))
        got = [each.result(DEADLINE_S) for each in saves]
        assert got == [everybody(3)] * 3


@pytest.mark.parametrize("error", [StorageError("no such step"), ValueError("no such step")])
def test_what_the_decider_raises_is_raised_everywhere(error: Exception) -> None:
    make = KINDS["memory"](Path())

    def decide(_messages: list[bytes]) -> bytes:
        raise error

    results = together(peers_of(make, 3), lambda one: one.agree("step", b"", decide))
    assert results[0] is error
    for other in results[1:]:
        assert isinstance(other, PeerFailedError)
        assert other.rank == 0
        assert "no such step" in other.reason


def test_a_rank_does_not_take_the_answer_to_a_call_for_which_it_gave_up_waiting(
    make: Maker,
) -> None:
    first, second = peers = peers_of(make, 2)
    together(peers, lambda one: one.open())
    second.timeout_s = 0.0
    with pytest.raises(PeerLostError):
        called(second, "rewind(3)", dict)
    second.timeout_s = DEADLINE_S
    assert called(first, "rewind(3)", lambda: 3) == 3
    with pytest.raises(PeerFailedError) as caught:
        called(second, "rewind(1)", dict)
    assert caught.value.rank == 0
    assert caught.value.reason == "it called rewind(3), and this rank called rewind(1)"
    assert together(peers, lambda one: called(one, "rewind(1)", lambda: 1)) == [1, 1]


# -- reopening, and what is left -----------------------------------------------------------


def test_a_run_opened_again_starts_afresh(make: Maker) -> None:
    tokens = set()
    for _ in range(3):
        peers = peers_of(make, 3)
        got = together(peers, lambda one: save(one, 0))
        assert got == [everybody(3)] * 3
        tokens.add(peers[0].open())
        for one in peers:
            one.close()
    assert len(tokens) == 3


def test_old_rounds_leave_nothing_behind() -> None:
    board = MemoryBoard()
    peers = peers_of(lambda: board, SIZE)
    counts = []
    for seq in range(6):
        together(peers, lambda one, seq=seq: save(one, seq))
        together(peers, lambda one: one.agree("step", b"", max))
        counts.append(len(board.store.keys_left()))
    assert len(set(counts[2:])) == 1, counts
    old = [key for key in board.store.keys_left() if "save-2/" in key or "step-2/" in key]
    assert not old


def test_failed_rounds_leave_nothing_behind_either() -> None:
    board = MemoryBoard()
    peers = peers_of(lambda: board, SIZE)

    def act(one: Peers, seq: int) -> None:
        if one.rank == seq % SIZE and seq % 2:
            one.fail(seq, StorageError("no"))
        else:
            save(one, seq)

    for seq in range(12):
        together(peers, lambda one, seq=seq: act(one, seq))
    for seq in range(12, 15):
        got = together(peers, lambda one, seq=seq: save(one, seq))
        assert got == [everybody()] * SIZE
    left = {key.split("/")[-2] for key in board.store.keys_left() if "/save-" in key}
    assert left == {"save-13", "save-14"}


def test_a_directory_is_left_with_the_last_rounds_only(tmp_path: Path) -> None:
    peers = peers_of(KINDS["directory"](tmp_path), 3)
    for seq in range(5):
        together(peers, lambda one, seq=seq: save(one, seq))
    folder = tmp_path / "peers" / peers[0].open()
    assert sorted(path.name for path in folder.glob("save-*")) == ["save-3", "save-4"]


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_round_costs_every_rank_a_few_calls(size: int) -> None:
    store = MemoryBoard().store
    boards = [StoreBoard(store, "runs/x") for _ in range(size)]
    peers = [Peers(board, Membership(rank, size), DEADLINE_S) for rank, board in enumerate(boards)]
    for seq in range(3):
        together(peers, lambda one, seq=seq: save(one, seq))
    before = [board.operations for board in boards]
    together(peers, lambda one: save(one, 3))
    calls = [board.operations - first for board, first in zip(boards, before, strict=True)]
    assert max(calls[1:]) <= 7, calls  # one of them also rings for the full group
    assert calls[0] <= 13, calls


def test_a_directory_costs_a_leader_one_file_for_each_rank(tmp_path: Path) -> None:
    boards = [DirectoryBoard(tmp_path) for _ in range(2)]
    peers = [Peers(board, Membership(rank, 2), DEADLINE_S) for rank, board in enumerate(boards)]
    together(peers, lambda one: save(one, 0))
    peers[1].arrive(1, b"")
    peers[0].arrive(1, b"")
    before = boards[0].operations
    peers[0].gather(1)
    assert boards[0].operations - before <= 6


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(InvariantError):
        Membership(rank=2, world=2)


def test_threads_that_open_together_open_once() -> None:
    board = MemoryBoard()
    (alone,) = peers_of(lambda: board, 1)
    gate = threading.Barrier(4)

    def open_it() -> str:
        gate.wait()
        return alone.open()

    with ThreadPoolExecutor(4) as pool:
        tokens = {each.result() for each in [pool.submit(open_it) for _ in range(4)]}
    assert len(tokens) == 1


def test_a_rank_that_came_before_the_others_opens_with_them_at_a_later_try(make_any: Maker) -> None:
    peers = peers_of(make_any, 2, 0.0)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            peers[1].open()
    for each in peers:
        each.timeout_s = DEADLINE_S
    first, second = together(peers, lambda one: one.open())
    assert first == second
    peers = peers_of(make_any, 2)
    again = together(peers, lambda one: one.open())
    assert len({first, *again}) == 2
