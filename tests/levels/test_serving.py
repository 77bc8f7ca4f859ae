"""Files of one host, served to another: whoever asks, and however, gets those of committed steps
and nothing else; nobody holds the server up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statehold.checkpoint.levels.hosts import serving
from statehold.checkpoint.levels.hosts.remote import RemoteFiles
from statehold.checkpoint.levels.hosts.serving import FileServer
from statehold.errors import StorageError, UsageError
from statehold.net import addresses, reception
from statehold.net.secret import ENVIRONMENT, Secret
from statehold.net.wire import SecretError, Wire, connect
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


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def connected(server: FileServer, secret: str = SECRET) -> Wire:
    return connect(addresses.split(server.address), serving.DOOR, Secret(f"\n{secret}"), soon())


def silent(server: FileServer) -> socket.socket:
    """Who has connected, and has not proven anything."""
    return socket.create_connection(addresses.split(server.address), timeout=DEADLINE_S)


def has_hung_up(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def asked(wire: Wire, path: str, begin: object = 0, end: object = None) -> tuple[list[Any], bytes]:
    """(what is answered, bytes) of one request."""
    wire.send(json.dumps([path, begin, end]).encode(), soon())
    answer = json.loads(wire.receive(soon()))
    return answer, b"" if answer[0] in serving.REASONS else wire.read(answer[1] - answer[0], soon())


def ask(server: FileServer, path: str, begin: object = 0, end: object = None) -> list[Any]:
    with contextlib.closing(connected(server)) as wire:
        answer, found = asked(wire, path, begin, end)
    return [*answer[:1], found] if found else answer[:1]


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
        "memory/../outside",
        f"memory/{STEP}/../../../outside",
        f"memory/{STEP}/%2e%2e/%2e%2e/outside",
        f"memory/{STEP}/..%2f..%2foutside",
        f"memory/{STEP}/..",
        f"memory/{STEP}/.",
        f"memory//{STEP}/manifest.json",
        f"//memory/{STEP}/manifest.json",
        f"memory/{STEP}//manifest.json",
        f"memory/./{STEP}/manifest.json",
        f"memory/{STEP}/manifest.json/",
        f"memory/{STEP}/manifest.json?x",
        f"memory/{STEP}/manifest.json#x",
        f"memory/{STEP}/manifest%2ejson",
        f"memory/{STEP}/.hidden",
        f"memory/{STEP}/link",
        f"memory/{STEP}/folder",
        f"memory/{STEP}/fifo",
        f"memory/{STEP}",
        "memory/step-000000000004/manifest.json",
        "memory/step-000000000004/",
        "memory/step-000000000002.partial/rank-00000-of-00001.safetensors",
        "memory/step-000000000003.retired/rank-00000-of-00001.safetensors",
        "memory/.spare/rank-00000-of-00001.safetensors",
        "memory/.spare/",
        "memory/step-1/manifest.json",
        "memory/step-\xb9\xb2\xb3456789012/manifest.json",
        f"memory/{STEP}/",
        "memory/",
        "memory",
        "",
        "/",
        f"/memory/{STEP}/manifest.json",
        "etc/passwd",
        "/../../../../etc/passwd",
        "other/",
        f"http://127.0.0.1/memory/{STEP}/manifest.json",
        "*",
        "memory/" + "a" * 4000,
        f"memory/{STEP}/" + "a" * 4000,
    ],
)
def test_nothing_else_is_served(server, path) -> None:
    assert ask(server, path) == [serving.ABSENT], path


def test_a_file_that_the_storage_refuses_is_not_said_to_be_gone(server, monkeypatch) -> None:
    """Its step would be given up for a server that has too many files open."""

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        assert ask(server, f"memory/{STEP}/manifest.json") == [serving.UNREADABLE]
    assert ask(server, f"memory/{STEP}/manifest.json") == [0, b"{}"]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 1, [0, b"{"]),
        (1, 2, [1, b"}"]),
        (0, 2, [0, b"{}"]),
        (0, 3, [serving.ENDS]),
        (2, 3, [serving.ENDS]),
        (2**62, 2**63 - 1, [serving.ENDS]),
        (1, 0, None),
        (1, 1, None),
        (-1, 1, None),
        (0, 2**63, None),
        (1, None, None),
        (0, "1", None),
        (0.0, 1, None),
        (0, [], None),
    ],
)
def test_a_range_is_exact_or_refused(server, begin, end, expected) -> None:
    """None: the server hangs up, because no host of the job asks so."""
    if expected is None:
        with pytest.raises(ConnectionResetError):
            ask(server, f"memory/{STEP}/manifest.json", begin, end)
    else:
        assert ask(server, f"memory/{STEP}/manifest.json", begin, end) == expected


@pytest.mark.parametrize(
    "request_line",
    [b"", b"{}", b"[]", b"[" * 5000, b"GET / HTTP/1.1", b'["memory", 0]', b"x" * 9000],
)
def test_what_asks_for_no_file_is_hung_up_on(server, request_line) -> None:
    with contextlib.closing(connected(server)) as wire:
        wire.send(request_line, soon())
        with pytest.raises(ConnectionResetError):
            wire.receive(soon())


def test_who_gets_no_thread_is_hung_up_on(server, monkeypatch) -> None:
    """It waited for its deadline, and took a place for ever."""
    start, refused = threading.Thread.start, []

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "statehold-files" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with contextlib.closing(connected(server)) as wire:
        wire.send(b'["memory", 0, 1]', soon())
        with pytest.raises(ConnectionResetError):
            wire.receive(soon())
    assert refused


def test_who_does_not_know_the_secret_learns_nothing(server, monkeypatch) -> None:
    """Neither that of the servers alone lets a process in, nor that of the job."""
    for given in ("", SECRET[:-1], f"{SECRET}0"):
        with pytest.raises(SecretError):
            connected(server, given)
    monkeypatch.setenv(ENVIRONMENT, "the secret of the job")
    files = RemoteFiles(server.address, SECRET, "memory", deadline_s=DEADLINE_S)
    with pytest.raises(StorageError) as caught:
        files.read_file(f"{STEP}/manifest.json", 100)
    assert caught.value.errno == errno.EACCES


def test_nobody_is_answered_before_the_job_has_its_secret(root) -> None:
    """The empty secret opens nothing, and a rank that has heard of it first waits."""
    server = FileServer({"memory": str(root)}, "127.0.0.1")
    server.start()
    with pytest.raises(TimeoutError):
        connect(addresses.split(server.address), serving.DOOR, Secret(""), time.monotonic() + 0.1)
    threading.Timer(0.01, server.let_in, [SECRET]).start()
    assert ask(server, f"memory/{STEP}/manifest.json") == [0, b"{}"]
    server.close()


def test_silent_and_stalled_clients_do_not_hold_others_up(server, files, monkeypatch) -> None:
    monkeypatch.setattr(reception, "FIRST_S", 1.0)
    with contextlib.ExitStack() as open_ones:
        crowd = [
            open_ones.enter_context(silent(server)) for _ in range(serving.CONNECTIONS_MAX + 8)
        ]
        crowd[-1].sendall(b"GET /mem")  # and no more
        assert files.read_file(f"{STEP}/manifest.json", 100) == b"{}"
        assert all(map(has_hung_up, crowd))


@pytest.fixture
def few(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server of at most four connections."""
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 4)
    server = FileServer({"memory": str(root)}, "127.0.0.1")
    server.start()
    server.let_in(SECRET)
    yield server
    server.close()


def test_the_connection_that_is_idle_for_longest_gives_way(few) -> None:
    path = f"memory/{STEP}/manifest.json"
    crowd = [connected(few) for _ in range(4)]
    others = set(threading.enumerate())
    for each in (*crowd, crowd[0]):
        assert asked(each, path)[1] == b"{}"
        for answering in set(threading.enumerate()) - others:
            answering.join()  # the connection is idle from then on
    assert ask(few, path) == [0, b"{}"]
    with pytest.raises(ConnectionResetError):
        crowd[1].receive(soon())
    for each in (crowd[0], crowd[2], crowd[3]):
        assert asked(each, path)[1] == b"{}"
    for each in crowd:
        each.close()


def test_who_waits_for_a_place_gets_that_of_one_that_has_its_answer(root, few) -> None:
    (root / STEP / "large").write_bytes(b"")
    os.truncate(root / STEP / "large", 64 << 20)
    crowd = [connected(few) for _ in range(4)]
    for each in crowd:
        each.send(json.dumps([f"memory/{STEP}/large", 0, None]).encode(), soon())
        must(json.loads(each.receive(soon())) == [0, 64 << 20, 64 << 20])
    waits = Wire(silent(few))
    with pytest.raises(TimeoutError):
        waits.read(1, time.monotonic() + 0.3)  # all are busy
    for _ in range(64):
        crowd[2].read(1 << 20, soon())
    assert waits.read(1, soon())
    with pytest.raises(ConnectionResetError):
        crowd[2].receive(soon())
    for each in (*crowd, waits):
        each.close()


def test_closing_ends_everything(root, server, files) -> None:
    assert files.read_file(f"{STEP}/manifest.json", 100) == b"{}"
    before = [each for each in threading.enumerate() if each.name == "statehold-files"]
    with silent(server) as waiting:
        waiting.sendall(b"GET")
        server.close()
        server.close()
        assert has_hung_up(waiting)
    for thread in before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        silent(server)


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
        server = FileServer({})
        server.address = process.stdout.readline().strip()
        with contextlib.closing(connected(server)) as wire:
            must(asked(wire, "nothing")[0][0] == serving.ABSENT)  # so the server knows of it
            process.stdin.write("\n")
            process.stdin.flush()
            must(process.stdout.readline() == "child\n")
            process.wait(DEADLINE_S)
            with pytest.raises(ConnectionResetError):
                wire.receive(soon())
        with pytest.raises(ConnectionRefusedError):
            silent(server)


def test_a_process_ends_while_it_serves(tmp_path) -> None:
    code = (
        "from statehold.checkpoint.levels.hosts.serving import FileServer\n"
        f"server = FileServer({{'memory': {str(tmp_path)!r}}}, '127.0.0.1')\n"
        "server.start()\n"
        f"server.let_in({SECRET!r})\n"
        "print(server.address, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        server = FileServer({})
        server.address = process.stdout.readline().strip()
        with contextlib.closing(connected(server)):
            process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 0


def test_the_address_is_one_that_others_reach(root, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = FileServer({"memory": str(root)})
    server.start()
    assert server.address.startswith("127.0.0.1:")
    server.close()


def test_an_address_of_another_host_is_refused(root) -> None:
    with pytest.raises(UsageError, match="the server of files cannot listen"):
        FileServer({"memory": str(root)}, "192.0.2.1").start()
    with pytest.raises(UsageError, match="not a valid name of a place"):
        FileServer({"../x": str(root)})


def test_a_file_that_is_cut_while_it_is_sent_ends_the_connection(root, server) -> None:
    path = root / DATA
    must(path.stat().st_size == len(CONTENT))
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    with contextlib.closing(connected(server)) as wire:
        wire.send(json.dumps([f"memory/{DATA}", 0, None]).encode(), soon())
        wire.receive(soon())  # it has begun; the socket holds a few MiB
        os.truncate(path, 1 << 10)
        with pytest.raises(ConnectionResetError):
            wire.read(64 << 20, soon())
