"""Ranks and their coordinator on real sockets: meetings, cuts, restarts, strangers, the end."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.control.peers import HELLO, PATIENCE_S, Office, Peer, meeting, until
from statehold.errors import PortInUseError, UsageError
from statehold.net import reception
from statehold.net.reception import Guest, Reception
from statehold.net.secret import ENVIRONMENT, Secret
from statehold.net.wire import Wire, connect
from statehold.resilience import control
from statehold.resilience.control import FIRST_MAX, Server
from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.protocol.coordinator import Coordinator
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    Fenced,
    Hello,
    Install,
    Message,
    Prepare,
    Promise,
    Refused,
    View,
    decode,
    encode,
)
from statehold.resilience.seat import Seat
from support.interrupts import interrupt_everywhere


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def stranger(office: Office) -> Wire:
    """Who is let in, as by a job without a secret."""
    return connect(("127.0.0.1", office.port), "coordinator", Secret(""), soon())


def is_over(wire: Wire) -> bool:
    """Whether the other side has closed; waits for it, and closes this side."""
    with contextlib.closing(wire), contextlib.suppress(ConnectionError):
        while wire.receive(soon()):
            pass
    return True


def test_ranks_meet_and_hear_each_others_views() -> None:
    with meeting("a", "b", "c") as (_, peers):
        assert {peer.member.members for peer in peers.values()} == {peers["a"].member.members}
        shares = sorted(index for peer in peers.values() for index in peer.member.share)
        assert shares == [0, 1, 2, 3]


def test_a_cut_connection_fences_its_rank_and_the_others_go_on() -> None:
    with meeting("a", "b", "c") as (_, peers):
        peers["b"].cut()
        for name in "ac":
            peers[name].until_in("a", "c", after=1)
        peers["b"].until(lambda member: isinstance(member.fenced, Fenced))


def test_a_rank_that_makes_no_progress_is_expelled_after_its_lease() -> None:
    with meeting("a", "b", last_lease_s=1.0) as (_, peers):
        peers["b"].is_stuck = True
        peers["a"].until_in("a", after=1)
        peers["b"].until(lambda member: isinstance(member.fenced, Fenced))


def test_a_replica_that_differs_is_refused_and_stays_out() -> None:
    with meeting("a") as (office, _):
        other = stranger(office)
        other.put(encode(Hello("b", 0, 1, {"seed": "2"}, View(0))))
        refused = decode(other.receive(soon()))
        assert isinstance(refused, Refused)
        assert dict(refused.facts) == {"what": "seed", "expected": "1", "got": "2"}
        other.close()


def test_a_restarted_coordinator_finds_all_members_in_their_epoch() -> None:
    with meeting("a", "b") as (office, peers):
        office.close()
        again = Office(port=office.port)
        until(lambda: set(again.coordinator.members) == {"a", "b"})
        assert again.coordinator.epoch == 1
        peers["b"].cut()
        peers["a"].until_in("a", after=1)
        office.server = again.server
        office.thread = again.thread


class Hasty(Member):
    """What its training thread does while the first Hello of a connection is under way."""

    peer: Peer
    done = False

    def hello(self) -> Hello:
        said = super().hello()
        if self.epoch and not self.done:
            self.done = True
            self.peer.link.send(self.complain("failed just now"))
        return said


def test_a_complaint_is_not_lost_between_a_hello_and_the_first_beat() -> None:
    """The Hello did not have it yet, and the link threw it away with what the Hello has."""
    with meeting("a") as (office, peers):
        newcomer = Peer("b", office.port, member=Hasty)
        hasty: Any = newcomer.member
        hasty.peer = newcomer
        member = peers["a"].member
        peers["a"].until(lambda each: each.joiners_wait)
        with peers["a"].link.changed:
            assert member.commit(1, end_epoch=True)
        peers["a"].link.send(Promise(2, member.view))
        newcomer.until_in("a", "b")
        office.close()
        again = Office(port=office.port)
        newcomer.until_in("a", "b", after=2)
        assert hasty.done
        newcomer.link.close()
        office.server, office.thread = again.server, again.thread


def test_a_message_that_breaks_the_protocol_ends_the_seat() -> None:
    """The link's thread ended, and the training thread waited for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    peer = Peer("a", listener.getsockname()[1])
    coordinator = Reception([listener], "coordinator", Secret(""))

    def answer(guest: Guest, hello: bytes) -> None:
        if isinstance(decode(hello), Hello):
            coordinator.put(guest, encode(Prepare(1)))
            coordinator.put(guest, encode(Install(1, {"b": View(0)})))

    coordinator.start("coordinator", answer)
    peer.until(lambda member: isinstance(member.fenced, Fenced))
    assert isinstance(peer.member.fenced, Fenced)
    assert "without this member" in peer.member.fenced.reason
    coordinator.close()
    peer.link.close()


def test_one_that_leaves_is_known_to_have_left() -> None:
    with meeting("a", "b") as (office, peers):
        peers["b"].link.leave()
        until(lambda: list(office.coordinator.members) == ["a"])
        assert [view.step for view in office.coordinator.departed] == [0]
        assert office.coordinator.epoch == 1


def test_an_operator_reads_who_comes_and_leaves_and_who_is_lost() -> None:
    with meeting("a", "b", "c") as (office, peers):
        assert "a rank 0 has connected, at step 0" in office.said
        peers["c"].cut()
        peers["a"].until_in("a", "b")
        peers["b"].cut()
        peers["a"].until_in("a")
        assert [each for each in office.said if each.startswith("b rank 0 has gone: ")]
        assert "epoch 3 has 1 replica: a" in office.said
        peers["a"].link.leave()
        until(lambda: not office.server.names)
    assert "a rank 0 has left, at step 0" in office.said
    assert not [each for each in office.said if each.startswith("a rank 0 has gone")]


def test_a_server_for_one_job_ends_with_it_and_not_with_a_loss() -> None:
    office = Office(1, once=True)
    peer = Peer("a", office.port)
    peer.until_in("a")
    peer.cut()
    until(lambda: [each for each in office.said if each.startswith("a rank 0 has gone: ")])
    peer.link.close()
    again = Peer("b", office.port)
    again.until_in("b")
    again.link.leave()
    office.end()
    assert office.said[-1] == "the job has ended"
    again.link.close()


# Strangers


@pytest.mark.thorough
@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x00 garbage\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * (FIRST_MAX + 1),
        b"[" * 100_000 + b"\n",
        b'{"is": "Hello", "replica": [], "place": 0, "width": 1, "job": {}, "view": 3}\n',
        encode(HELLO).replace(b'"lease_s": 30.0', b'"lease_s": 0'),
        encode(HELLO).replace(b'"step": 0', b'"step": 1e999'),
        encode(HELLO) * 2,
        encode(HELLO).replace(b'"lease_s": 30.0', b'"lease_s": 1' + b"0" * 400),
        encode(HELLO).replace(b'"promised": 0', b'"promised": ' + b"9" * 4300),
        encode(HELLO).replace(b'"members": []', b'"members": ["a", "a"]'),
        encode(HELLO).replace(b'"x"', rb'"\ud800"'),
        encode(HELLO).replace(b'"x"', rb'"\u001b[2J\nepoch 7 has 4 replicas"'),
        encode(Prepare(1)),
    ],
    ids=[
        "bytes", "http", "long", "deep", "types", "lease", "infinite", "two Hellos", "long lease",
        "long epoch", "member twice", "surrogate", "terminal", "no Hello",
    ],
)  # fmt: skip
def test_garbage_costs_its_sender_the_connection_and_nobody_else(line: bytes) -> None:
    with meeting("a") as (office, peers):
        other = stranger(office)
        other.put(line)
        assert is_over(other)
        peers["a"].cut()
        peers["a"].until(lambda member: member.fenced is not None)  # the server still works


def test_a_second_hello_costs_its_sender_the_connection() -> None:
    with meeting("a") as (office, _):
        other = stranger(office)
        other.put(encode(HELLO))
        other.put(encode(HELLO))
        assert is_over(other)
        until(lambda: "x" not in office.coordinator.replicas)


def test_half_a_frame_is_no_message() -> None:
    with meeting("a") as (office, _):
        other = stranger(office)
        other.put_bytes(struct.pack(">I", len(encode(HELLO))) + encode(HELLO)[:-1])
        other.close()
        until(lambda: any("a stranger has gone" in each for each in office.said))
        assert "x" not in office.coordinator.replicas


# Who is let in


def test_who_knows_another_secret_does_not_join_and_hears_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "the secret of the job")
    with meeting("a") as (office, peers):
        for secret in ("the secret of another job", ""):
            monkeypatch.setenv(ENVIRONMENT, secret)
            other = Peer("b", office.port)
            other.until(lambda member: isinstance(member.fenced, Refused))
            assert isinstance(other.member.fenced, Refused)
            assert ENVIRONMENT in other.member.fenced.facts["reason"]
            other.link.close()
        assert list(office.coordinator.members) == ["a"]
        assert f"a stranger has gone: it knows another {ENVIRONMENT}" in office.said
        monkeypatch.setenv(ENVIRONMENT, "the secret of the job")
        newcomer = Peer("c", office.port)
        peers["a"].until(lambda each: each.joiners_wait)
        newcomer.link.close()


def test_a_member_outlives_a_coordinator_of_another_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was started again with it by mistake. The member goes on, and tries again and again."""
    monkeypatch.setenv(ENVIRONMENT, "the secret of the job")
    with meeting("a") as (office, peers):
        office.close()
        monkeypatch.setenv(ENVIRONMENT, "the secret of another job")
        wrong = Office(port=office.port)
        until(lambda: ENVIRONMENT in peers["a"].link.problem)
        wrong.close()
        monkeypatch.setenv(ENVIRONMENT, "the secret of the job")
        again = Office(port=office.port)
        until(lambda: set(again.coordinator.members) == {"a"})
        assert peers["a"].member.fenced is None
        office.server, office.thread = again.server, again.thread


# The server


@pytest.mark.thorough
@pytest.mark.parametrize("is_full", [False, True], ids=["patience", "room"])
def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    monkeypatch.setattr(reception, "SILENT_MAX" if is_full else "FIRST_S", 4 if is_full else 0.5)
    with meeting("a") as (office, peers):
        address = ("127.0.0.1", office.port)
        silent = [socket.create_connection(address, PATIENCE_S) for _ in range(6)]
        for each in silent:
            with each, contextlib.suppress(ConnectionError):
                while each.recv(4096):
                    pass
        newcomer = Peer("b", office.port)
        peers["a"].until(lambda each: each.joiners_wait)
        newcomer.link.close()


def test_a_listener_without_descriptors_says_so_and_rests_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = [0]
    monkeypatch.setattr(reception, "_descriptors", lambda: most[0])
    office = Office(1)
    peer = Peer("a", office.port)
    rests: set[float | None] = {None}
    while len(rests) < 3:  # it tries again
        until(lambda: office.server.reception.rests_until not in rests)
        rests.add(office.server.reception.rests_until)
    most[0] = 100
    peer.until_in("a")
    most[0] = 1
    other = Peer("b", office.port)
    until(lambda: len(caplog.messages) > 1)
    for each in (peer, other):
        each.link.close()
    office.close()
    text = "nobody else is let in to the coordinator: it has {} connections, and the limit of open"
    assert [each.startswith(text.format(n)) for n, each in enumerate(caplog.messages)] == [True] * 2


def test_a_fault_of_the_coordinator_ends_the_connection_that_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with meeting("a") as (office, peers):
        with monkeypatch.context() as patched:
            patched.setattr(Coordinator, "hello", lambda *_: 1 // 0)
            other = stranger(office)
            other.put(encode(HELLO))
            assert is_over(other)
        newcomer = Peer("b", office.port)
        peers["a"].until(lambda each: each.joiners_wait)
        newcomer.link.close()


class Echo(Coordinator):
    """Sends two messages at once, and others when a connection is lost."""

    def __init__(self) -> None:
        super().__init__(2)
        self.conns: list[int] = []

    def hello(self, conn: int, message: Hello, now: float) -> list[tuple[int, Message]]:
        self.conns.append(conn)
        return []

    def receive(self, conn: int, message: Message, now: float) -> list[tuple[int, Message]]:
        return [(each, Prepare(1)) for each in self.conns]

    def lost(self, conn: int, now: float) -> list[tuple[int, Message]]:
        return [(each, Prepare(2)) for each in self.conns if each != conn]

    def tick(self, now: float) -> list[tuple[int, Message]]:
        return []


def test_what_follows_a_loss_is_sent_after_what_came_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The later epoch was sent first, from inside the sending of the earlier one."""
    real, lost = Reception.put, list[int]()

    def put(self: Reception, guest: Guest, frame: bytes) -> None:
        if guest.number == coordinator.conns[0]:
            lost.append(guest.number)
            raise ConnectionResetError("gone")  # a write is the first to learn it
        real(self, guest, frame)

    monkeypatch.setattr(Reception, "put", put)
    coordinator = Echo()
    with (
        contextlib.closing(Office(coordinator=coordinator)) as office,
        contextlib.closing(stranger(office)) as first,
        contextlib.closing(stranger(office)) as second,
    ):
        first.send(encode(HELLO), soon())
        until(lambda: len(coordinator.conns) == 1)
        second.send(encode(HELLO), soon())
        second.send(encode(Prepare(0)), soon())
        told = [decode(second.receive(soon())) for _ in range(2)]
    assert told == [Prepare(1), Prepare(2)]
    assert lost == coordinator.conns[:1]


def test_a_taken_port_and_a_strange_address_are_told() -> None:
    with meeting("a") as (office, _):
        with pytest.raises(PortInUseError, match="listens on the port"):
            Server(Coordinator(), "127.0.0.1", office.port, print)
        with pytest.raises(UsageError, match="cannot listen"):
            Server(Coordinator(), "192.0.2.1", 0, print)


def test_ctrl_c_in_the_trainer_leaves_the_lock_of_the_link_free() -> None:
    """The thread of the link needs it for each beat."""
    member = SimpleNamespace(is_changing=True)
    with meeting("a") as (_, peers):
        seat = SimpleNamespace(link=peers["a"].link, member=member)

        def call(_: object) -> None:
            with contextlib.suppress(GroupLostError):
                Seat.where(seat, 1)  # type: ignore[arg-type]

        def after(_: object) -> None:
            with peers["a"].link.changed:
                pass

        places = interrupt_everywhere([Seat.where], object, call, after)
    assert "where" in places


def test_what_all_ranks_are_told_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def count(message: Message) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(control, "encode", count)
    with meeting("a", "b", "c"):
        assert len([each for each in encoded if isinstance(each, Install)]) == 1
