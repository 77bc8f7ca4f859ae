"""How a save with use_collectives=False ends where rank 0 cannot tell the others that it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from statehold.errors import InvariantError, PeerFailedError, PeerLostError, StorageError
from statehold.format.manifest import RecordEntry
from statehold.integrations.dcp import writer
from statehold.integrations.dcp.writer import Sent
from statehold.integrations.dcp.writing import SaveDestination
from statehold.ranks.membership import Membership
from statehold.ranks.peers import Peers
from support.faults import must
from support.in_memory import MemoryBoard
from support.in_memory.board import MemoryStore

SIZE = 2
DEADLINE_S = 60.0


class SaveRound(writer.SaveRound):
    """Of ranks that are threads."""

    def __init__(self, board: MemoryBoard, rank: int) -> None:
        self.rank, self.world_size = rank, SIZE
        self._board = board
        self._peers = Peers(board, Membership(rank, SIZE), DEADLINE_S)


def sent(rank: int) -> Sent:
    place = SaveDestination("/run/step-1", "/run/step-1.partial", 1, rank, SIZE, "a" * 16)
    return Sent(place, (), {}, RecordEntry("record", 1, "0" * 64) if rank else None, {}, None)


def ends(meetings: list[SaveRound], publish, is_there) -> list[BaseException | None]:
    """How the save ends on each rank."""

    def end(meeting: SaveRound) -> BaseException | None:
        try:
            meeting.end(sent(meeting.rank), publish, is_there)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(end, meetings, timeout=DEADLINE_S))


@pytest.fixture
def meetings() -> list[SaveRound]:
    board = MemoryBoard()
    return [SaveRound(board, rank) for rank in range(SIZE)]


def mute(meetings: list[SaveRound], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Rank 0 cannot say how the save has ended; once it has tried, the other one waits no more."""
    fired: list[object] = []
    tried = threading.Event()
    first, other = (meeting._peers for meeting in meetings)
    outcome = other.outcome

    def conclude(*args: object) -> None:
        fired.append(args)
        tried.set()
        raise StorageError("the store is gone")

    def in_vain(seq: int) -> bytes:
        must(tried.wait(DEADLINE_S))
        other.timeout_s = 0.0
        return outcome(seq)

    monkeypatch.setattr(first, "conclude", conclude)
    monkeypatch.setattr(other, "outcome", in_vain)
    return fired


def test_a_rank_that_is_not_told_looks_for_the_checkpoint(meetings, monkeypatch, caplog) -> None:
    fired, published = mute(meetings, monkeypatch), []
    assert ends(meetings, published.extend, lambda: bool(published)) == [None, None]
    assert (len(fired), len(published)) == (1, SIZE)
    assert "the checkpoint is committed; could not tell the other ranks" in caplog.text


def test_a_rank_that_is_not_told_and_finds_none_raises(meetings, monkeypatch) -> None:
    fired = mute(meetings, monkeypatch)
    own, other = ends(meetings, list, lambda: False)
    assert own is None
    assert isinstance(other, PeerLostError)
    assert len(fired) == 1


def test_an_unforeseen_error_is_told_at_once(meetings) -> None:
    def publish(sents: Iterator[Sent]) -> None:
        assert next(sents)
        raise ZeroDivisionError

    own, other = ends(meetings, publish, lambda: False)
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(other, PeerFailedError)
    assert InvariantError("unexpected ZeroDivisionError").summary in other.reason


# -- saves that a rank has missed ------------------------------------------------------------------


class Job:
    """The saves of ranks that are threads; each save of a rank has a SaveRound of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, here = MemoryStore(), threading.local()
        monkeypatch.setattr(writer, "_get_default_store", lambda: store)
        monkeypatch.setattr(writer, "rank_and_world", lambda: (here.rank, SIZE))
        self._here = here

    def begins(self, rank: int, path: str, timeout_s: float = DEADLINE_S) -> object:
        """How a save begins on a rank: its destination, or its error."""
        self._here.rank = rank
        place = SaveDestination(path, f"{path}.partial", 1, 0, SIZE, "a" * 16)
        try:
            return writer.SaveRound(path, timeout_s).begin(lambda: place).final
        except PeerLostError as error:
            return error

    def begin_on_all(self, path: str) -> list[object]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(lambda rank: self.begins(rank, path), range(SIZE)))


LAST, ANOTHER = "/run/last", "/run/step-2"


@pytest.mark.parametrize("missing", range(SIZE))
def test_a_save_that_a_rank_has_missed_says_how_to_go_on(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch)
    assert job.begin_on_all(LAST) == [LAST] * SIZE
    errors = [job.begins(1 - missing, LAST, timeout_s=0.01)]
    errors += [job.begins(missing, LAST, timeout_s=0.01)]  # the next save
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert "no longer pair there: go on with another checkpoint_id" in str(error)
        assert "Checkpointer" not in str(error)
    assert job.begin_on_all(ANOTHER) == [ANOTHER] * SIZE
