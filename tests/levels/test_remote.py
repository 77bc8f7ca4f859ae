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
from statehold.checkpoint.levels.hosts.serving import FileServer
from statehold.errors import StateholdError, StorageError, TruncatedFileError, UnavailableError
from support.faults import DEADLINE_S

STEP = "step-000000000001"
NAME = f"{STEP}/rank-00000-of-00001.safetensors"
SECRET = "s3cr3t"
SHORT_S = 0.4  # only for hosts that never answer: others have all the time of a busy machine
Answer = Callable[[socket.socket], None]


@contextlib.contextmanager
def host_that(answer: Answer, deadline_s: float = DEADLINE_S) -> Iterator[RemoteFiles]:
    """A host that answers every connection with `answer`, and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def converse(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(DEADLINE_S)
            connection.recv(1 << 16)
            answer(connection)
            if answer is stalls or answer is dribbles:
                over.wait(DEADLINE_S)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=converse, args=[listener.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    files = RemoteFiles(address, SECRET, "memory", deadline_s=deadline_s)
    try:
        yield files
    finally:
        over.set()
        files.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def says(text: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(text)

    return answer


def range_of(body: bytes, said: str = "bytes 0-9/10", length: int = 10) -> Answer:
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\nContent-Range: {said}\r\n"
    return says(head.encode() + b"\r\n" + body)


def stalls(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\n")


def dribbles(connection: socket.socket) -> None:
    """Never silent for as long as the deadline is, and never done."""
    for byte in b"HTTP/1.1 206 Partial Content\r\n" + b"X" * 1000:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def floods(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * (1 << 16))


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
        says(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
        says(b"\r\n\r\n"),
        says(b"\xff" * 100 + b"\r\n\r\n"),
        says(b"HTTP/1.0 206 OK\r\nContent-Length: 10\r\n\r\n0123456789"),
        says(b"HTTP/1.1\r\n\r\n"),
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"),
        says(b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n"),
        says(b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/10\r\n\r\n0123456789"),
        range_of(b"0123456789", "bytes 1-10/11"),
        range_of(b"0123456789", "bytes 0-8/10"),
        range_of(b"01234567890", "bytes 0-10/11", length=11),
        range_of(b"0123456789", "bytes */10"),
        range_of(b"0123456789", "what"),
        range_of(b"0123456789", length=9),
        range_of(b"0123456789", length=-1),
        floods,
    ],
)
def test_an_answer_that_is_none_is_refused(answer) -> None:
    with host_that(answer) as files:
        error = failure(files)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EPROTO
    assert error.path == f"{files.url}/{NAME}"


@pytest.mark.parametrize("answer", [says(b""), says(b"HTTP/1.1 206 P"), range_of(b"01234")])
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
    ("status", "number", "kind"),
    [
        (403, errno.EACCES, StorageError),
        (404, errno.ENOENT, StorageError),
        (416, 0, TruncatedFileError),
        (503, errno.EIO, UnavailableError),
    ],
)
def test_a_refusal_has_its_name(status, number, kind) -> None:
    with host_that(says(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())) as files:
        error = failure(files)
    assert type(error) is kind
    assert getattr(error, "errno", 0) == number


def test_more_than_was_asked_for_spoils_nothing() -> None:
    """The rest would be the next answer, if the connection were kept."""
    memory = bytearray(10)
    with host_that(range_of(b"0123456789HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")) as files:
        for _ in range(3):
            files.fetch(NAME, [(0, memoryview(memory))])
            assert memory == b"0123456789"


def test_a_document_that_is_too_large_is_not_read() -> None:
    with host_that(says(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n")) as files:
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
    assert len(server._wires) == 1
    with server._guard:
        kept = list(server._wires)
    for wire in kept:
        wire.hang_up()
    files.fetch(NAME, [(0, memoryview(memory))])
    files.close()


def kept(files: RemoteFiles) -> socket.socket:
    """The other end of a connection that is kept from before."""
    mine, other = socket.socketpair()
    wire = remote.Wire.__new__(remote.Wire)
    wire._socket, wire._ahead = mine, b""
    files._idle.append(wire)
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
        other.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
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
