"""What every file system promises to the store: names, small files, sizes, errors."""

from __future__ import annotations

import errno
import mmap
import os
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from statehold import _core
from statehold.errors import (
    ClosedError,
    MissingFileError,
    NoSpaceError,
    StorageError,
    TruncatedFileError,
)
from support.disks import Disk, no_file_larger_than, open_or_skip
from support.in_memory import SimFs

PAGE = 4096


def errno_of(raised: pytest.ExceptionInfo[StorageError]) -> int:
    return raised.value.errno


def test_directories(disk: Disk) -> None:
    fs = disk.fs
    fs.mkdir(disk.path("b"))
    fs.mkdir(disk.path("a"))
    fs.write_file(disk.path("f"), b"data")
    assert fs.listdir(disk.root) == [("a", True), ("b", True), ("f", False)]
    assert fs.is_dir(disk.path("a"))
    assert not fs.is_dir(disk.path("f"))
    assert not fs.is_dir(disk.path("nothing"))
    fs.sync_dir(disk.root)
    fs.rmdir(disk.path("a"))
    assert [name for name, _ in fs.listdir(disk.root)] == ["b", "f"]


def test_sizes(disk: Disk) -> None:
    fs = disk.fs
    fs.write_file(disk.path("f"), b"12345")
    assert fs.stat_bytes(disk.path("f")) == 5
    assert fs.stat_bytes(disk.root) == 0
    assert fs.stat_bytes(disk.path("nothing")) is None


def test_small_files_replace_their_content(disk: Disk) -> None:
    fs = disk.fs
    fs.write_file(disk.path("f"), b"a longer text")
    fs.write_file(disk.path("f"), b"short\0")
    assert fs.read_file(disk.path("f"), 6) == b"short\0"
    fs.write_file(disk.path("f"), b"")
    assert fs.read_file(disk.path("f"), 0) == b""


def test_parts_of_files(disk: Disk) -> None:
    disk.fs.write_file(disk.path("f"), bytes(range(200)))
    file = disk.fs.open_read(disk.path("f"))
    assert file.size_bytes() == 200
    memory = bytearray(50)
    file.read_into(memory, 100)
    assert memory == bytes(range(100, 150))
    file.read_into(memoryview(memory)[10:20], 0)
    assert memory[8:22] == bytes([108, 109, *range(10), 120, 121])
    with pytest.raises(TruncatedFileError):
        file.read_into(memory, 151)
    with pytest.raises((BufferError, TypeError)):
        file.read_into(b"read-only", 0)  # type: ignore[arg-type]
    file.close()
    with pytest.raises(ClosedError):
        file.read_into(memory, 0)
    with pytest.raises(ClosedError):
        file.size_bytes()
    with pytest.raises(MissingFileError):
        disk.fs.open_read(disk.path("nothing"))


def test_small_files_have_a_limit(disk: Disk) -> None:
    disk.fs.write_file(disk.path("f"), b"12345")
    with pytest.raises(StorageError) as raised:
        disk.fs.read_file(disk.path("f"), 4)
    assert errno_of(raised) == errno.EFBIG


def test_rename_replaces_and_exchange_swaps(disk: Disk) -> None:
    fs = disk.fs
    fs.write_file(disk.path("x"), b"x")
    fs.write_file(disk.path("y"), b"y")
    fs.exchange(disk.path("x"), disk.path("y"))
    assert fs.read_file(disk.path("x"), 9) == b"y"
    fs.rename(disk.path("x"), disk.path("y"))
    assert fs.read_file(disk.path("y"), 9) == b"y"
    assert fs.stat_bytes(disk.path("x")) is None


def test_directories_move_with_their_files(disk: Disk) -> None:
    fs = disk.fs
    fs.mkdir(disk.path("a"))
    fs.mkdir(disk.path("b"))
    fs.write_file(disk.path("a/f"), b"text")
    fs.rename(disk.path("a"), disk.path("c"))
    fs.rename(disk.path("c/f"), disk.path("b/g"))
    assert fs.read_file(disk.path("b/g"), 9) == b"text"
    assert fs.listdir(disk.path("c")) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda fs, p: fs.mkdir(p("full")), errno.EEXIST),
        (lambda fs, p: fs.mkdir(p("none/a")), errno.ENOENT),
        (lambda fs, p: fs.rmdir(p("full")), errno.ENOTEMPTY),
        (lambda fs, p: fs.rmdir(p("none")), errno.ENOENT),
        (lambda fs, p: fs.unlink(p("none")), errno.ENOENT),
        (lambda fs, p: fs.unlink(p("full")), errno.EISDIR),
        (lambda fs, p: fs.rename(p("none"), p("b")), errno.ENOENT),
        (lambda fs, p: fs.exchange(p("full"), p("none")), errno.ENOENT),
        (lambda fs, p: fs.listdir(p("none")), errno.ENOENT),
        (lambda fs, p: fs.sync_dir(p("none")), errno.ENOENT),
        (lambda fs, p: fs.read_file(p("none"), 1), errno.ENOENT),
        (lambda fs, p: fs.write_file(p("none/f"), b""), errno.ENOENT),
        (lambda fs, p: fs.open_write(p("full/f"), 1), errno.EEXIST),
        (lambda fs, p: fs.open_write(p("none"), 1, reuse=True), errno.ENOENT),
    ],
)
def test_errors_carry_errno_and_path(
    disk: Disk, call: Callable[[_core.Fs, Callable[[str], str]], object], expected: int
) -> None:
    disk.fs.mkdir(disk.path("full"))
    disk.fs.write_file(disk.path("full/f"), b"")
    with pytest.raises(StorageError) as raised:
        call(disk.fs, disk.path)
    assert errno_of(raised) == expected
    assert raised.value.path.startswith(disk.root)


def test_open_write_allocates(disk: Disk) -> None:
    file = disk.fs.open_write(disk.path("f"), 3 * PAGE + 1)
    assert file.path == disk.path("f")
    size = disk.fs.stat_bytes(disk.path("f"))
    assert size == (4 * PAGE if file.direct else 3 * PAGE + 1)
    file.close()
    again = disk.fs.open_write(disk.path("f"), PAGE, reuse=True)
    assert disk.fs.stat_bytes(disk.path("f")) == PAGE
    again.close()


def test_what_has_no_room_takes_none(disk: Disk) -> None:
    """A new file is gone, and one that was to grow is as it was."""
    fs = disk.fs
    fs.open_write(disk.path("old"), PAGE).close()
    with no_file_larger_than(fs, 16 * PAGE):
        for name, reuse in (("new", False), ("old", True)):
            with pytest.raises(StorageError) as raised:
                fs.open_write(disk.path(name), 64 * PAGE, reuse)
            assert errno_of(raised) in (errno.EFBIG, errno.ENOSPC)
        with pytest.raises(StorageError):
            fs.open_write(disk.path("old"), PAGE)  # what is there already is another's
    assert fs.listdir(disk.root) == [("old", False)]
    assert fs.stat_bytes(disk.path("old")) == PAGE
    fs.open_write(disk.path("new"), 64 * PAGE).close()


def test_reuse_is_refused_while_open(disk: Disk) -> None:
    fs = disk.fs
    file = fs.open_write(disk.path("f"), PAGE)
    assert not fs.can_reuse(disk.path("f"))
    file.close()
    assert fs.can_reuse(disk.path("f"))
    assert not fs.can_reuse(disk.path("nothing"))
    assert not fs.can_reuse(disk.root)


def test_a_file_with_two_names_is_never_written_again(disk: Disk) -> None:
    fs, one, other = disk.fs, disk.path("one"), disk.path("other")
    fs.write_file(one, b"x" * PAGE)
    fs.link(one, other)
    for path in (one, other):
        assert fs.read_file(path, PAGE) == b"x" * PAGE
        assert not fs.can_reuse(path)
        for write in (
            lambda path=path: fs.open_write(path, PAGE, reuse=True),
            lambda path=path: fs.write_file(path, b"y"),
        ):
            with pytest.raises(StorageError) as raised:
                write()
            assert errno_of(raised) == errno.EMLINK
    assert fs.read_file(one, PAGE) == b"x" * PAGE
    fs.unlink(one)
    assert fs.can_reuse(other)
    fs.open_write(other, PAGE, reuse=True).close()
    fs.write_file(other, b"y")


def test_what_cannot_have_a_second_name(disk: Disk) -> None:
    fs = disk.fs
    fs.write_file(disk.path("f"), b"f")
    fs.mkdir(disk.path("d"))
    for source, target, expected in (
        ("nothing", "new", errno.ENOENT),
        ("f", "d", errno.EEXIST),
        ("f", "f", errno.EEXIST),
        ("d", "new", errno.EPERM),
    ):
        with pytest.raises(StorageError) as raised:
            fs.link(disk.path(source), disk.path(target))
        assert errno_of(raised) == expected


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_reuse_is_refused_when_shared(backend: str, tmp_path: Path) -> None:
    fs = open_or_skip(backend)
    path = str(tmp_path / "f")
    fs.write_file(path, b"x" * PAGE)
    with open(path, "rb"):
        assert not fs.can_reuse(path)
    assert fs.can_reuse(path)
    os.link(path, tmp_path / "other-name")
    assert not fs.can_reuse(path)
    os.unlink(tmp_path / "other-name")
    os.symlink(path, tmp_path / "link")
    assert not fs.can_reuse(str(tmp_path / "link"))
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert not fs.can_reuse(path)
    mapped.close()
    assert fs.can_reuse(path)
    fs.close()


def test_a_finished_file_is_closed_for_all(disk: Disk) -> None:
    engine = _core.Engine(disk.fs, 2 * PAGE, PAGE)
    job = engine.write(
        file_bytes=PAGE,
        block_bytes=PAGE,
        begins=array("q"),
        sizes=array("q"),
        addresses=array("Q"),
        flags=b"",
        strided={},
        header=b"h" * PAGE,
        owner=None,
    )
    file = disk.fs.open_write(disk.path("f"), PAGE)
    job.attach(file)
    written = job.wait_written(60.0)
    assert written
    job.finish()
    assert disk.fs.can_reuse(disk.path("f"))
    file.close()
    engine.close()


def test_backend_says_what_it_is(disk: Disk) -> None:
    assert disk.fs.backend in ("io_uring", "threads", "sim")
    assert (disk.fs.note == "") == (disk.fs.backend == "io_uring")
    with pytest.raises(ValueError, match="backend"):
        _core.open_fs("floppy")


def test_close_is_idempotent_and_ends_transfers(disk: Disk) -> None:
    disk.fs.close()
    disk.fs.close()
    with pytest.raises(ClosedError):
        _core.raw_write(disk.fs, disk.path("f"), PAGE, PAGE, 1, False)


@pytest.mark.parametrize("size", [PAGE, 5 * PAGE, 3 * PAGE + 17])
def test_raw_transfers_move_whole_files(disk: Disk, size: int) -> None:
    fresh_s = _core.raw_write(disk.fs, disk.path("f"), size, 2 * PAGE, 3, False)
    assert disk.fs.stat_bytes(disk.path("f")) == size
    again_s = _core.raw_write(disk.fs, disk.path("f"), size, 2 * PAGE, 3, True)
    read_s = _core.raw_read(disk.fs, disk.path("f"), 2 * PAGE, 3)
    assert min(fresh_s, again_s, read_s) > 0
    data = disk.fs.read_file(disk.path("f"), size)
    assert data[: 2 * PAGE].strip(b"\x01") == b""


def test_sim_injects_what_it_is_told() -> None:
    fs = SimFs(seed=2)
    fs.fail_next("mkdir", errno.EACCES, count=2, skip=1)
    fs.mkdir("a")
    for _ in range(2):
        with pytest.raises(StorageError) as raised:
            fs.mkdir("b")
        assert errno_of(raised) == errno.EACCES
    fs.mkdir("b")
    assert fs.fired["injected"] == 2
    assert fs.operations == ["mkdir a", "mkdir b"]


def test_sim_has_a_capacity() -> None:
    fs = SimFs(seed=2, capacity=2 * PAGE)
    fs.write_file("a", b"x" * PAGE)
    with pytest.raises(NoSpaceError):
        fs.open_write("b", 2 * PAGE)
    with pytest.raises(NoSpaceError):
        fs.write_file("b", b"x" * (PAGE + 1))
    fs.write_file("b", b"x" * PAGE)
    assert fs.fired["enospc"] == 2


def test_sim_forgets_what_was_not_synced() -> None:
    outcomes = set()
    for seed in range(40):
        fs = SimFs(seed=seed)
        fs.mkdir("run")
        fs.sync_dir("/")
        fs.write_file("run/kept", b"kept")
        fs.sync_dir("run")
        fs.write_file("run/new", b"new")
        fs.crash()
        assert fs.read_file("run/kept", 9) == b"kept"
        outcomes.add(fs.stat_bytes("run/new"))
    assert outcomes == {None, 3}


def test_sim_replays_a_seed() -> None:
    def survivors(seed: int) -> list[tuple[str, bool]]:
        fs = SimFs(seed=seed)
        for name in "abcdefgh":
            fs.mkdir(name)
        fs.crash()
        return fs.listdir("/")

    assert all(survivors(seed) == survivors(seed) for seed in range(20))
    assert len({len(survivors(seed)) for seed in range(20)}) > 2
