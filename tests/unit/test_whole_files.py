"""replace_file(): what has the name stays what it is, and only the content of files changes."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

import statehold
from statehold.cli import main
from statehold.errors import StorageError, UsageError
from statehold.process.whole_files import open_regular, replace_file
from support.faults import DEADLINE_S, SMALL
from support.runs import arrays_of, write_step


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b""):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(tmp_path: Path, is_there: bool) -> None:
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    file.parent.mkdir()
    if is_there:
        file.write_bytes(b"old")
    (tmp_path / "between").symlink_to("folder/file")
    link.symlink_to("between")
    replace_file(link, b"new")
    assert (link.is_symlink(), file.is_symlink(), file.read_bytes()) == (True, False, b"new")
    assert sorted(os.listdir(tmp_path)) == ["between", "folder", "link"]


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_an_open_file_of_this_process_keeps_what_it_has(tmp_path: Path, folder: str) -> None:
    """As /dev/stdout does, after `>> file`."""
    path = tmp_path / "file"
    with open(path, "ab", buffering=0) as file:
        file.write(b"before ")
        assert not replace_file(f"{folder}/{file.fileno()}", b"page ")
        file.write(b"after")
    assert path.read_bytes() == b"before page after"


def test_a_fifo_is_written_through(tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", list[bytes]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()), daemon=True)
    reader.start()
    replace_file(fifo, b"x" * 200_000)
    reader.join(DEADLINE_S)
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO(fifo.lstat().st_mode)


def node(path: Path, kind: int, minor: int) -> Path:
    """A device node of this test. None of the machine is touched."""
    try:
        os.mknod(path, kind | 0o600, os.makedev(1, minor))
        if kind == stat.S_IFCHR:
            os.close(os.open(path, os.O_WRONLY))
    except PermissionError:
        pytest.skip("device nodes need root, and a file system that has them")
    return path


def test_a_character_device_is_written_through(tmp_path: Path) -> None:
    null = node(tmp_path / "null", stat.S_IFCHR, 3)
    replace_file(null, b"new")
    full = node(tmp_path / "full", stat.S_IFCHR, 7)
    with pytest.raises(OSError, match="No space") as caught:
        replace_file(full, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert all(stat.S_ISCHR(path.lstat().st_mode) for path in (null, full))
    assert sorted(os.listdir(tmp_path)) == ["full", "null"]


def of_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: node(path, stat.S_IFBLK, 1), of_a_socket]
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, make: object) -> None:
    path = tmp_path / "there"
    assert callable(make)
    make(path)
    before = path.lstat()
    with pytest.raises(UsageError, match="cannot take a file") as caught:
        replace_file(path, b"new")
    assert caught.value.facts["path"] == str(path)
    assert path.lstat() == before
    assert os.listdir(tmp_path) == ["there"]


def test_a_report_goes_through_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    write_step(run, 1, arrays_of())
    link.symlink_to(tmp_path / "page.html")
    assert main(["report", str(run), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_text().endswith("</html>")
    capsys.readouterr()
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert "cannot take a file" in capsys.readouterr().err


def test_a_trace_that_a_directory_takes_the_place_of_fails_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with statehold.Checkpointer(tmp_path / "run", trace=tmp_path / "trace", **SMALL) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        (tmp_path / "trace").mkdir()
        with pytest.raises(UsageError, match="cannot take a file"):
            ckpt.write_trace()
        with pytest.raises(StorageError, match="cannot write the trace"):
            ckpt.write_trace(tmp_path / "nowhere" / "trace")
    for thread in threading.enumerate():
        if thread.name == "statehold-log":
            thread.join(DEADLINE_S)
    assert "cannot take a file" in caplog.text


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        open_regular(str(tmp_path / kind), os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    with open(tmp_path / "file", "rb", opener=open_regular) as file:
        assert file.read() == b"content"
