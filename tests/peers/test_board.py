"""Every kind of board behaves the same."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from statehold.errors import PeerLostError, StorageError
from statehold.ranks.board import Board, DirectoryBoard, StoreBoard
from support.boards import DEADLINE_S, KINDS, Maker, tcp_server

SOON_S = 0.05


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    return KINDS[request.param](tmp_path)


def soon() -> float:
    return time.monotonic() + SOON_S


def later() -> float:
    return time.monotonic() + DEADLINE_S


@pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)) * 300])
def test_a_note_is_read_as_it_was_posted(make: Maker, value: bytes) -> None:
    mine, other = make(), make()
    assert other.peek("a/b") is None
    mine.post("a/b", value)
    assert other.peek("a/b") == value
    missing = other.wait(["a/b"], later())
    assert missing == []
    mine.post("a/b", b"again")
    assert other.peek("a/b") == b"again"
    assert mine.operations > 0


def test_keys_may_contain_anything(make: Maker) -> None:
    board = make()
    keys = ["a/..", "a/.", "a/.hidden", "a/b c%", "a/é", "up/../../down"]
    for key in keys:
        board.post(key, key.encode())
    assert [board.peek(key) for key in keys] == [key.encode() for key in keys]


def test_dropped_notes_are_gone(make: Maker) -> None:
    board = make()
    board.post("a/b", b"1")
    board.drop(["a/b", "a/never"])
    assert board.peek("a/b") is None
    missing = board.wait(["a/b"], soon())
    assert missing == ["a/b"]


@pytest.mark.thorough
def test_waiting_ends_at_the_deadline_and_names_what_is_missing(make: Maker) -> None:
    board = make()
    board.post("k/1", b"1")
    missing = board.wait(["k/0", "k/1", "k/2"], soon())
    assert missing == ["k/0", "k/2"]
    missing = board.wait(["k/0"], time.monotonic() - 1)
    assert missing == ["k/0"]
    missing = board.wait(["k/1"], time.monotonic() - 1)
    assert missing == []
    assert board.peek("k/1") == b"1", "the board still works after a wait that ran out"


def test_waiting_wakes_when_the_note_comes(make: Maker) -> None:
    waiter, poster = make(), make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait, ["w/0", "w/1"], later())
        poster.post("w/0", b"")
        poster.post("w/1", b"")
        missing = waiting.result(DEADLINE_S)
        assert missing == []


def test_a_waiting_thread_does_not_hold_up_others_on_the_same_board(make: Maker) -> None:
    board = make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(board.wait, ["w"], later())
        for number in range(20):
            board.post(f"n/{number}", b"x")
        assert not waiting.done()
        board.post("w", b"")
        missing = waiting.result(DEADLINE_S)
        assert missing == []


def test_a_group_is_full_when_all_have_entered(make: Maker) -> None:
    size = 5
    gatherer, boards = make(), [make() for _ in range(size)]
    with ThreadPoolExecutor(1) as pool:
        full = pool.submit(gatherer.full, "g", size, later())
        for member, board in enumerate(boards):
            board.enter("g", member, size, b"%d" % member)
        missing = full.result(DEADLINE_S)
        assert missing == []
    assert gatherer.collect("g", size) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_group_that_is_not_full_names_the_missing(make: Maker) -> None:
    board = make()
    for member in (0, 2, 3):
        board.enter("g", member, 6, b"")
    assert board.full("g", 6, soon()) == [1, 4, 5]


def test_ringing_wakes_the_gatherer(make: Maker) -> None:
    gatherer, other = make(), make()
    with ThreadPoolExecutor(1) as pool:
        full = pool.submit(gatherer.full, "g", 3, later())
        other.enter("g", 1, 3, b"")
        other.ring("g")
        got = full.result(DEADLINE_S)
        assert got == [0, 2]


def test_members_that_vanish_are_named(make: Maker) -> None:
    board = make()
    for member in range(3):
        board.enter("g", member, 3, b"")
    board.forget(["g"], 1)
    with pytest.raises(PeerLostError) as caught:
        board.collect("g", 3)
    assert caught.value.ranks == (1,)


@pytest.mark.thorough
def test_a_big_group_costs_a_few_calls_to_gather(
    make: Maker, request: pytest.FixtureRequest
) -> None:
    size = 3000
    board = make()
    for member in range(size):
        board.enter("g", member, size, b"%d" % member)
    before = board.operations
    assert board.full("g", size, later()) == []
    assert board.collect("g", size)[2999] == b"2999"
    if request.node.callspec.id in ("tcp", "file", "hash"):  # torch gives many values at once
        assert board.operations - before <= 10


def opened(boards: list[Board]) -> list[str]:
    with ThreadPoolExecutor(len(boards)) as pool:
        ranks = range(len(boards))
        return list(pool.map(lambda r: boards[r].open(r, len(boards), later()), ranks))


def test_opening_gives_all_ranks_the_same_new_token(make: Maker) -> None:
    tokens = [opened([make() for _ in range(4)]) for _ in range(3)]
    assert all(len(set(each)) == 1 and len(each[0]) == 8 for each in tokens)
    assert len({each[0] for each in tokens}) == 3


def test_opening_alone_ends_at_the_deadline(make: Maker) -> None:
    with pytest.raises(PeerLostError) as caught:
        make().open(1, 2, soon())
    assert caught.value.ranks == (0,)


def test_a_dead_jobs_directory_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    """A follower finds the old call first, answers it, and still ends up in the new job."""
    make = KINDS["directory"](tmp_path)
    (old, _, _) = opened([make(), make(), make()])
    boards = [make(), make(), make()]
    with ThreadPoolExecutor(2) as pool:
        followers = [pool.submit(boards[r].open, r, 3, later()) for r in (1, 2)]
        while make().full(f"{old}/hello", 3, soon()):
            pass
        token = boards[0].open(0, 3, later())
        got = {f.result(DEADLINE_S) for f in followers}
        assert got == {token}
    assert token != old
    assert not (tmp_path / "peers" / old).exists()


class Seeing(DirectoryBoard):
    """Tells when it has read what lies at `key`."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path)
        self._key = key
        self.seen = threading.Event()

    def peek(self, key: str) -> bytes | None:
        found = super().peek(key)
        if key == self._key:
            self.seen.set()
        return found


TORN = [b"", b"\0" * 8, b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8", b"../../up", b"0123456"]


@pytest.mark.parametrize("torn", [*TORN, b"7", b'{"a": 1}', b"[1, 2]", b"[" * 100_000])
@pytest.mark.parametrize("key", ["call", "0123abcd/welcome"])
def test_what_a_loss_of_power_has_left_of_notes_is_passed_over(
    key: str, torn: bytes, tmp_path: Path
) -> None:
    """Notes are not synced: after it they may be empty, or hold anything."""
    leader, follower = DirectoryBoard(tmp_path), Seeing(tmp_path, key)
    leader.post("call", b"0123abcd")
    leader.post(key, torn)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follower.open, 1, 2, later())
        seen = follower.seen.wait(DEADLINE_S)
        assert seen
        if following.done():
            following.result()
        token = leader.open(0, 2, later())
        followed = following.result(DEADLINE_S)
        assert followed == token
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == sorted(["call", token])


def test_the_leader_names_who_did_not_come_to_the_directory(tmp_path: Path) -> None:
    make = KINDS["directory"](tmp_path)
    opened([make(), make(), make()])
    with pytest.raises(PeerLostError) as caught:
        make().open(0, 3, soon())
    assert caught.value.ranks == (1, 2)


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    board = DirectoryBoard(tmp_path / "file" / "below")
    with pytest.raises(StorageError) as caught:
        board.post("a", b"")
    assert caught.value.path.startswith(str(tmp_path))


def test_waiting_leaves_the_training_threads_store_alone() -> None:
    """The client that the user holds answers while a board made from it waits."""
    store = tcp_server()
    board, done = StoreBoard(store, "run"), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(board.wait, ["w"], later())
        while board.operations == 0:
            done.wait(0.001)
        store.set("mine", "1")
        assert store.get("mine") == b"1"
        assert not waiting.done()
        board.post("w", b"")
        missing = waiting.result(DEADLINE_S)
        assert missing == []


def test_runs_do_not_see_each_others_notes() -> None:
    store = dist.HashStore()
    one, two = StoreBoard(store, "a"), StoreBoard(store, "b")
    one.post("k", b"1")
    assert two.peek("k") is None
