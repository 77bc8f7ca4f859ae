"""Wires: frames come whole and in order, both ends know the secret, and every call ends in time."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from statehold.errors import UsageError
from statehold.net import addresses
from statehold.net import secret as secret_module
from statehold.net import wire as wire_module
from statehold.net.reception import Guest, Reception
from statehold.net.secret import (
    ENVIRONMENT,
    GREETING_BYTES,
    MAGIC,
    NONCE_BYTES,
    REPLY_BYTES,
    Secret,
    of_job,
)
from statehold.net.wire import SecretError, Wire, connect, entered
from statehold.process.worker import Flag

SECRET = Secret("the secret of the job")
LONG_S = 60.0


def soon() -> float:
    return time.monotonic() + LONG_S


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    mine, other = map(Wire, socket.socketpair())
    yield mine, other
    mine.close()
    other.close()


@contextlib.contextmanager
def host(secret: Secret = SECRET, door: str = "door") -> Iterator[tuple[str, int]]:
    """Says to each guest what it has said."""
    listener = socket.create_server(("127.0.0.1", 0))
    reception = Reception([listener], door, secret)

    def echo(guest: Guest, frame: bytes) -> None:
        reception.put(guest, frame)

    reception.start("host", echo)
    yield listener.getsockname()[:2]
    reception.close()


# Frames


def test_frames_come_whole_and_in_order_with_bytes_between_them(wires: tuple[Wire, Wire]) -> None:
    mine, other = wires
    mine.send(b"first", soon())
    mine.send(b"", soon())
    mine.pour(b"raw", soon())
    mine.send(b"last", soon())
    assert other.receive(soon()) == b"first"
    assert other.receive(soon()) == b""
    assert other.read(3, soon()) == b"raw"
    assert other.receive(soon()) == b"last"


def test_a_frame_may_come_in_pieces(wires: tuple[Wire, Wire]) -> None:
    mine, other = wires
    for byte in b"\0\0\0\3ab":
        mine.pour(bytes([byte]), soon())
        assert list(other.frames()) == []
    mine.pour(b"c\0\0\0\1d", soon())
    assert list(other.frames()) == [b"abc", b"d"]


def test_a_frame_that_is_too_long_ends_the_connection_before_it_comes(
    wires: tuple[Wire, Wire],
) -> None:
    mine, other = wires
    other.frame_max = 10
    mine.pour(b"\0\0\0\x0b", soon())
    with pytest.raises(ConnectionAbortedError, match="without an end"):
        other.receive(soon())


def test_a_peer_that_does_not_read_is_given_up(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "UNSENT_MAX", 1 << 20)
    mine, _ = wires
    with pytest.raises(ConnectionAbortedError, match="does not read"):
        mine.put(b"x" * (8 << 20))  # more than the kernel takes
    assert mine.must_write


def test_what_waits_to_be_sent_comes_before_what_follows(wires: tuple[Wire, Wire]) -> None:
    mine, other = wires
    mine.put(b"x" * (4 << 20))  # more than the kernel takes
    assert mine.must_write
    following = threading.Thread(target=mine.send, args=(b"next", soon()))
    following.start()
    assert len(other.receive(soon())) == 4 << 20
    assert other.receive(soon()) == b"next"
    following.join()


def test_every_call_ends_by_its_moment(wires: tuple[Wire, Wire]) -> None:
    mine, other = wires
    over = time.monotonic() + 0.01
    for call in (
        lambda: mine.receive(over),
        lambda: mine.read(1, over),
        lambda: mine.pour(bytes(64 << 20), over),
    ):
        with pytest.raises(TimeoutError):
            call()
    stop = Flag()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.001):
                other.pour(b"\xff", soon())

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):  # there is always some more, and never all of it
        mine.read(1 << 20, time.monotonic() + 0.05)
    stop.set()
    dripping.join()


def test_who_is_revoked_waits_for_nobody() -> None:
    here, there = socket.socketpair()
    revoked = Flag()
    wire = Wire(here, revoked=revoked)
    threading.Timer(0.01, revoked.set).start()
    with pytest.raises(TimeoutError, match="nobody waits"):
        wire.receive(time.monotonic() + 1e6)
    wire.close()
    there.close()


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\2x"])
def test_an_end_before_the_end_of_a_frame_is_told(wires: tuple[Wire, Wire], sent: bytes) -> None:
    mine, other = wires
    other.pour(sent, soon())
    other.close()
    with pytest.raises(ConnectionResetError):
        mine.receive(soon())


# The secret


def test_who_knows_the_secret_is_let_in() -> None:
    with host() as address, contextlib.closing(connect(address, "door", SECRET, soon())) as wire:
        wire.send(b"hello", soon())
        assert wire.receive(soon()) == b"hello"


@pytest.mark.parametrize(
    ("secret", "door"), [("another secret", "door"), ("", "door"), ("the secret of the job", "x")]
)
def test_who_knows_another_secret_or_comes_to_another_door_is_not(secret: str, door: str) -> None:
    with host() as address, pytest.raises(SecretError, match=ENVIRONMENT):
        connect(address, door, Secret(secret), soon())


def test_an_address_that_drops_everything_leaves_time_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name may have two: often one of IPv6 that a firewall closes."""
    now, waited, really = [0.0], [], socket.socket.connect

    def connected(one: socket.socket, target: tuple[str, int]) -> None:
        if target[0] != "127.0.0.1":
            waited.append(one.gettimeout())
            now[0] += waited[-1] or LONG_S
            raise TimeoutError
        really(one, target)

    with host() as (there, port):
        ways = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, port)) for it in ("192.0.2.1", there)
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ways)
        monkeypatch.setattr(socket.socket, "connect", connected)
        monkeypatch.setattr(wire_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        with contextlib.closing(connect(("a name", port), "door", SECRET, LONG_S)) as wire:
            wire.send(b"hello", LONG_S)
            assert wire.receive(LONG_S) == b"hello"
    assert waited == [LONG_S / 2]


def test_a_host_without_a_secret_is_not_believed() -> None:
    with host(Secret("")) as address, pytest.raises(SecretError):
        connect(address, "door", SECRET, soon())


def test_the_secret_is_never_sent_and_no_proof_is_good_twice() -> None:
    heard, replies = bytearray(), []
    with host() as address, socket.create_connection(address, LONG_S) as first:
        greeting = first.recv(GREETING_BYTES, socket.MSG_WAITALL)
        reply, expected = SECRET.reply("door", greeting)
        first.sendall(reply)
        answer = first.recv(len(expected), socket.MSG_WAITALL)
        assert answer == expected
        heard += greeting + reply + answer
        replies += [reply, answer * 2, greeting[-NONCE_BYTES:] + answer]
        for again in replies:  # what was heard, said to the host once more
            with socket.create_connection(address, LONG_S) as second:
                assert second.recv(GREETING_BYTES, socket.MSG_WAITALL) != greeting
                second.sendall(again)
                assert second.recv(1 << 10, socket.MSG_WAITALL) == bytes(len(expected))
    assert b"the secret of the job" not in heard
    assert Secret("the secret of the job")._key not in heard


def test_a_host_that_repeats_what_the_guest_has_proven_is_not_believed() -> None:
    """The proofs of both roles differ."""
    here, there = socket.socketpair()

    def repeat() -> None:
        with there:
            there.sendall(MAGIC + bytes(NONCE_BYTES))
            there.sendall(there.recv(REPLY_BYTES, socket.MSG_WAITALL)[NONCE_BYTES:])
            there.recv(1)

    repeating = threading.Thread(target=repeat)
    repeating.start()
    with pytest.raises(SecretError):
        entered(here, "door", SECRET, soon())
    repeating.join()


def test_nothing_is_heard_of_a_guest_before_it_has_proven_it() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        reception = Reception([listener], "door", SECRET)
        reception.start("host", lambda guest, frame: heard.append(frame))
        with socket.create_connection(address, LONG_S) as stranger:
            stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
            stranger.sendall(bytes(REPLY_BYTES) + b"\0\0\0\5hello" * 100)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 10):
                    pass
        reception.close()
    assert heard == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_without_a_secret_another_user_of_the_host_is_no_guest_and_no_host(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says whose a connection within the host is. A secret is proof enough."""
    user = os.geteuid()
    for secret in (Secret(""), SECRET):
        listener = addresses.listen(address)
        reception = Reception([listener], "door", secret)
        reception.start("host", lambda guest, frame: None)
        target = listener.getsockname()[:2]
        connect(target, "door", secret, soon()).close()
        is_refused = pytest.raises(OSError) if secret.is_empty else contextlib.nullcontext()
        with monkeypatch.context() as patched, is_refused:
            patched.setattr(os, "geteuid", lambda: user + 1)  # so the other end is another user
            connect(target, "door", secret, soon()).close()
        reception.close()


def test_a_host_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    with host(Secret("")) as address:
        connected = socket.create_connection(address, LONG_S)
        greeting = connected.recv(GREETING_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL)
        assert len(greeting) == GREETING_BYTES
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(PermissionError, match="no process of this user"):
            entered(connected, "door", Secret(""), soon())


def test_a_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert of_job().is_empty
    assert not of_job("and another").is_empty
    monkeypatch.setenv(ENVIRONMENT, "x" * secret_module.LENGTH_MIN)
    with host(of_job()) as address:
        connect(address, "door", of_job(), soon()).close()
        with pytest.raises(SecretError):
            connect(address, "door", of_job("and another"), soon())
    monkeypatch.setenv(ENVIRONMENT, "x" * (secret_module.LENGTH_MIN - 1))
    with pytest.raises(UsageError, match="too short") as raised:
        of_job()
    assert "xxx" not in str(raised.value)
