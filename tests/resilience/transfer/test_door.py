"""Doors: a joiner on the same host shares memory with the holder, one elsewhere does not."""

from __future__ import annotations

import errno
import gc
import os
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from statehold.resilience import transfer
from statehold.resilience.transfer import Door, DoorLine, connect

HOST, NBYTES, TIMEOUT_S = "127.0.0.1", 1 << 16, 20.0
SILENT = f"statehold-silent-{os.getpid()}"  # one name for the whole machine


@pytest.fixture
def lines() -> queue.Queue[DoorLine]:
    """What has come in."""
    return queue.Queue()


@pytest.fixture
def door(lines: queue.Queue[DoorLine]) -> Iterator[Door]:
    found = Door(HOST, NBYTES, lines.put)
    yield found
    found.close()


def test_on_one_host_both_sides_see_the_same_memory(
    door: Door, lines: queue.Queue[DoorLine]
) -> None:
    joiner = connect(door.address, TIMEOUT_S, never())
    holder = lines.get(timeout=TIMEOUT_S)
    assert joiner.shared is not None
    assert holder.shared is not None
    assert joiner.shared.data_ptr() != holder.shared.data_ptr()
    holder.shared[:] = 7
    assert joiner.shared.tolist() == [7] * NBYTES
    assert said(joiner, holder) == b"done"


def test_elsewhere_the_line_is_tcp(door: Door, lines: queue.Queue[DoorLine]) -> None:
    address, _, name = door.address.partition("/")
    joiner = connect(f"{address}/{name[::-1]}", TIMEOUT_S, never())
    holder = lines.get(timeout=TIMEOUT_S)
    assert (joiner.shared, holder.shared) == (None, None)
    assert joiner.socket.family == socket.AF_INET
    assert said(joiner, holder) == b"done"


def test_who_may_not_use_the_name_comes_through_tcp(
    door: Door, lines: queue.Queue[DoorLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, timeout_s: float, revoked: threading.Event) -> DoorLine:
        raise PermissionError

    monkeypatch.setattr(transfer, "_near", refuse)
    joiner = connect(door.address, TIMEOUT_S, never())
    assert said(joiner, lines.get(timeout=TIMEOUT_S)) == b"done"


def test_another_user_gets_nothing_through_the_name_and_gives_nothing(
    door: Door, lines: queue.Queue[DoorLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # so the other end is another user
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.connect("\0" + door.address.partition("/")[2])
        assert stranger.recv(1) == b""
    joiner = connect(door.address, TIMEOUT_S, never())
    assert (joiner.shared, joiner.socket.family) == (None, socket.AF_INET)
    assert said(joiner, lines.get(timeout=TIMEOUT_S)) == b"done"


def test_a_holder_that_stands_still_is_no_other_host() -> None:
    """It has the name, and answers nothing. TCP would wait for it a second time."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{SILENT}")
        silent.listen()
        with pytest.raises(TimeoutError):
            connect(f"{HOST}:1/{SILENT}", 0.05, never())


def test_who_waits_for_a_holder_that_stands_still_goes_on_with_the_epoch() -> None:
    """It waited for as long as a connection may take, while the others waited for it."""
    revoked = threading.Event()
    revoked.set()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{SILENT}")
        silent.listen()
        with pytest.raises(TimeoutError):
            connect(f"{HOST}:1/{SILENT}", float("inf"), revoked)


def test_a_holder_without_memory_shares_nothing(
    door: Door, lines: queue.Queue[DoorLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It let nobody of its host in."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    joiner = connect(door.address, TIMEOUT_S, never())
    holder = lines.get(timeout=TIMEOUT_S)
    assert (joiner.shared, holder.shared) == (None, None)
    assert said(joiner, holder) == b"done"


def test_a_holder_that_had_no_descriptor_lets_others_in_later(
    door: Door, lines: queue.Queue[DoorLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its door was closed for ever."""
    accept, failures = socket.socket.accept, []

    def accepting(listener: socket.socket) -> object:
        if not failures:
            failures.append(listener)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepting)
    for _ in range(2):  # the door has called the original once
        with connect(door.address, TIMEOUT_S, never()).socket:
            lines.get(timeout=TIMEOUT_S).socket.close()
    assert failures


def test_a_door_that_is_closed_lets_nobody_in(door: Door) -> None:
    door.close()
    with pytest.raises(ConnectionRefusedError):
        connect(door.address, TIMEOUT_S, never())


def test_lines_leave_nothing_behind(door: Door, lines: queue.Queue[DoorLine]) -> None:
    def visit() -> None:
        with connect(door.address, TIMEOUT_S, never()).socket:
            lines.get(timeout=TIMEOUT_S).socket.close()
        gc.collect()

    visit()
    before = open_files(), shared_memories()
    for _ in range(20):
        visit()
    assert (open_files(), shared_memories()) == before


def never() -> threading.Event:
    """An epoch that does not end."""
    return threading.Event()


def said(first: DoorLine, second: DoorLine) -> bytes:
    """What comes out at the other end."""
    with first.socket, second.socket:
        first.socket.sendall(b"done")
        return second.socket.recv(16)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memories() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:statehold-line" in line for line in maps)
