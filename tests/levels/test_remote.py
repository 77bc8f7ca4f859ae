"""A host answers wrongly, late or not at all: its readers get an error in time."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from statehold.checkpoint.levels.hosts import remote
from statehold.checkpoint.levels.hosts.remote import RemoteFiles
from statehold.checkpoint.levels.hosts.serving import DOOR, FileServer
from statehold.errors import StateholdError, StorageError, TruncatedFileError, UnavailableError
from statehold.net.reception import Guest, Reception
from statehold.net.secret import MAGIC, NONCE_BYTES, PROOF_BYTES, of_job
from statehold.net.wire import Wire
from support.faults import DEADLINE_S

STEP = "step-000000000001"
NAME = f"{STEP}/rank-00000-of-00001.safetensors"
SECRET = "s3cr3t"
SHORT_S = 0.4  # only for hosts that never answer: others have all the time of a busy machine
Answer = Callable[[Wire], None]


@contextlib.contextmanager
def host_that(answer: Answer, deadline_s: float = DEADLINE_S) -> Iterator[RemoteFiles]:
    """A host that knows the secret, answers each first request with `answer`, and hangs up."""
    over = threading.Event()

    def converse(guest: Guest) -> None:
        with contextlib.suppress(OSError):
            answer(guest.wire)
            if answer in (stalls, dribbles):
                over.wait(DEADLINE_S)
        guest.wire.close()
        host.returned(guest)

    def hear(guest: Guest, request: bytes) -> None:
        host.lend(guest)
        threading.Thread(target=converse, args=[guest], daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    host = Reception([listener], DOOR, of_job(SECRET))
    host.start("host", hear)
    files = RemoteFiles(address, SECRET, "memory", deadline_s=deadline_s)
    try:
        yield files
    finally:
        over.set()
        files.close()
        host.close()


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def says(*frames: bytes, body: bytes = b"") -> Answer:
    def answer(wire: Wire) -> None:
        for each in frames:
            wire.send(each, soon())
        wire.pour(body, soon())

    return answer


def range_of(body: bytes, said: str = "[0, 10, 10]") -> Answer:
    return says(said.encode(), body=body)


def stalls(wire: Wire) -> None:
    wire.pour(b"\0\0", soon())


def dribbles(wire: Wire) -> None:
    """Never silent for as long as the deadline is, and never done."""
    wire.send(b"[0, 10, 10]", soon())
    for byte in b"123456789":
        wire.pour(bytes([byte]), soon())
        time.sleep(0.1)


def floods(wire: Wire) -> None:
    while True:
        wire.pour(b"x" * (1 << 16), soon())


def failure(files: RemoteFiles) -> StateholdError:
    """What reading ten bytes raises; it has to do so in time."""
    memory = bytearray(10)
    begin = time.monotonic()
    with pytest.raises(StateholdError) as caught:
        files.open_read(NAME).read_into(memoryview(memory), 0)
    taken_s = time.monotonic() - begin
    assert taken_s < DEADLINE_S  # a loaded machine is late, but not so late
    assert SECRET not in f"{caught.value!s}{caught.value!r}{files!r}"
    return caught.value


def test_an_honest_answer_is_understood() -> None:
    memory = bytearray(10)
    with host_that(range_of(b"0123456789")) as files:
        files.fetch(NAME, [(0, memoryview(memory))])
    assert memory == b"0123456789"


@pytest.mark.parametrize(
    "answer",
    [
        says(b""),
        says(b"[]"),
        says(b"{}"),
        says(b"[" * 900),
        says(b"\xff" * 100),
        says(b"x" * 2000),
        says(b'["gone", 0]'),
        says(b'["absent", "0"]'),
        range_of(b"0123456789", "[1, 10, 10]"),
        range_of(b"0123456789", "[0, 9, 10]"),
        range_of(b"0123456789", "[0, 11, 11]"),
        range_of(b"0123456789", "[0, 10, 9]"),
        range_of(b"0123456789", "[-1, 10, 10]"),
        range_of(b"0123456789", "[0, 10.0, 10]"),
        range_of(b"0123456789", "[0, 10]"),
        floods,
    ],
)
def test_an_answer_that_is_none_is_refused(answer) -> None:
    with host_that(answer) as files:
        error = failure(files)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EPROTO
    assert error.path == f"{files.url}/{NAME}"


@pytest.mark.parametrize(
    "greeting", [b"SSH-2.0-OpenSSH_9.2\r\n" + b"x" * 100, b"\0" * 100], ids=["ssh", "zeros"]
)
def test_what_is_no_host_of_a_job_is_refused(greeting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(greeting)
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        error = failure(RemoteFiles(address, SECRET, "memory", deadline_s=DEADLINE_S))
    assert isinstance(error, StorageError)
    assert error.errno == errno.EPROTO


def test_a_host_of_another_job_is_refused_and_gets_no_request() -> None:
    """It answers the handshake, and proves something else than the secret."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(MAGIC + bytes(NONCE_BYTES))
                said.append(connection.recv(1 << 10))
                connection.sendall(bytes(range(PROOF_BYTES)))
                said.append(connection.recv(1 << 10))

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        error = failure(RemoteFiles(address, SECRET, "memory", deadline_s=DEADLINE_S))
        answering.join(DEADLINE_S)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EACCES
    assert [len(each) for each in said] == [NONCE_BYTES + PROOF_BYTES, 0]
    assert SECRET.encode() not in said[0]


@pytest.mark.parametrize("answer", [says(), says(body=b"\0"), range_of(b"01234")])
def test_a_host_that_hangs_up_is_unavailable(answer) -> None:
    with host_that(answer) as files:
        error = failure(files)
    assert isinstance(error, UnavailableError)
    assert error.errno == errno.ECONNRESET


@pytest.mark.parametrize("answer", [stalls, dribbles])
def test_a_host_that_stalls_is_unavailable_in_time(answer) -> None:
    with host_that(answer, SHORT_S) as files:
        error = failure(files)
    assert isinstance(error, UnavailableError)
    assert error.errno == errno.ETIMEDOUT


def test_nobody_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = failure(RemoteFiles(f"127.0.0.1:{port}", SECRET, "memory", deadline_s=DEADLINE_S))
    assert isinstance(error, UnavailableError)
    assert error.errno == errno.ECONNREFUSED


@pytest.mark.parametrize(
    ("reason", "number", "kind"),
    [
        ("absent", errno.ENOENT, StorageError),
        ("ends", 0, TruncatedFileError),
        ("unreadable", errno.EIO, UnavailableError),
    ],
)
def test_a_refusal_has_its_name(reason, number, kind) -> None:
    with host_that(says(f'["{reason}", 5]'.encode())) as files:
        error = failure(files)
    assert type(error) is kind
    assert getattr(error, "errno", 0) == number


def test_more_than_was_asked_for_spoils_nothing() -> None:
    """The rest would be the next answer, if the connection were kept."""
    memory = bytearray(10)
    with host_that(range_of(b'0123456789\0\0\0\x0d["absent", 0]')) as files:
        for _ in range(3):
            files.fetch(NAME, [(0, memoryview(memory))])
            assert memory == b"0123456789"


def test_a_document_that_is_too_large_is_not_read() -> None:
    with host_that(says(b"[0, 999999999999, 999999999999]")) as files:
        with pytest.raises(StorageError) as caught:
            files.read_file(f"{STEP}/manifest.json", 1000)
        assert caught.value.errno == errno.EFBIG


@pytest.fixture
def server(tmp_path) -> Iterator[FileServer]:
    (tmp_path / STEP).mkdir()
    (tmp_path / NAME).write_bytes(random.Random(0).randbytes(3 << 20))
    server = FileServer({"memory": str(tmp_path)}, "127.0.0.1")
    server.start()
    server.let_in(SECRET)
    yield server
    server.close()


def files_of(server: FileServer) -> RemoteFiles:
    return RemoteFiles(server.address, SECRET, "memory", deadline_s=DEADLINE_S)


def test_a_large_read_comes_in_parts_at_once(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 100_000)
    memory = bytearray((3 << 20) - 5)
    files = files_of(server)
    files.fetch(NAME, [(5, memoryview(memory))])
    assert memory == (tmp_path / NAME).read_bytes()[5:]
    with pytest.raises(TruncatedFileError):
        files.fetch(NAME, [(6, memoryview(memory))])
    files.close()


def test_connections_are_kept_and_made_again(server) -> None:
    files = files_of(server)
    memory = bytearray(100)
    for _ in range(20):
        files.fetch(NAME, [(0, memoryview(memory))])
        with pytest.raises(StorageError):
            files.read_file(f"{STEP}/nothing", 100)
    (kept_one,) = files.idle
    kept_one.hang_up()
    files.fetch(NAME, [(0, memoryview(memory))])
    files.close()


def kept(files: RemoteFiles) -> socket.socket:
    """The other end of a connection that is kept from before."""
    mine, other = socket.socketpair()
    files.idle.append(Wire(mine))
    return other


def test_a_connection_that_breaks_is_made_once_more(server, tmp_path) -> None:
    """Also one that was lost without a sign: the request goes out, and no answer comes."""
    files = files_of(server)
    other = kept(files)
    threading.Thread(target=lambda: (other.recv(1 << 16), other.close())).start()
    memory = bytearray(100)
    files.fetch(NAME, [(0, memoryview(memory))])
    assert memory == (tmp_path / NAME).read_bytes()[:100]
    files.close()


def test_a_connection_on_which_something_came_is_not_used(server, tmp_path) -> None:
    files = files_of(server)
    memory = bytearray(100)
    with kept(files) as other:
        other.sendall(b'\0\0\0\x0d["absent", 0]')
        files.fetch(NAME, [(0, memoryview(memory))])
    assert memory == (tmp_path / NAME).read_bytes()[:100]
    files.close()


def test_a_fork_uses_connections_of_its_own(server, tmp_path) -> None:
    files = files_of(server)
    content = (tmp_path / NAME).read_bytes()

    def reads(begin: int) -> bool:
        memory = bytearray(100)
        for _ in range(20):
            files.fetch(NAME, [(begin, memoryview(memory))])
            if memory != content[begin : begin + 100]:
                return False
        return True

    assert reads(0)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if all(reads(100) for _ in range(10)) else 1)
        os._exit(1)
    mine, ended = True, 0
    while not ended:  # both at once
        mine = mine and reads(200)
        ended, status = os.waitpid(child, os.WNOHANG)
    assert os.waitstatus_to_exitcode(status) == 0
    assert mine
    files.close()
