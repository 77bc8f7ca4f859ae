"""Files of one host, served to another: whoever asks, and however, gets those of committed steps
and nothing else; nobody holds the server up."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from statehold.checkpoint.levels.hosts import serving
from statehold.checkpoint.levels.hosts.remote import RemoteFiles
from statehold.checkpoint.levels.hosts.serving import FileServer
from statehold.errors import UsageError
from support.faults import DEADLINE_S, must

STEP = "step-000000000001"
DATA = f"{STEP}/rank-00000-of-00001.safetensors"
CONTENT = bytes(range(256)) * 4096
SECRET = "5ec4e7" * 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a step, and with all sorts of things that are none of others' business."""
    root = tmp_path / "memory"
    for name in (STEP, "step-000000000002.partial", "step-000000000003.retired", ".spare"):
        (root / name).mkdir(parents=True)
        (root / name / "rank-00000-of-00001.safetensors").write_bytes(CONTENT)
    (root / STEP / "manifest.json").write_text("{}")
    (root / STEP / ".hidden").write_text("secret")
    (root / STEP / "folder").mkdir()
    os.mkfifo(root / STEP / "fifo")
    (tmp_path / "outside").write_text("secret")
    (root / STEP / "link").symlink_to(tmp_path / "outside")
    (root / "step-000000000004").symlink_to(root / STEP)
    return root


@pytest.fixture
def server(root: Path) -> Iterator[FileServer]:
    server = FileServer({"memory": str(root)}, "127.0.0.1")
    server.start()
    server.let_in(SECRET)
    yield server
    server.close()


@pytest.fixture
def files(server: FileServer) -> Iterator[RemoteFiles]:
    files = RemoteFiles(server.address, SECRET, "memory", deadline_s=DEADLINE_S)
    yield files
    files.close()


def connected(server: FileServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def told(connection: socket.socket) -> bytes:
    """All that is answered until the server hangs up."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            found += more
    return found


def ask(server: FileServer, path: str, fields: str = "", method: str = "GET") -> tuple[int, bytes]:
    """(status, body) of one request, by hand: clients clean paths up."""
    request = f"{method} {path} HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n{fields}\r\n"
    with connected(server) as connection:
        with contextlib.suppress(OSError):  # it may have hung up before it had all of it
            connection.sendall(request.encode("latin-1"))
            connection.shutdown(socket.SHUT_WR)
        head, _, body = told(connection).partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def test_a_file_comes_whole_and_in_ranges(files) -> None:
    assert files.read_file(f"{STEP}/manifest.json", 100) == b"{}"
    memory = bytearray(1000)
    found = files.open_read(DATA)
    found.read_into(memoryview(memory), 12345)
    assert memory == CONTENT[12345:13345]
    last = bytearray(1)
    found.read_into(memoryview(last), len(CONTENT) - 1)
    assert last == CONTENT[-1:]
    found.read_into(memoryview(b""), 10**12)  # nothing is asked for


@pytest.mark.parametrize(
    "path",
    [
        "/memory/../outside",
        f"/memory/{STEP}/../../../outside",
        f"/memory/{STEP}/%2e%2e/%2e%2e/outside",
        f"/memory/{STEP}/..%2f..%2foutside",
        f"/memory/{STEP}/..",
        f"/memory/{STEP}/.",
        f"/memory//{STEP}/manifest.json",
        f"//memory/{STEP}/manifest.json",
        f"/memory/{STEP}//manifest.json",
        f"/memory/./{STEP}/manifest.json",
        f"/memory/{STEP}/manifest.json/",
        f"/memory/{STEP}/manifest.json?x",
        f"/memory/{STEP}/manifest.json#x",
        f"/memory/{STEP}/manifest%2ejson",
        f"/memory/{STEP}/.hidden",
        f"/memory/{STEP}/link",
        f"/memory/{STEP}/folder",
        f"/memory/{STEP}/fifo",
        f"/memory/{STEP}",
        "/memory/step-000000000004/manifest.json",
        "/memory/step-000000000004/",
        "/memory/step-000000000002.partial/rank-00000-of-00001.safetensors",
        "/memory/step-000000000003.retired/rank-00000-of-00001.safetensors",
        "/memory/.spare/rank-00000-of-00001.safetensors",
        "/memory/.spare/",
        "/memory/step-1/manifest.json",
        "/memory/step-\xb9\xb2\xb3456789012/manifest.json",
        f"/memory/{STEP}/",
        "/memory/",
        "/memory",
        "/",
        "/etc/passwd",
        "/../../../../etc/passwd",
        "/other/",
        f"http://127.0.0.1/memory/{STEP}/manifest.json",
        "*",
        "/memory/" + "a" * 4000,
        f"/memory/{STEP}/" + "a" * 4000,
    ],
)
def test_nothing_else_is_served(server, path) -> None:
    status, body = ask(server, path)
    assert (status, body) in {(404, b""), (0, b"")}, path


def test_a_file_that_the_storage_refuses_is_not_said_to_be_gone(server, monkeypatch) -> None:
    """Its step would be given up for a server that has too many files open."""

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        assert ask(server, f"/memory/{STEP}/manifest.json") == (503, b"")
    assert ask(server, f"/memory/{STEP}/manifest.json") == (200, b"{}")


def test_a_head_that_is_too_long_is_hung_up_on(server) -> None:
    assert ask(server, "/memory/" + "a" * 20_000) == (0, b"")
    assert ask(server, "/memory/", "X: " + " " * 7000 + "\xff\r\n") == (0, b"")
    many = "".join(f"X-{n}: 1\r\n" for n in range(2000))
    assert ask(server, "/memory/", many) == (0, b"")


@pytest.mark.parametrize(
    ("field", "status"),
    [
        ("bytes=0-0", 206),
        ("bytes=0-1", 206),
        ("bytes=0-2", 416),
        ("bytes=2-3", 416),
        ("bytes=1-0", 416),
        ("bytes=99999999999999999-99999999999999999", 416),
        ("bytes=0-", 400),
        ("bytes=-1", 400),
        ("bytes=0-0,1-1", 400),
        ("bytes=a-b", 400),
        ("bytes=0-9999999999999999999999", 400),
        ("lines=0-1", 400),
        ("", 400),
    ],
)
def test_a_range_is_exact_or_refused(server, field, status) -> None:
    got, body = ask(server, f"/memory/{STEP}/manifest.json", f"Range: {field}\r\n")
    assert got == status
    assert len(body) == (int(field[-1]) + 1 if status == 206 else 0)


def test_who_does_not_know_the_secret_learns_nothing(server) -> None:
    for given in ("", "Bearer ", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET}0"):
        for path in (f"/memory/{STEP}/manifest.json", "/nothing"):
            with connected(server) as connection:
                field = f"Authorization: {given}\r\n" if given else ""
                connection.sendall(f"GET {path} HTTP/1.1\r\n{field}\r\n".encode())
                answer = told(connection)
            assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
            assert answer.endswith(b"\r\n\r\n")


def test_nobody_is_answered_before_the_job_has_its_secret(
    root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty secret opens nothing, and a rank that has heard of it first waits."""
    server = FileServer({"memory": str(root)}, "127.0.0.1")
    server.start()
    request = f"GET /memory/{STEP}/manifest.json HTTP/1.1\r\nAuthorization: Bearer {{}}\r\n\r\n"
    with connected(server) as early:
        early.sendall(request.format(SECRET).encode())
        threading.Timer(0.01, server.let_in, [SECRET]).start()
        assert early.recv(1 << 10).startswith(b"HTTP/1.1 200 ")
    server.close()
    monkeypatch.setattr(serving, "FIRST_S", 0.01)
    server = FileServer({"memory": str(root)}, "127.0.0.1")
    server.start()
    with connected(server) as early:
        early.sendall(request.format("").encode())
        assert told(early).startswith(b"HTTP/1.1 403 ")
    server.close()


def test_only_reading_is_understood(server) -> None:
    path = f"/memory/{STEP}/manifest.json"
    for method in ("PUT", "POST", "DELETE", "HEAD", "get"):
        assert ask(server, path, method=method) == (405, b"")
    assert ask(server, path, "Content-Length: 5\r\n") == (400, b"")
    assert ask(server, path, "Transfer-Encoding: chunked\r\n") == (0, b"")


def test_silent_and_stalled_clients_do_not_hold_others_up(server, files, monkeypatch) -> None:
    monkeypatch.setattr(serving, "FIRST_S", 1.0)
    with contextlib.ExitStack() as silent:
        crowd = [
            silent.enter_context(connected(server)) for _ in range(serving.CONNECTIONS_MAX + 8)
        ]
        crowd[-1].sendall(b"GET /mem")  # and no more
        assert files.read_file(f"{STEP}/manifest.json", 100) == b"{}"
        assert [told(each) for each in crowd] == [b""] * len(crowd)


@pytest.fixture
def few(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server of at most four connections, which may be silent for ever."""
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(serving, "FIRST_S", DEADLINE_S)
    server = FileServer({"memory": str(root)}, "127.0.0.1")
    server.start()
    server.let_in(SECRET)
    yield server
    server.close()


def test_connections_are_bounded(few) -> None:
    with contextlib.ExitStack() as silent:
        crowd = [silent.enter_context(connected(few)) for _ in range(6)]
        assert ask(few, f"/memory/{STEP}/manifest.json") == (200, b"{}")
        assert len(few._wires) <= 4
        assert told(crowd[0]) == b""  # silent for longest


def test_who_waits_for_a_place_gets_that_of_one_that_has_its_answer(root, few) -> None:
    (root / STEP / "large").write_bytes(b"")
    os.truncate(root / STEP / "large", 64 << 20)
    request = f"GET /memory/{STEP}/large HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
    with contextlib.ExitStack() as busy:
        crowd = [busy.enter_context(connected(few)) for _ in range(4)]
        for each in crowd:
            each.sendall(request.encode())
            must(each.recv(1) == b"H")
        waits = busy.enter_context(connected(few))
        waits.sendall(request.replace("large", "manifest.json").encode())
        left = 64 << 20  # of one answer, without its head
        while left > 0:
            left -= len(crowd[2].recv(1 << 20))
        answer, rest = waits.recv(1 << 10), told(crowd[2])
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(rest) < 100


def test_closing_ends_everything(root, server, files) -> None:
    assert files.read_file(f"{STEP}/manifest.json", 100) == b"{}"
    before = [each for each in threading.enumerate() if each.name == "statehold-files"]
    with connected(server) as waiting:
        waiting.sendall(b"GET")
        server.close()
        server.close()
        assert told(waiting) == b""
    for thread in before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    host, _, port = server.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_a_forked_child_does_not_answer_nor_keep_the_port(tmp_path) -> None:
    """A killed process closes nothing by itself: what its child still had would stay open."""
    code = (
        "import os, sys\n"
        "from statehold.checkpoint.levels.hosts.serving import FileServer\n"
        f"server = FileServer({{'memory': {str(tmp_path)!r}}}, '127.0.0.1')\n"
        "server.start()\n"
        f"server.let_in({SECRET!r})\n"
        "print(server.address, flush=True)\n"
        "input()\n"
        "if os.fork() == 0:\n"
        "    print('child', flush=True)\n"
        "    sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        request = f"GET /nothing HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall(request.encode())  # once it is answered, the server knows of it
            must(connection.recv(1 << 10).endswith(b"\r\n\r\n"))
            process.stdin.write("\n")
            process.stdin.flush()
            must(process.stdout.readline() == "child\n")
            process.wait(DEADLINE_S)
            must(told(connection) == b"", "the child has the connection")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


def test_a_process_ends_while_it_serves(tmp_path) -> None:
    code = (
        "from statehold.checkpoint.levels.hosts.serving import FileServer\n"
        f"server = FileServer({{'memory': {str(tmp_path)!r}}}, '127.0.0.1')\n"
        "server.start()\n"
        "print(server.address, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S):
            process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 0


def test_the_address_is_one_that_others_reach(root, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = FileServer({"memory": str(root)})
    server.start()
    assert server.address.startswith("127.0.0.1:")
    server.close()


def test_an_address_of_another_host_is_refused(root) -> None:
    with pytest.raises(UsageError, match="cannot serve files"):
        FileServer({"memory": str(root)}, "192.0.2.1").start()
    with pytest.raises(UsageError, match="not a valid name of a place"):
        FileServer({"../x": str(root)})


def test_a_file_that_is_cut_while_it_is_sent_ends_the_connection(root, server) -> None:
    path = root / DATA
    must(path.stat().st_size == len(CONTENT))
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    request = f"GET /memory/{DATA} HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(request.encode())
        connection.recv(10)  # it has begun; the socket holds a few MiB
        os.truncate(path, 1 << 10)
        assert len(told(connection)) < 64 << 20
