"""Transfer: a joiner takes the state of a step's beginning from all live replicas at once (R11).

    transfer.serve(desk, epoch, place, size, revoked)     a holder, at the beginning of the step
    transfer.stop_serving()                               a holder, before its optimizer steps
    transfer.fetch(desk, epoch, place, size, revoked)     a joiner; raises GroupLostError

The holders copy nothing in advance. A joiner takes part in the reduction of the step, so no holder
can commit it, and change its state, before every joiner has everything or has been left out.

A joiner asks each holder for one range after another, so a fast holder serves more. The range of a
holder that dies, or sends a wrong byte, comes from another one. The bytes go through lines of their
own: a process group would fail as a whole, and cannot be given up piece by piece.

Invariants: a piece is read while the state cannot change, under the lock that `stop_serving` takes.
A piece is placed only after its checksum has been verified. Who asks for something else than a
range of the state loses its line, and so does who asks for nothing, or comes when LINES_MAX are
open: each takes a thread and memory for a range. A state that changes nevertheless, in a
forward pass, is not given to anybody.

Door: where a holder of the state lets joiners in, and how a joiner comes to it.

    door = Door(host, shared_bytes, connected)    connected(line) is called in a thread of the door
    line = connect(door.address, timeout_s, revoked)    from this host, or from another one

A joiner on the same host gets memory that both share, and a Unix socket for what they say. The
kernel then copies no bytes of the state: that costs a third of what TCP costs. Elsewhere, as in a
container with a network of its own, the line is a TCP connection and shares nothing. If the holder
gets no memory, the line is the Unix socket alone.

Invariants: only who runs as the same user comes through the Unix socket, and a joiner takes nothing
there from anybody else. Nothing is left in a directory: the socket's name is in Linux's abstract
namespace, and the memory has none. It is freed when both sides have dropped the line.

Not here: what the bytes mean (state_bytes), who holds the state and who joins (protocol).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statehold import _core
from statehold.encoding import strictjson
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.process import addresses
from statehold.process.reception import check_own
from statehold.resilience.identity import among
from statehold.resilience.lost import GroupLostError
from statehold.resilience.meeting import CONNECT_S, meet
from statehold.resilience.state_bytes import Arriving, ByteRun, Offer, window

# -- the door --------------------------------------------------------------------------------------


_BACKLOG = 128
_SHARES, _SHARES_NOTHING = b"m", b"-"
_POLL_S = 0.01
# Between two attempts to let somebody in when this process has no descriptor left.
_AGAIN_S = 0.1


@dataclass(frozen=True, eq=False)
class DoorLine:
    """A connection. shared: memory of both sides, of bytes; None if they share none."""

    socket: socket.socket
    shared: Tensor | None = None


class Door:
    """host: the address of this machine for others. shared_bytes: for each line."""

    def __init__(self, host: str, shared_bytes: int, connected: Callable[[DoorLine], None]) -> None:
        self._shared_bytes = shared_bytes
        self._connected = connected
        self._closed = threading.Event()
        name = f"statehold-{secrets.token_hex(8)}"
        remote = addresses.listen(host)
        self.address = f"{addresses.joined(host, remote.getsockname()[1])}/{name}"
        near = socket.socket(socket.AF_UNIX)
        near.bind(f"\0{name}")
        near.listen(_BACKLOG)
        self._listeners = (remote, near)
        for each in self._listeners:
            threading.Thread(
                target=self._accept, args=(each,), name="statehold-door", daemon=True
            ).start()

    def close(self) -> None:
        self._closed.set()
        for each in self._listeners:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or there is no descriptor just now
                self._closed.wait(_AGAIN_S)
                continue
            with contextlib.suppress(OSError):  # the joiner has gone
                self._connected(self._line(connection))

    def _line(self, connection: socket.socket) -> DoorLine:
        if connection.family != socket.AF_UNIX:
            return DoorLine(connection)
        try:
            check_own(connection)
            with contextlib.suppress(OSError):  # there is no memory, or no descriptor
                return self._sharing(connection)
            connection.sendall(_SHARES_NOTHING)
        except OSError:
            connection.close()
            raise
        return DoorLine(connection)

    def _sharing(self, connection: socket.socket) -> DoorLine:
        memory = os.memfd_create("statehold-line", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, self._shared_bytes)
            shared = _mapped(memory)
            socket.send_fds(connection, [_SHARES], [memory])
        finally:
            os.close(memory)
        return DoorLine(connection, shared)


def connect(address: str, timeout_s: float, revoked: threading.Event) -> DoorLine:
    """A line to a Door. Raises OSError, also if `revoked` is set meanwhile."""
    remote, _, name = address.partition("/")
    # There is no such name on this host, or this process may not use it.
    with contextlib.suppress(ConnectionRefusedError, PermissionError):
        return _near(name, timeout_s, revoked)
    return DoorLine(socket.create_connection(addresses.split(remote), timeout_s))


def _near(name: str, timeout_s: float, revoked: threading.Event) -> DoorLine:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_POLL_S)
        connection.connect(f"\0{name}")
        check_own(connection)
        return DoorLine(connection, _shared(connection, timeout_s, revoked))
    except OSError:
        connection.close()
        raise


def _shared(connection: socket.socket, timeout_s: float, revoked: threading.Event) -> Tensor | None:
    """The memory that the holder sends. A holder that stands still sends nothing."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            said, memories, _, _ = socket.recv_fds(connection, 1, 1)
        except TimeoutError:
            if revoked.is_set() or time.monotonic() > deadline:
                raise
            continue
        if said == _SHARES_NOTHING:
            return None
        if not memories:
            raise ConnectionResetError("the holder of the state has gone")
        try:
            return _mapped(memories[0])
        finally:
            os.close(memories[0])


def _mapped(memory: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)


# -- the transfer ----------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
RANGE_BYTES = 4 << 20
LINES_MAX = 256
_REQUEST_MAX = 64
# A rank that sends or takes nothing for so long has died, whatever its connection says.
_SILENCE_S = 10.0
_SEND_TIMEOUT = struct.pack("ll", int(_SILENCE_S), 0)
_SUM_BYTES = 8
_LENGTH_BYTES = 8


class StateTransfer:
    """state: as save() and restore() take it. host: the address of this machine for others.

    width: how many ranks of torch's default group hold the state of a replica together.
    """

    def __init__(self, state: Mapping[str, Any], host: str, width: int = 1) -> None:
        self._state = state
        self._host = host
        self._among = among(width)
        self._server: _OfferServer | None = None

    def serve(
        self,
        desk: str,
        epoch: int,
        place: tuple[int, int],
        size: tuple[int, int],
        revoked: threading.Event,
    ) -> None:
        """Let the joiners of `epoch` have the state. Does not wait for them. Arguments: Groups."""
        if self._server is None:
            self._server = _OfferServer(self._host)
        self._server.offer(epoch, Offer(self._state, self._among))
        says = self._server.address

        def tell() -> None:
            with contextlib.suppress(GroupLostError):  # then nobody joins in this epoch
                meet(desk, _group(epoch, place), place[0], size[0], says, revoked)

        threading.Thread(target=tell, name="statehold-offer", daemon=True).start()

    def stop_serving(self) -> None:
        """The state may change from now on."""
        if self._server is not None:
            self._server.withdraw()

    def fetch(
        self,
        desk: str,
        epoch: int,
        place: tuple[int, int],
        size: tuple[int, int],
        revoked: threading.Event,
    ) -> None:
        """Take the state. After an error the live state has parts of both. Arguments: Groups."""
        self.stop_serving()  # what this rank held in an epoch that others may still be in
        says = meet(desk, _group(epoch, place), place[0], size[0], "", revoked)
        fetching = _Fetching(epoch, [each for each in says if each], revoked)
        fetching.run(lambda document: Arriving(self._state, document, self._among))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _group(epoch: int, place: tuple[int, int]) -> str:
    return f"{epoch}/state{place[1]}"


# -- the holder ------------------------------------------------------------------------------------


class _OfferServer:
    """Threads that serve the newest offer."""

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._offer: Offer | None = None
        self._connections: set[socket.socket] = set()
        self._door = Door(host, RANGE_BYTES, self._let_in)
        self.address = self._door.address

    def offer(self, epoch: int, offer: Offer) -> None:
        with self._lock:
            self._epoch, self._offer = epoch, offer

    def withdraw(self) -> None:
        with self._lock:  # no piece is being read
            self._end_offer()

    def close(self) -> None:
        """A piece that is being read then goes to nobody. A device that hangs may never give it."""
        self._end_offer()
        self._door.close()

    def _end_offer(self) -> None:
        self._offer = None
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _let_in(self, line: DoorLine) -> None:
        with self._lock:
            is_full = len(self._connections) >= LINES_MAX
            if not is_full:
                self._connections.add(line.socket)
        if is_full:
            line.socket.close()
            return
        threading.Thread(target=self._talk, args=(line,), daemon=True).start()

    def _talk(self, line: DoorLine) -> None:
        """Answer requests: the description of an epoch's state first, then ranges of it."""
        connection = line.socket
        try:
            with connection, connection.makefile("rb") as requests:
                connection.settimeout(_SILENCE_S)
                offer = self._find(strictjson.message(requests.readline(_REQUEST_MAX)))
                # For sending only: a joiner may need long to prepare a large state.
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
                connection.sendall(len(offer.document).to_bytes(_LENGTH_BYTES, "little"))
                connection.sendall(offer.document)
                memory = _memory(line)
                while request := requests.readline(_REQUEST_MAX):
                    first, last = _range(request, offer.run.nbytes)
                    for begin, end in _pieces(first, last):
                        piece = memory[begin - first : end - first]
                        self._send(line, offer, begin, piece, is_last=end == last)
        except (OSError, ValueError, GroupLostError):
            pass  # the joiner has gone, or the offer; the joiner asks somebody else
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _find(self, epoch: object) -> Offer:
        with self._lock:
            if self._offer is None or epoch != self._epoch:
                raise GroupLostError("the offer has ended")
            return self._offer

    def _send(
        self, line: DoorLine, offer: Offer, begin: int, piece: Tensor, *, is_last: bool
    ) -> None:
        """is_last: of its range. Then nothing has changed while the range was read."""
        with self._lock:
            if self._offer is not offer:
                raise GroupLostError("the offer has ended")
            offer.run.read(begin, piece)
            changed = offer.changed() if is_last else None
        if changed is not None:
            logger.error("statehold: no replica can join: %s changes inside a step", changed)
            raise GroupLostError("the offer has changed")
        line.socket.sendall(_checksum(piece).to_bytes(_SUM_BYTES, "little"))
        if line.shared is None:
            line.socket.sendall(window(piece))


def _range(request: bytes, nbytes: int) -> tuple[int, int]:
    """What a joiner asks for. ValueError: not a range of a state of so many bytes."""
    match strictjson.message(request):
        case [int(first), int(last)] if 0 <= first < last <= min(nbytes, first + RANGE_BYTES):
            return first, last
    raise ValueError("not a range of the state")


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((at, min(end, at + PIECE_BYTES)) for at in range(begin, end, PIECE_BYTES))


def _memory(line: DoorLine) -> Tensor:
    """For one range. A request for the next range says that the joiner has taken this one."""
    return (
        torch.empty(RANGE_BYTES, dtype=torch.uint8, device="cpu")
        if line.shared is None
        else line.shared
    )


def _checksum(piece: Tensor) -> int:
    return _core.hash_memory(piece.data_ptr(), piece.numel())


# -- the joiner ------------------------------------------------------------------------------------


class _Fetching:
    """One transfer to this rank: a thread for each holder."""

    def __init__(self, epoch: int, holders: list[str], revoked: threading.Event) -> None:
        self._epoch = epoch
        self._holders = holders
        self._revoked = revoked
        self._lines: dict[str, DoorLine] = {}
        self._left: deque[tuple[int, int]] = deque()
        self._missing = 0
        self._lock = threading.Lock()

    def run(self, arrive: Callable[[bytes], Arriving]) -> None:
        try:
            documents = self._connect()
            document = next(iter(documents.values()))
            try:
                arriving = arrive(document)
            except ValueError as error:
                raise self._lost(f"a holder describes no state: {error}") from error
            self._missing = arriving.run.nbytes
            self._left.extend(
                (at, min(self._missing, at + RANGE_BYTES))
                for at in range(0, self._missing, RANGE_BYTES)
            )
            alike = [holder for holder, found in documents.items() if found == document]
            if len(alike) < len(documents):
                others = ", ".join(sorted(documents.keys() - set(alike)))
                logger.warning("statehold: another state than %s has: %s", alike[0], others)
            self._pull_from(alike, arriving.run)
            if self._missing:
                raise self._lost("no holder of the state is left")
            arriving.finish()
        finally:
            self._hang_up()

    def _connect(self) -> dict[str, bytes]:
        """The descriptions of the state, by holder."""
        found = {}
        for holder in self._holders:
            with contextlib.suppress(OSError, GroupLostError):
                line = self._lines[holder] = connect(holder, CONNECT_S, self._revoked)
                connection = line.socket
                connection.settimeout(_POLL_S)
                connection.sendall(f"{self._epoch}\n".encode())
                length = int.from_bytes(self._receive(connection, _LENGTH_BYTES), "little")
                if length > DOCUMENT_BYTES_MAX:
                    raise self._lost("the description of its state is too long")
                found[holder] = bytes(self._receive(connection, length))
        if not found:
            raise self._lost("no holder of the state answers")
        return found

    def _pull_from(self, holders: list[str], run: ByteRun) -> None:
        threads = [
            threading.Thread(target=self._pull, args=(holder, run), daemon=True)
            for holder in holders
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def _pull(self, holder: str, run: ByteRun) -> None:
        """Take ranges from a holder until none is left, or until it fails."""
        line = self._lines[holder]
        memory = _memory(line)
        while self._missing:
            try:
                first, end = self._left.popleft()
            except IndexError:
                if self._revoked.wait(_POLL_S):  # somebody else may fail, and leave a range
                    return
                continue
            begin = first
            try:
                line.socket.sendall(f"[{first}, {end}]\n".encode())
                for at, until in _pieces(first, end):
                    self._place(line, run, at, memory[at - first : until - first])
                    begin = until
                    with self._lock:
                        self._missing -= until - at
            except (OSError, RuntimeError, GroupLostError) as error:  # of a device, too
                self._left.append((begin, end))
                if not self._revoked.is_set():
                    logger.warning("statehold: state from %s has failed: %s", holder, error)
                return

    def _place(self, line: DoorLine, run: ByteRun, begin: int, piece: Tensor) -> None:
        """piece: memory of the size of the piece that begins there."""
        expected = int.from_bytes(self._receive(line.socket, _SUM_BYTES), "little")
        if line.shared is None:
            self._receive_into(line.socket, window(piece))
        if _checksum(piece) != expected:
            raise self._lost(f"the bytes from {begin} on differ from their checksum")
        run.write(begin, piece)

    def _receive(self, connection: socket.socket, nbytes: int) -> bytearray:
        found = bytearray(nbytes)
        self._receive_into(connection, memoryview(found))
        return found

    def _receive_into(self, connection: socket.socket, into: memoryview) -> None:
        silent = 0.0
        while into:
            try:
                count = connection.recv_into(into)
            except TimeoutError:
                silent += _POLL_S
                if self._revoked.is_set() or silent > _SILENCE_S:
                    raise self._lost("the holder is silent") from None
                continue
            if not count:
                raise self._lost("the holder has gone")
            into, silent = into[count:], 0.0

    def _lost(self, why: str) -> GroupLostError:
        if self._revoked.is_set():
            why = "the epoch has ended"
        return GroupLostError(
            "the transfer of the state has failed", facts={"epoch": self._epoch, "reason": why}
        )

    def _hang_up(self) -> None:
        for each in self._lines.values():
            with contextlib.suppress(OSError):
                each.socket.shutdown(socket.SHUT_RDWR)  # a forked process may have a copy
            each.socket.close()
