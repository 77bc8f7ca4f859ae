"""Transfer: a joiner takes the state of a step's beginning from all live replicas at once (R11).

    transfer.serve(where)       a holder, at the beginning of the step
    transfer.stop_serving()     a holder, before its optimizer steps
    transfer.fetch(where)       a joiner; raises GroupLostError

Invariants: the holders copy nothing in advance. A joiner takes part in the reduction of the step,
so no holder can commit it, and change its state, before every joiner has everything or has been
left out. A state that changes nevertheless, in a forward pass, is not given to anybody. A piece is
placed only after its checksum has been verified.

Not here: what the bytes mean (state_bytes), who holds the state and who joins (protocol), who is
let in (net/reception).
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from statehold import _core
from statehold.encoding import strictjson
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.net import addresses
from statehold.net.reception import Guest, Reception
from statehold.net.secret import of_job
from statehold.net.wire import Wire, check_own, connect, entered
from statehold.process.worker import Flag
from statehold.resilience.identity import among
from statehold.resilience.meeting import CONNECT_S, MeetingPlace
from statehold.resilience.protocol.actions import GroupLostError
from statehold.resilience.state_bytes import Arriving, ByteRun, Offer
from statehold.tensors.devices.elements import host_memory

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
RANGE_BYTES = 4 << 20
LINES_MAX = 256
_DOOR = "state"
_REQUEST_MAX = 64
# A rank that takes longer for a piece has died, whatever its connection says.
_SILENCE_S = 10.0
_SUM_BYTES = 8
_POLL_S = 0.01
_BACKLOG = 128
_SHARES, _SHARES_NOTHING = b"m", b"-"


class StateTransfer:
    """state: as save() and restore() take it. host: the address of this machine for others.

    width: how many ranks of torch's default group hold the state of a replica together.
    server: gives the state to others; the first serve() makes it.
    """

    def __init__(self, state: Mapping[str, Any], host: str, width: int = 1) -> None:
        self._state = state
        self._host = host
        self._among = among(width)
        self.server: OfferServer | None = None

    def serve(self, where: MeetingPlace) -> None:
        """Let the joiners of the epoch have the state. Does not wait for them."""
        if self.server is None:
            self.server = OfferServer(self._host)
        self.server.offer(where.epoch, Offer(self._state, self._among))
        says = self.server.address

        def tell() -> None:
            with contextlib.suppress(GroupLostError):  # then nobody joins in this epoch
                _meet(where, says)

        threading.Thread(target=tell, name="statehold-offer", daemon=True).start()

    def stop_serving(self) -> None:
        """The state may change from now on."""
        if self.server is not None:
            self.server.withdraw()

    def fetch(self, where: MeetingPlace) -> None:
        """Take the state. After an error the live state has parts of both."""
        self.stop_serving()  # what this rank held in an epoch that others may still be in
        holders = [each for each in _meet(where, "") if each]
        fetching = _Fetching(where.epoch, holders, where.revoked)
        fetching.run(lambda document: Arriving(self._state, document, self._among))

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def _meet(where: MeetingPlace, says: str) -> list[str]:
    """What this place of each replica says."""
    (replica, place), (replicas, _) = where.place, where.size
    return where.meet(f"state{place}", replica, replicas, says)


# -- the holder ------------------------------------------------------------------------------------
# A piece is read while the state cannot change, under the lock that `stop_serving` takes. A joiner
# that asks for something else than a range of the state loses its line. At most LINES_MAX lines are
# served at once, because each takes memory for a range. The others wait for their turns: until the
# epoch ends, or their connection. Joiners ask holders in one order, so no two wait for each other.
#
# A joiner on the same host comes through a Unix socket, and gets memory that both share. The kernel
# then copies no bytes of the state: that costs a third of what TCP costs. Elsewhere, as in a
# container with a network of its own, the line is a TCP connection and shares nothing. If the
# holder gets no memory, the line is the Unix socket alone. Nothing is left in a directory: the
# socket's name is in Linux's abstract namespace, and the memory has none. It is freed when both
# sides have dropped the line.


class OfferServer:
    """Threads that serve the newest offer."""

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._offer: tuple[int, Offer] | None = None  # of an epoch
        secret = of_job()
        name = f"statehold-{secrets.token_hex(8)}"
        far, near = addresses.listen(host), socket.socket(socket.AF_UNIX)
        near.bind(f"\0{name}")
        near.listen(_BACKLOG)
        self.address = f"{addresses.joined(host, far.getsockname()[1])}/{name}"
        self._turns = threading.Semaphore(LINES_MAX)
        self._reception = Reception([far, near], _DOOR, secret, frame_max=_REQUEST_MAX)
        self._reception.start("statehold-offers", self._hear)

    def offer(self, epoch: int, offer: Offer) -> None:
        with self._lock:
            self._offer = epoch, offer

    def withdraw(self) -> None:
        with self._lock:  # no piece is being read
            self._offer = None
        self._reception.hang_up()

    def close(self) -> None:
        """A piece that is being read then goes to nobody. A device that hangs may never give it."""
        self._offer = None
        self._reception.close()

    def _hear(self, guest: Guest, epoch: bytes) -> None:
        """A joiner names its epoch, and has a thread from then on."""
        offer = self._find(strictjson.message(epoch))
        threading.Thread(None, self._line, "statehold-line", (guest, offer), daemon=True).start()
        self._reception.lend(guest)  # last: a guest for whom there is no thread has to go

    def _line(self, guest: Guest, offer: Offer) -> None:
        with self._turns:
            self._talk(guest, offer)

    def _talk(self, guest: Guest, offer: Offer) -> None:
        """Send the description of the state first, then the ranges of it that are asked for."""
        wire = guest.wire
        try:
            shared = _shared_with(wire.socket)
            wire.send(offer.document, time.monotonic() + _SILENCE_S)
            memory = _memory(shared)
            while True:  # a joiner may need long to prepare a large state
                first, last = _range(wire.receive(math.inf), offer.run.nbytes)
                for begin, end in _pieces(first, last, PIECE_BYTES):
                    piece = memory[begin - first : end - first]
                    self._read(offer, begin, piece, is_last=end == last)
                    self._send(wire, piece, is_shared=shared is not None)
        except (OSError, ValueError, GroupLostError):
            pass  # the joiner has gone, or the offer; the joiner asks somebody else
        finally:
            wire.close()
            self._reception.returned(guest)

    def _find(self, epoch: object) -> Offer:
        offered = self._offer  # without the lock: a device that hangs may hold it
        if offered is None or epoch != offered[0]:
            raise GroupLostError("the offer has ended")
        return offered[1]

    def _read(self, offer: Offer, begin: int, piece: Tensor, *, is_last: bool) -> None:
        """is_last: of its range. Then nothing has changed while the range was read."""
        with self._lock:
            if self._offer is None or self._offer[1] is not offer:
                raise GroupLostError("the offer has ended")
            offer.run.read(begin, piece)
            changed = offer.changed() if is_last else None
        if changed is not None:
            logger.error("statehold: no replica can join: %s changes inside a step", changed)
            raise GroupLostError("the offer has changed")

    def _send(self, wire: Wire, piece: Tensor, *, is_shared: bool) -> None:
        until = time.monotonic() + _SILENCE_S
        wire.pour(sum_of(piece), until)
        if not is_shared:
            wire.pour(host_memory(piece), until)


def _range(request: bytes, nbytes: int) -> tuple[int, int]:
    """What a joiner asks for. ValueError: not a range of a state of so many bytes."""
    match strictjson.message(request):
        case [int(first), int(last)] if 0 <= first < last <= min(nbytes, first + RANGE_BYTES):
            return first, last
    raise ValueError("not a range of the state")


def _pieces(begin: int, end: int, nbytes: int) -> Iterator[tuple[int, int]]:
    return ((at, min(end, at + nbytes)) for at in range(begin, end, nbytes))


def _memory(shared: Tensor | None) -> Tensor:
    """For one range. A request for the next range says that the joiner has taken this one."""
    if shared is not None:
        return shared
    return torch.empty(RANGE_BYTES, dtype=torch.uint8, device="cpu")


def _shared_with(guest: socket.socket) -> Tensor | None:
    """Memory for one range that a joiner on this host has, too; None if there is none."""
    if guest.family != socket.AF_UNIX:
        return None
    with contextlib.suppress(OSError):  # there is no memory, or no descriptor
        memory = os.memfd_create("statehold-line", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, RANGE_BYTES)
            shared = _mapped(memory)
            socket.send_fds(guest, [_SHARES], [memory])
            return shared
        finally:
            os.close(memory)
    guest.send(_SHARES_NOTHING)
    return None


def _mapped(memory: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)


def sum_of(piece: Tensor) -> bytes:
    return _core.hash_memory(piece.data_ptr(), piece.numel()).to_bytes(_SUM_BYTES, "little")


# -- the joiner ------------------------------------------------------------------------------------
# A joiner asks each holder for one range after another, so a fast holder serves more. The range of
# a holder that dies, or sends a wrong byte, comes from another one. The bytes go through lines of
# their own: a process group would fail as a whole, and cannot be given up piece by piece.


class _Fetching:
    """One transfer to this rank: a thread for each holder."""

    def __init__(self, epoch: int, holders: list[str], revoked: Flag) -> None:
        self._epoch = epoch
        self._holders = holders
        self._revoked = revoked
        self._lines: dict[str, tuple[Wire, Tensor | None]] = {}
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
            self._left.extend(_pieces(0, self._missing, RANGE_BYTES))
            alike = [holder for holder, found in documents.items() if found == document]
            if len(alike) < len(documents):
                others = ", ".join(sorted(documents.keys() - set(alike)))
                logger.warning("statehold: another state than %s has: %s", alike[0], others)
            self._pull_from(alike, arriving.run)
            if self._missing:
                raise self._lost("no holder of the state is left")
            arriving.finish()
        finally:
            for wire, _ in self._lines.values():
                wire.hang_up()
                wire.close()

    def _connect(self) -> dict[str, bytes]:
        """The descriptions of the state, by holder."""
        found = {}
        for holder in self._holders:
            with contextlib.suppress(OSError):
                until = time.monotonic() + CONNECT_S
                wire, shared = join(holder, self._epoch, until, self._revoked)
                self._lines[holder] = wire, shared
                wire.frame_max = DOCUMENT_BYTES_MAX
                found[holder] = wire.receive(math.inf)  # others may be served before
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
        wire, shared = self._lines[holder]
        memory = _memory(shared)
        while self._missing:
            try:
                first, end = self._left.popleft()
            except IndexError:
                if self._revoked.wait(_POLL_S):  # somebody else may fail, and leave a range
                    return
                continue
            begin = first
            try:
                wire.send(f"[{first}, {end}]".encode(), time.monotonic() + _SILENCE_S)
                for at, until in _pieces(first, end, PIECE_BYTES):
                    piece = memory[at - first : until - first]
                    patient = time.monotonic() + _SILENCE_S
                    expected = wire.read(_SUM_BYTES, patient)
                    if shared is None:
                        wire.fill(host_memory(piece), patient)
                    if sum_of(piece) != expected:
                        raise self._lost(f"the bytes from {at} on differ from their checksum")
                    run.write(at, piece)
                    begin = until
                    with self._lock:
                        self._missing -= until - at
            except (OSError, RuntimeError, GroupLostError) as error:  # of a device, too
                self._left.append((begin, end))
                if not self._revoked.is_set:
                    logger.warning("statehold: state from %s has failed: %s", holder, error)
                return

    def _lost(self, why: str) -> GroupLostError:
        if self._revoked.is_set:
            why = "the epoch has ended"
        return GroupLostError(
            "the transfer of the state has failed", facts={"epoch": self._epoch, "reason": why}
        )


def join(address: str, epoch: int, until: float, revoked: Flag) -> tuple[Wire, Tensor | None]:
    """A line to a holder, and the memory that both share. Raises OSError.

    until: for the connection. The end of a host that vanishes is noticed on the line itself.
    """
    far, _, name = address.partition("/")
    wire = _near(name, until, revoked) or connect(
        addresses.split(far), _DOOR, of_job(), until, revoked
    )
    try:
        wire.send(str(epoch).encode(), until)
        if wire.socket.family == socket.AF_UNIX:
            return wire, _shared(wire)
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(_SILENCE_S))
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        return wire, None
    except OSError:
        wire.close()
        raise


def _near(name: str, until: float, revoked: Flag) -> Wire | None:
    """None: there is no such name on this host, or this process may not use it."""
    near = socket.socket(socket.AF_UNIX)
    near.settimeout(max(0.001, until - time.monotonic()))
    try:
        near.connect(f"\0{name}")
        check_own(near)
    except OSError as error:
        near.close()
        if isinstance(error, ConnectionRefusedError | PermissionError):
            return None
        raise
    return entered(near, _DOOR, of_job(), until, revoked)


def _shared(wire: Wire) -> Tensor | None:
    """The memory that the holder sends. It may serve others before."""
    wire.wait(select.POLLIN, math.inf)
    said, memories, _, _ = socket.recv_fds(wire.socket, 1, 1)
    if said == _SHARES_NOTHING:
        return None
    if not memories:
        raise ConnectionResetError("the holder of the state has gone")
    try:
        return _mapped(memories[0])
    finally:
        os.close(memories[0])
