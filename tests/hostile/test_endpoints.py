"""Every port of a job under messages of strangers, and of peers that say something wrong.

Each endpoint hears some messages here, and 20,000 in `make campaigns`
(STATEHOLD_ENDPOINT_MESSAGES=20000). After them it serves as before, and has kept nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fuzz.mutate import mutate
from resilience.control.peers import HELLO, meeting
from statehold import metrics
from statehold.checkpoint.levels.hosts.remote import RemoteFiles
from statehold.checkpoint.levels.hosts.serving import FileServer
from statehold.net import addresses
from statehold.net.secret import GREETING_BYTES, REPLY_BYTES, Secret, of_job
from statehold.net.wire import Wire, entered
from statehold.process.worker import Flag
from statehold.resilience import transfer
from statehold.resilience.meeting import Desk, meet
from statehold.resilience.protocol.messages import (
    Beat,
    Complaint,
    GivesUp,
    Leave,
    Promise,
    Refused,
    View,
    decode,
    encode,
)
from statehold.resilience.state_bytes import Offer
from statehold.resilience.transfer import OfferServer
from support.seeds import SEED

MESSAGES = int(os.environ.get("STATEHOLD_ENDPOINT_MESSAGES", "500"))
DEADLINE_S = 60.0
HOST, STEP = "127.0.0.1", "step-000000000001"


@dataclass(frozen=True)
class Endpoint:
    """door: None of one that speaks HTTP. says: what its peers say. serves: whether it still does.

    first: what a peer has to say before the rest. unix: a name in the abstract namespace.
    """

    address: tuple[str, int]
    door: str | None
    secret: Secret
    says: list[bytes]
    serves: Callable[[], bool]
    first: bytes = b""
    unix: str = ""

    def connected(self, draw: random.Random) -> socket.socket:
        if self.unix and draw.random() < 0.5:
            near = socket.socket(socket.AF_UNIX)
            near.settimeout(DEADLINE_S)
            near.connect(f"\0{self.unix}")
            return near
        return socket.create_connection(self.address, DEADLINE_S)


def soon() -> float:
    return time.monotonic() + DEADLINE_S


@contextlib.contextmanager
def coordinator(folder: Path) -> Iterator[Endpoint]:
    view = View(0, voted=True, share=(0, 1), digest="same", stack=((2,), (3,)))
    with meeting("a") as (office, _):
        found = Endpoint(
            (HOST, office.port),
            "coordinator",
            of_job(),
            [
                encode(each)
                for each in (HELLO, Beat(3, {"0.1": 7}), Promise(2, view), Complaint(1, "why"))
            ]
            + [encode(Leave(view)), encode(GivesUp(1))],
            lambda: isinstance(refused(found), Refused),
            encode(HELLO),
        )
        yield found
        assert list(office.coordinator.members) == ["a"]


def refused(endpoint: Endpoint) -> object:
    """What the coordinator answers to a replica of another job."""
    wire = entered(
        socket.create_connection(endpoint.address), "coordinator", endpoint.secret, soon()
    )
    with contextlib.closing(wire):
        wire.send(encode(HELLO).replace(b'"1"', b'"2"'), soon())
        return decode(wire.receive(soon()))


@contextlib.contextmanager
def desk(folder: Path) -> Iterator[Endpoint]:
    desk = Desk(HOST)
    says = [b'["1/column0", 0, 2, "here"]', b'["1/column0", 1, 2, "there"]', b'["1/x", 0, 1, ""]']
    yield Endpoint(
        addresses.split(desk.address),
        "desk",
        of_job(),
        says,
        lambda: meet(desk.address, "9/g", 0, 1, "alone", Flag()) == ["alone"],
    )
    desk.close()


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[Endpoint]:
    server = OfferServer(HOST)
    server.offer(3, Offer({"model": torch.nn.Linear(4, 4)}))

    def serves() -> bool:
        wire, _ = transfer.join(server.address, 3, soon(), Flag())
        with contextlib.closing(wire):
            return b"model" in wire.receive(soon())

    far, _, near = server.address.partition("/")
    yield Endpoint(addresses.split(far), "state", of_job(), [b"3", b"[0, 16]"], serves, b"3", near)
    server.close()


@contextlib.contextmanager
def files(folder: Path) -> Iterator[Endpoint]:
    (folder / STEP).mkdir()
    (folder / STEP / "manifest.json").write_text("{}")
    server = FileServer({"memory": str(folder)}, HOST)
    server.start()
    server.let_in("5ec4e7")

    def serves() -> bool:
        found = RemoteFiles(server.address, "5ec4e7", "memory", deadline_s=DEADLINE_S)
        with contextlib.closing(found):
            return found.read_file(f"{STEP}/manifest.json", 100) == b"{}"

    path = f"memory/{STEP}/manifest.json"
    says = [json.dumps(each).encode() for each in ([path, 0, None], [path, 0, 2], [path, 1, 9])]
    yield Endpoint(addresses.split(server.address), "files", of_job("5ec4e7"), says, serves)
    server.close()


@contextlib.contextmanager
def figures(folder: Path) -> Iterator[Endpoint]:
    with metrics.serve(0) as endpoint:
        address = (HOST, endpoint.port)
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"

        def serves() -> bool:
            with socket.create_connection(address, DEADLINE_S) as client:
                client.sendall(request)
                return client.recv(15) == b"HTTP/1.1 200 OK"

        yield Endpoint(address, None, Secret(""), [request], serves)


def outcome(endpoint: Endpoint, seed: int) -> int:
    """How many bytes are answered to one message, which the endpoint has heard to its end."""
    draw = random.Random(seed)
    said = draw.choice(endpoint.says)
    if draw.random() < 0.8:
        said = mutate(said, seed)
    with endpoint.connected(draw) as connected:
        try:
            if endpoint.door is None:
                connected.sendall(said)
            elif draw.random() < 0.3:
                before_it_is_let_in(endpoint, connected, draw)
            else:
                wire = entered(connected, endpoint.door, endpoint.secret, soon())
                if endpoint.first and draw.random() < 0.5:
                    wire.send(endpoint.first, soon())
                length = len(said) if draw.random() < 0.9 else draw.randrange(1 << 32)
                wire.pour(struct.pack(">I", length) + said, soon())
            connected.settimeout(DEADLINE_S)
            connected.shutdown(socket.SHUT_WR)
            return answered(connected)
        except (BrokenPipeError, ConnectionResetError):
            return 0


def before_it_is_let_in(endpoint: Endpoint, connected: socket.socket, draw: random.Random) -> None:
    """Say something else than a guest, or almost the same."""
    assert endpoint.door is not None
    greeting = Wire(connected).read(GREETING_BYTES, soon())
    connected.settimeout(DEADLINE_S)
    reply = bytearray(endpoint.secret.reply(endpoint.door, greeting)[0])
    reply[draw.randrange(REPLY_BYTES)] ^= 1 << draw.randrange(8)
    garbage = draw.randbytes(draw.choice((0, 1, REPLY_BYTES, 5000)))
    connected.sendall(draw.choice((bytes(reply), garbage)) + draw.choice(endpoint.says))


def answered(connected: socket.socket) -> int:
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while found := connected.recv(1 << 16):
            count += len(found)
    return count


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [coordinator, desk, holder, files, figures])
def test_an_endpoint_outlives_what_is_sent_to_it(
    kind: Callable[[Path], contextlib.AbstractContextManager[Endpoint]], tmp_path: Path
) -> None:
    """A thread that ends with an error fails every test: tests/support/limits.py."""
    print(f"STATEHOLD_SEED={SEED}")
    with kind(tmp_path) as endpoint:
        assert endpoint.serves()
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        counts = [outcome(endpoint, SEED * 1_000_003 + each) for each in range(MESSAGES)]
        assert endpoint.serves()
        settle(threads, files)
        assert 0 in counts
        assert any(counts)


def settle(threads: int, files: int) -> None:
    """Wait until no more threads and descriptors are left than before."""
    until = time.monotonic() + DEADLINE_S
    while threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > files:
        assert time.monotonic() < until, "something was kept"
        time.sleep(0.01)
