"""Ranks and their coordinator on real sockets: meetings, cuts, restarts, strangers, the end."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from resilience.control.peers import LONG_LEASE_S, PATIENCE_S, Office, Peer, meeting, until
from statehold.errors import PortInUseError, UsageError
from statehold.process import reception
from statehold.resilience.control import server as lines_module
from statehold.resilience.control.server import Lines, Server
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

HELLO = Hello("x", 0, 1, {"seed": "1"}, View(0, digest="same"), lease_s=LONG_LEASE_S)


def stranger(office: Office) -> socket.socket:
    return socket.create_connection(("127.0.0.1", office.port), timeout=PATIENCE_S)


def is_over(sock: socket.socket) -> bool:
    """Whether the other side has closed; waits for it, and closes this side."""
    try:
        with sock:
            while sock.recv(4096):
                pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
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
        other.sendall(encode(Hello("b", 0, 1, {"seed": "2"}, View(0))))
        refused = decode(other.makefile("rb").readline())
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
        office._thread = again._thread


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
        office.server, office._thread = again.server, again._thread


def test_a_message_that_breaks_the_protocol_ends_the_seat() -> None:
    """The link's thread ended, and the training thread waited for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    peer = Peer("a", listener.getsockname()[1])
    connected, _ = listener.accept()
    install = Install(1, {"b": View(0)})
    connected.sendall(encode(Prepare(1)) + encode(install))
    peer.until(lambda member: isinstance(member.fenced, Fenced))
    assert isinstance(peer.member.fenced, Fenced)
    assert "without this member" in peer.member.fenced.reason
    connected.close()
    listener.close()
    peer.link.close()


def test_one_that_leaves_is_known_to_have_left() -> None:
    with meeting("a", "b") as (office, peers):
        peers["b"].link.leave()
        until(lambda: office.coordinator.members == ["a"])
        assert [view.step for view in office.coordinator._departed] == [0]
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
        until(lambda: not office.server._lines)
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


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x00 garbage\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 100_000 + b"\n",
        b'{"is": "Hello", "replica": [], "place": 0, "width": 1, "job": {}, "view": 3}\n',
        encode(HELLO).replace(b'"lease_s": 30.0', b'"lease_s": 0'),
        encode(HELLO).replace(b'"step": 0', b'"step": 1e999'),
        encode(HELLO) + encode(HELLO),
        encode(HELLO).replace(b'"lease_s": 30.0', b'"lease_s": 1' + b"0" * 400),
        encode(HELLO).replace(b'"promised": 0', b'"promised": ' + b"9" * 4300),
        encode(HELLO).replace(b'"members": []', b'"members": ["a", "a"]'),
        encode(HELLO).replace(b'"x"', rb'"\ud800"'),
        encode(HELLO).replace(b'"x"', rb'"\u001b[2J\nepoch 7 has 4 replicas"'),
        encode(Prepare(1)),
    ],
    ids=[
        "bytes", "http", "deep", "types", "lease", "infinite", "two Hellos", "long lease",
        "long epoch", "member twice", "surrogate", "terminal", "no Hello",
    ],
)  # fmt: skip
def test_garbage_costs_its_sender_the_connection_and_nobody_else(line: bytes) -> None:
    with meeting("a") as (office, peers):
        other = stranger(office)
        other.sendall(line)
        assert is_over(other)
        other.close()
        peers["a"].cut()
        peers["a"].until(lambda member: member.fenced is not None)  # the server still works


def test_a_message_may_come_in_pieces() -> None:
    with meeting("a") as (office, _):
        other = stranger(office)
        line = encode(HELLO)
        other.sendall(line[:10])
        other.sendall(line[10:-1])
        assert "x" not in office.coordinator._replicas
        other.sendall(line[-1:])
        until(lambda: "x" in office.coordinator._replicas)
        other.close()
        until(lambda: "x" not in office.coordinator._replicas)


def test_half_a_line_is_no_message() -> None:
    with meeting("a") as (office, _):
        other = stranger(office)
        other.sendall(encode(HELLO)[:-1])
        other.close()
        until(lambda: any("a stranger has gone" in each for each in office.said))
        assert "x" not in office.coordinator._replicas


# Lines and the server


def pair() -> tuple[Lines, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_connection(listener.getsockname())
    connected, _ = listener.accept()
    listener.close()
    return Lines(connected), other


def test_an_endless_line_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES_MAX", 1000)
    lines, other = pair()
    other.sendall(b"x" * 5000)
    lines.socket.setblocking(True)
    with pytest.raises(ConnectionAbortedError, match="no end of a line"):
        lines.read()
    lines.close()
    other.close()


@pytest.mark.parametrize("is_full", [False, True], ids=["patience", "room"])
def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    monkeypatch.setattr(reception, "SILENT_MAX" if is_full else "FIRST_S", 4 if is_full else 0.01)
    with meeting("a") as (office, peers):
        silent = [stranger(office) for _ in range(6)]
        assert all(map(is_over, silent))
        newcomer = Peer("b", office.port)
        peers["a"].until(lambda each: each.joiners_wait)
        newcomer.link.close()


def test_a_listener_without_descriptors_rests_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = [0]
    monkeypatch.setattr(reception, "_most", lambda: most[0])
    office = Office(1)
    peer = Peer("a", office.port)
    until(lambda: office.server._reception.turn_s is not None)  # it rests
    most[0] = 100
    peer.until_in("a")
    peer.link.close()
    office.close()


def test_a_fault_of_the_coordinator_ends_the_connection_that_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with meeting("a") as (office, peers):
        with monkeypatch.context() as patched:
            patched.setattr(Coordinator, "hello", lambda *_: 1 // 0)
            other = stranger(office)
            other.sendall(encode(HELLO))
            assert is_over(other)
        newcomer = Peer("b", office.port)
        peers["a"].until(lambda each: each.joiners_wait)
        newcomer.link.close()


def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINES_MAX", 1 << 20)
    lines, other = pair()
    with pytest.raises(ConnectionAbortedError, match="does not read"):
        lines.write(b"x" * (32 << 20))  # more than the kernel takes
    assert lines.must_write
    lines.close()
    other.close()


class Echo(Coordinator):
    """Sends two messages at once, and others when a connection is lost."""

    conns: list[int]

    def receive(self, conn: int, message: Message, now: float) -> list[tuple[int, Message]]:
        return [(each, Prepare(1)) for each in self.conns]

    def lost(self, conn: int, now: float) -> list[tuple[int, Message]]:
        return [(each, Prepare(2)) for each in self.conns if each != conn]

    def tick(self, now: float) -> list[tuple[int, Message]]:
        return []


class Broken(Lines):
    """Its peer is gone, and a write is the first to learn it."""

    def write(self, data: bytes) -> None:
        raise ConnectionResetError("gone")


def test_what_follows_a_loss_is_sent_after_what_came_before_it() -> None:
    """The later epoch was sent first, from inside the sending of the earlier one."""
    coordinator = Echo()
    server = Server(coordinator, "127.0.0.1", 0, lambda _: None)
    first, first_peer = pair()
    second, second_peer = pair()
    server._lines = {1: Broken(first.socket), 2: second}
    for conn, lines in server._lines.items():
        server._selector.register(lines.socket, 1, conn)
    server._names = {2: "b rank 0"}
    coordinator.conns = [1, 2]
    server._receive(2, Prepare(0))
    heard = second_peer.makefile("rb")
    assert [decode(heard.readline()), decode(heard.readline())] == [Prepare(1), Prepare(2)]
    second.close()
    server.close()
    for each in (first_peer, second_peer):
        each.close()


def test_a_taken_port_and_a_strange_address_are_told() -> None:
    with meeting("a") as (office, _):
        with pytest.raises(PortInUseError, match="listens on the port"):
            Server(Coordinator(), "127.0.0.1", office.port, print)
        with pytest.raises(UsageError, match="cannot listen"):
            Server(Coordinator(), "192.0.2.1", 0, print)
