"""Groups of ranks that are threads here: sums, votes, columns, rows, and what is left of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold.net import addresses
from statehold.net.secret import Secret
from statehold.net.wire import connect
from statehold.process.worker import Flag
from statehold.resilience import gloo
from statehold.resilience.groups import GroupLostError, Groups
from statehold.resilience.meeting import Desk, MeetingPlace, meet
from support.faults import must

HOST = "127.0.0.1"
DEADLINE_S = 20.0
FAILURES = int(os.environ.get("STATEHOLD_GROUP_FAILURES", "20"))


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    found = Desk(HOST)
    yield found
    found.close()


def on_ranks(
    desk: Desk, epoch: int, size: tuple[int, int], run: Callable[[Groups, int, int], Any]
) -> dict[tuple[int, int], Any]:
    """run(groups, i, j) on each rank (i, j)."""

    def live(place: tuple[int, int]) -> Any:
        groups = Groups(MeetingPlace(desk.address, epoch, place, size, HOST, Flag()))
        built.wait(30)
        try:
            result = run(groups, *place)
            done.wait(30)
            return result
        finally:
            groups.drop()
            must(groups.join(30))

    built, done = threading.Barrier(size[0] * size[1]), threading.Barrier(size[0] * size[1])
    places = [(i, j) for i in range(size[0]) for j in range(size[1])]
    with ThreadPoolExecutor(len(places)) as pool:
        return dict(zip(places, pool.map(live, places), strict=True))


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_sums_go_over_columns_and_votes_over_all(desk: Desk, size: tuple[int, int]) -> None:
    def run(groups: Groups, i: int, j: int) -> Any:
        tensor = torch.tensor([10**i, 1 << 60], dtype=torch.int64) + j
        groups.start(tensor).wait()
        return tensor.tolist(), groups.gather([i, j, 7])

    found = on_ranks(desk, 1, size, run)
    votes = [[[i, j, 7] for j in range(size[1])] for i in range(size[0])]
    for (_, j), (total, gathered) in found.items():
        ones = sum(10**i for i in range(size[0]))
        assert total == [ones + size[0] * j, size[0] * ((1 << 60) + j) % 2**64]
        assert gathered == votes


def test_several_sums_run_at_once(desk: Desk) -> None:
    def run(groups: Groups, i: int, j: int) -> Any:
        tensors = [torch.full((1000,), float(each + i)) for each in range(5)]
        pending = [groups.start(each) for each in tensors]
        for each in reversed(pending):
            each.wait()
        return [float(each.mean()) for each in tensors]

    assert on_ranks(desk, 2, (2, 1), run)[0, 0] == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_a_rank_that_drops_its_groups_ends_what_the_others_wait_for(desk: Desk) -> None:
    def run(groups: Groups, i: int, j: int) -> Any:
        if i == 0:
            groups.drop()
            with pytest.raises(GroupLostError, match="the epoch has ended"):
                groups.start(torch.ones(3))
            return None
        with pytest.raises(GroupLostError) as caught:
            groups.start(torch.ones(3)).wait()
        return caught.value.facts["epoch"]

    assert on_ranks(desk, 3, (3, 1), run) == {(0, 0): None, (1, 0): 3, (2, 0): 3}


def test_a_fork_of_a_rank_holds_nobody(desk: Desk) -> None:
    """Its copies of the sockets stay open."""

    def run(groups: Groups, i: int, j: int) -> None:
        if i == 0:
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                signal.pause()
            forked.append(child)
            groups.drop()
            return
        with pytest.raises(GroupLostError):
            groups.start(torch.ones(3)).wait()

    forked: list[int] = []
    try:
        on_ranks(desk, 9, (2, 1), run)
    finally:
        for each in forked:
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)
    assert forked


def test_what_was_not_waited_for_is_released(desk: Desk) -> None:
    def run(groups: Groups, i: int, j: int) -> Any:
        if i == 0:
            groups.start(torch.ones(3))

    on_ranks(desk, 4, (2, 1), run)


def test_hanging_up_leaves_other_connections_alone(desk: Desk) -> None:
    first = gloo.Line(HOST)
    second = gloo.Line(HOST)
    assert first.own != second.own
    one = Groups(MeetingPlace(desk.address, 6, (0, 0), (1, 1), HOST, Flag()))
    first.hang_up()
    one.drop()
    with ThreadPoolExecutor(1) as pool:
        nobody = Flag()
        other = pool.submit(meet, desk.address, "hall", 1, 2, "b", nobody)
        first.hang_up()
        second.hang_up()
        assert meet(desk.address, "hall", 0, 2, "a", nobody) == ["a", "b"]
        assert other.result() == ["a", "b"]


def test_a_line_knows_its_address_while_others_begin_to_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[socket.socket] = []
    device = gloo._device

    def interfering(host: str) -> Any:
        if len(others) < 2:
            others.append(socket.create_server((HOST, 0)))
        return device(host)

    monkeypatch.setattr(gloo, "_device", interfering)
    line = gloo.Line(HOST)
    assert len(others) == 2
    assert line.own not in [each.getsockname() for each in others]
    for each in others:
        each.close()


def test_a_host_that_is_not_here_is_told(desk: Desk) -> None:
    with pytest.raises(GroupLostError, match="has failed") as caught:
        Groups(MeetingPlace(desk.address, 7, (0, 0), (2, 1), "192.0.2.254", Flag()))
    assert caught.value.facts["reason"]


def test_a_desk_that_has_gone_is_told() -> None:
    gone = Desk(HOST)
    gone.close()
    with pytest.raises(GroupLostError) as caught:
        Groups(MeetingPlace(gone.address, 8, (0, 0), (2, 1), HOST, Flag()))
    assert gone.address in caught.value.facts["reason"]


def test_a_desk_closes_though_a_forked_child_has_copies_of_its_sockets() -> None:
    """Such as a worker of a loader that was made after the replica."""
    gone = Desk(HOST)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=there.recv, daemon=True)
    child.start()
    closing = threading.Thread(target=gone.close, daemon=True)
    try:
        closing.start()
        closing.join(DEADLINE_S)
        assert child.is_alive()
        assert not closing.is_alive()
        with pytest.raises(GroupLostError, match="has failed"):
            Groups(MeetingPlace(gone.address, 9, (0, 0), (2, 1), HOST, Flag()))
    finally:
        here.send(None)
        child.join()


def test_a_desk_forgets_whoever_goes_or_talks_nonsense(desk: Desk) -> None:
    nonsense = [b"hello", b"[1]", b"x" * 70_000, b"[" * 60_000]
    nonsense += [b'[["g"], 0, 2, "x"]', b'["g", [], 2, "x"]', b'["g", 0, "2", "x"]']
    nonsense += [b'["g", 2, 2, "x"]', b'["g", 0, 2, {}]']
    until = time.monotonic() + DEADLINE_S
    for sentence in [*nonsense, b'["g", 0, 2, "gone"]']:
        with contextlib.closing(
            connect(addresses.split(desk.address), "desk", Secret(""), until)
        ) as wire:
            wire.send(sentence, until)
            if sentence in nonsense:
                with pytest.raises(ConnectionResetError):
                    wire.receive(until)
    ended = Flag()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda r: meet(desk.address, "g", r, 2, str(r), ended), [0, 1]))
    assert found == [["0", "1"]] * 2


def test_epochs_that_fail_leave_nothing_behind(desk: Desk) -> None:
    """STATEHOLD_GROUP_FAILURES=1000 for more. Buildings and sums fail in turn."""
    others = gloo_threads()
    _fail(desk, 0)
    _groups_end()  # those of other tests, too
    descriptors = len(os.listdir("/proc/self/fd"))
    for each in range(1, FAILURES + 1):
        _fail(desk, each)
        _groups_end()
    assert len(gloo_threads()) <= len(others)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def gloo_threads() -> list[str]:
    names = []
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(each, "comm").read_text().strip())
    return [each for each in names if "gloo" in each]


def _groups_end() -> None:
    """Wait for the threads that groups have left their sums and connections to."""
    for thread in threading.enumerate():
        if thread.name == "statehold-groups":
            thread.join(DEADLINE_S)
            must(not thread.is_alive(), "groups that were dropped have not ended")


def _fail(desk: Desk, number: int) -> None:
    revoked = Flag()
    if number % 2:
        timer = threading.Timer(0.001, revoked.set)
        timer.start()
        with pytest.raises(GroupLostError):
            Groups(MeetingPlace(desk.address, 100 + number, (0, 0), (2, 1), HOST, revoked))
        timer.join()
        return

    def run(groups: Groups, i: int, j: int) -> None:
        if i == 1:
            groups.drop()
            return
        with pytest.raises(GroupLostError):
            groups.start(torch.ones(1000)).wait()

    on_ranks(desk, 100 + number, (2, 1), run)


class Stuck:
    """An operation that never notices the end of its connections."""

    def __init__(self) -> None:
        self.released = Flag()

    def is_completed(self) -> bool:
        return self.released.is_set

    def wait(self) -> None:
        self.released.wait()


def test_an_operation_that_does_not_end_is_left_to_the_thread_of_the_groups(desk: Desk) -> None:
    revoked, stuck = Flag(), Stuck()
    groups = Groups(MeetingPlace(desk.address, 1, (0, 0), (1, 1), HOST, revoked))
    pending = groups._run("a sum", lambda: stuck, None)
    groups.drop()
    with pytest.raises(GroupLostError, match="the epoch has ended"):
        pending.wait()
    assert not groups.join(0)  # it keeps what the operation may write into
    stuck.released.set()
    must(groups.join(30))


def test_groups_that_end_while_an_operation_begins_are_not_released_before_it(desk: Desk) -> None:
    """Their destruction waits for what runs in them: the trainer stood still for ever in it."""
    stuck, released = Stuck(), []
    groups = Groups(MeetingPlace(desk.address, 1, (0, 0), (1, 1), HOST, Flag()))

    def begin() -> Stuck:
        groups.drop()
        released.append(groups.join(0.1))
        return stuck

    pending = groups._run("a sum", begin, None)
    assert released == [False]
    with pytest.raises(GroupLostError, match="the epoch has ended"):
        pending.wait()
    assert not groups.join(0)
    stuck.released.set()
    must(groups.join(30))
