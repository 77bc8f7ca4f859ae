"""Receptions: a job without a secret is warned once, and guests end nothing but themselves."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from statehold.net import addresses, reception
from statehold.net.reception import Guest, Reception
from statehold.net.secret import ENVIRONMENT, Secret
from statehold.net.wire import Wire, connect
from support.faults import must

LONG_S = 60.0


def soon() -> float:
    return time.monotonic() + LONG_S


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    monkeypatch.setattr(reception, "_warned", [])
    caplog.set_level(logging.WARNING)
    return caplog.messages


def opened(host: str, secret: Secret | None) -> None:
    Reception([addresses.listen(host)], "door", secret).close()


def test_a_job_without_a_secret_on_a_network_is_warned_once(
    warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        opened(host, Secret(""))
    opened("", Secret("a secret of the job"))
    opened("", None)  # HTTP, which has none
    assert caplog.messages == []
    opened("", Secret(""))
    opened("0.0.0.0", Secret(""))
    (said,) = caplog.messages
    assert said.startswith(f"{ENVIRONMENT} is not set: ")


@contextlib.contextmanager
def serving(hear: reception.Hear, lost: reception.Lost | None = None) -> Iterator[Reception]:
    listener = addresses.listen("127.0.0.1")
    found = Reception([listener], "door", Secret(""))
    found.start("host", hear, lost)
    found.port = listener.getsockname()[1]  # type: ignore[attr-defined]
    yield found
    found.close()


def guest_of(host: Reception) -> Wire:
    port: int = host.port  # type: ignore[attr-defined]
    return connect(("127.0.0.1", port), "door", Secret(""), soon())


def test_what_a_guest_leads_to_ends_its_connection_alone() -> None:
    told: list[tuple[int, str]] = []

    def hear(guest: Guest, frame: bytes) -> None:
        if frame == b"bad":
            raise RecursionError("whatever it is")
        host.put(guest, frame)

    with serving(hear, lambda guest, error: told.append((guest.number, str(error)))) as host:
        good, bad = guest_of(host), guest_of(host)
        bad.send(b"bad", soon())
        with pytest.raises(ConnectionResetError):
            bad.receive(soon())
        good.send(b"good", soon())
        assert good.receive(soon()) == b"good"
        assert told == [(2, "whatever it is")]
    for each in (good, bad):
        each.close()


def test_silent_guests_cost_no_look_at_the_connections_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel takes milliseconds to list them: a flood of guests took a core."""
    looked: list[int] = []
    monkeypatch.setattr(reception, "check_own", lambda sock: looked.append(sock.getpeername()[1]))
    with serving(lambda guest, frame: host.put(guest, frame)) as host:
        port: int = host.port  # type: ignore[attr-defined]
        silent = [socket.create_connection(("127.0.0.1", port), LONG_S) for _ in range(8)]
        for each in silent:
            assert each.recv(1)  # it is greeted, so it has been let through the door
        wire = guest_of(host)
        wire.send(b"ask", soon())
        assert wire.receive(soon()) == b"ask"
        assert looked == [wire.socket.getsockname()[1]]
    for one in (*silent, wire):
        one.close()


def test_who_takes_its_last_answer_slowly_gets_all_of_it() -> None:
    last = os.urandom(8 << 20)  # more than the kernel takes

    with serving(lambda guest, frame: host.finish(guest, last)) as host:
        slow, other = guest_of(host), guest_of(host)
        slow.send(b"ask", soon())
        other.send(b"ask", soon())  # it does not wait for the first one
        assert other.receive(soon()) == last
        assert slow.receive(soon()) == last
        for each in (slow, other):
            with pytest.raises(ConnectionResetError):
                each.receive(soon())
            each.close()


def test_a_wire_that_was_lent_comes_back_with_what_it_has_heard_meanwhile() -> None:
    """The next frame may be whole before the wire is back, and nothing would wake for it."""
    go_on = threading.Event()

    def work(guest: Guest) -> None:
        go_on.wait(LONG_S)
        guest.wire.pull()  # the thread takes more than its own
        guest.wire.send(b"done", soon())
        host.returned(guest)

    def hear(guest: Guest, frame: bytes) -> None:
        if frame == b"work":
            host.lend(guest)
            threading.Thread(target=work, args=[guest]).start()
        else:
            host.put(guest, frame)

    with serving(hear) as host:
        wire = guest_of(host)
        wire.send(b"work", soon())
        wire.send(b"next", soon())
        go_on.set()
        assert wire.receive(soon()) == b"done"
        assert wire.receive(soon()) == b"next"
        wire.close()


def test_closing_ends_what_a_thread_does_with_a_wire() -> None:
    ended = threading.Event()

    def work(guest: Guest) -> None:
        with contextlib.suppress(ConnectionResetError):
            guest.wire.receive(soon())
        host.returned(guest)
        ended.set()

    def hear(guest: Guest, frame: bytes) -> None:
        host.lend(guest)
        threading.Thread(target=work, args=[guest]).start()
        guest.wire.put(b"lent")

    with serving(hear) as host:
        wire = guest_of(host)
        wire.send(b"work", soon())
        assert wire.receive(soon()) == b"lent"
    must(ended.wait(LONG_S))
    with pytest.raises(ConnectionResetError):
        wire.receive(soon())
    wire.close()


def test_a_child_has_no_copy_of_a_connection_that_threads_hand_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection would outlive a killed parent. The selector is where other threads run."""
    connections: set[socket.socket] = set()
    kept: list[tuple[str, int]] = []

    class Forking(selectors.DefaultSelector):
        def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
            if isinstance(data, Guest):
                connections.add(data.wire.socket)
                fork("register")
            return super().register(fileobj, events, data)

        def unregister(self, fileobj: Any) -> selectors.SelectorKey:
            fork("unregister")
            return super().unregister(fileobj)

    def fork(call: str) -> None:
        child = os.fork()
        if not child:
            os._exit(sum(each.fileno() >= 0 for each in connections))
        kept.append((call, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

    def hear(guest: Guest, frame: bytes) -> None:
        host.lend(guest)
        guest.wire.send(frame, soon())
        host.returned(guest)

    monkeypatch.setattr(selectors, "DefaultSelector", Forking)
    with serving(hear) as host:
        wire = guest_of(host)
        for _ in range(2):
            wire.send(b"back", soon())
            assert wire.receive(soon()) == b"back"
        wire.close()
    assert {"register", "unregister"} == {call for call, _ in kept}
    assert [call for call, count in kept if count] == []
