"""Lines: a joiner on the same host shares memory with the holder, one elsewhere does not."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from statehold.net.secret import ENVIRONMENT
from statehold.net.wire import Wire
from statehold.process.worker import Flag
from statehold.resilience import transfer
from statehold.resilience.state_bytes import Offer
from statehold.resilience.transfer import OfferServer, join

HOST, EPOCH, TIMEOUT_S = "127.0.0.1", 3, 20.0
SILENT = f"statehold-silent-{os.getpid()}"  # one name for the whole machine


@pytest.fixture
def server() -> Iterator[OfferServer]:
    found = OfferServer(HOST)
    found.offer(EPOCH, Offer({"model": torch.nn.Linear(4, 4)}))
    yield found
    found.close()


def joined(address: str, timeout_s: float = TIMEOUT_S) -> tuple[Wire, Tensor | None]:
    return join(address, EPOCH, time.monotonic() + timeout_s, Flag())


def first_piece(wire: Wire, shared: Tensor | None) -> bytes:
    """What comes for a range: its checksum, and the bytes if they are not in the memory of both."""
    until = time.monotonic() + TIMEOUT_S
    assert wire.receive(until)
    wire.send(b"[0, 16]", until)
    return wire.read(transfer._SUM_BYTES if shared is not None else 8 + 16, until)


def test_on_one_host_the_bytes_come_through_memory_of_both(server: OfferServer) -> None:
    wire, shared = joined(server.address)
    assert shared is not None
    checksum = first_piece(wire, shared)
    assert checksum == transfer.sum_of(shared[:16])
    assert any(shared[:16].tolist())
    wire.close()


def test_elsewhere_the_line_is_tcp(server: OfferServer) -> None:
    wire, shared = joined(server.address + "x")
    assert shared is None
    assert wire.socket.family == socket.AF_INET
    assert wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # its host may vanish
    assert len(first_piece(wire, shared)) == 24
    wire.close()


def test_another_user_gets_nothing_through_the_name_and_gives_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "the secret of the job")  # so TCP needs no user
    server = OfferServer(HOST)
    server.offer(EPOCH, Offer({"model": torch.nn.Linear(4, 4)}))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # so the other end is another user
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.connect("\0" + server.address.partition("/")[2])
        assert stranger.recv(1) == b""
    wire, shared = joined(server.address)
    assert (shared, wire.socket.family) == (None, socket.AF_INET)
    wire.close()
    server.close()


def test_a_holder_that_stands_still_is_no_other_host() -> None:
    """It has the name, and answers nothing. TCP would wait for it a second time."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{SILENT}")
        silent.listen()
        with pytest.raises(TimeoutError):
            joined(f"{HOST}:1/{SILENT}", 0.05)


def test_who_waits_for_a_holder_that_stands_still_goes_on_with_the_epoch() -> None:
    """It waited for as long as a connection may take, while the others waited for it."""
    revoked = Flag()
    revoked.set()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{SILENT}")
        silent.listen()
        with pytest.raises(TimeoutError):
            join(f"{HOST}:1/{SILENT}", EPOCH, time.monotonic() + 1e6, revoked)


def test_a_holder_without_memory_shares_nothing(
    server: OfferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It let nobody of its host in."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    wire, shared = joined(server.address)
    assert (shared, wire.socket.family) == (None, socket.AF_UNIX)
    assert len(first_piece(wire, shared)) == 24
    wire.close()


def test_a_holder_that_had_no_descriptor_lets_others_in_later(
    server: OfferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its door was closed for ever."""
    accept, failures = socket.socket.accept, []

    def accepting(listener: socket.socket) -> object:
        if not failures:
            failures.append(listener)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepting)
    joined(server.address)[0].close()
    assert failures


def test_a_server_that_is_closed_lets_nobody_in(server: OfferServer) -> None:
    server.close()
    with pytest.raises(ConnectionRefusedError):
        joined(server.address)


def test_lines_leave_nothing_behind(server: OfferServer) -> None:
    def visit() -> None:
        wire, _ = joined(server.address)
        assert wire.receive(time.monotonic() + TIMEOUT_S)
        wire.close()
        for each in threading.enumerate():
            if each.name == "statehold-line":
                each.join(TIMEOUT_S)
        gc.collect()

    for _ in range(3):
        visit()
    before = open_files(), shared_memories()
    for _ in range(20):
        visit()
    assert (open_files(), shared_memories()) == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memories() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:statehold-line" in line for line in maps)
