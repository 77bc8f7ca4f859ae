"""Locks on files: who may take them, what they outlive, and file systems that have none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold import cli
from statehold._core import open_fs
from statehold.errors import RunBusyError, StorageError
from statehold.integrations.formats.partial import Journal
from statehold.lineage import Catalog
from statehold.offload import store
from statehold.offload.store import PathTurns, claim_folder
from statehold.process import file_locks
from statehold.process.file_locks import LockFile
from statehold.steps import lock as store_lock
from statehold.steps.lock import RunLock, is_saved_into
from support.contents import THREADS, committed
from support.faults import DEADLINE_S

REFUSALS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL]
LOCKING = {fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_OFD_GETLK}
BUSY, GOT = 3, 4

# Says whether another process would get the run.
OTHER = f"""
import sys
from statehold.steps.lock import RunLock
from statehold.errors import RunBusyError
try:
    RunLock(sys.argv[1])
except RunBusyError:
    sys.exit({BUSY})
sys.exit({GOT})
"""


def other_process(run: Path) -> int:
    ended = subprocess.run([sys.executable, "-c", OTHER, str(run)], check=False, timeout=DEADLINE_S)
    return ended.returncode


def forked(act: Callable[[], int]) -> int:
    """The exit code of a fork that does this, with whatever the test has replaced."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def tried(run: Path) -> int:
    try:
        RunLock(str(run))
    except RunBusyError:
        return BUSY
    return GOT


def taken_and_killed(run: Path) -> int:
    lock = RunLock(str(run))
    os.kill(os.getpid(), signal.SIGKILL)
    return int(lock.is_lost)


# -- how long a lock stays --------------------------------------------------------------------


def test_a_job_that_reads_all_files_of_its_run_keeps_it(tmp_path: Path) -> None:
    """As a backup from within the job does, or a look at whether the run is in use."""
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1)
        shutil.copytree(run, tmp_path / "backup")
        (run / ".lock").read_bytes()
        assert is_saved_into(str(run))
        assert other_process(run) == BUSY
    assert other_process(run) == GOT


def test_a_fork_does_not_keep_the_run_of_its_parent(tmp_path: Path) -> None:
    read, write = os.pipe()
    lock = RunLock(str(tmp_path))
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    lock.release()
    assert other_process(tmp_path) == GOT  # the fork is still there
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0


def test_two_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path))
    with pytest.raises(RunBusyError, match=r"another Checkpointer of this process") as caught:
        RunLock(str(tmp_path))
    assert "call close()" in str(caught.value)
    lock.release()
    assert not lock.is_wanted
    RunLock(str(tmp_path)).release()


# -- who may take one -------------------------------------------------------------------------


def lock_files(folder: Path) -> Iterator[Path]:
    """All files that statehold locks, made in this folder."""
    RunLock(str(folder)).release()
    yield folder / ".lock"
    claim = claim_folder(open_fs("threads"), str(folder))
    yield Path(claim.folder, ".lock")
    claim.release()
    Catalog(folder).scan()
    yield folder / ".statehold-catalog.sqlite.lock"
    Journal(str(folder), "work").close()
    yield folder / ".journal"
    PathTurns(str(folder)).close()
    yield Path(file_locks.memory_path())


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o640), (0o002, 0o660), (0o077, 0o600)])
def test_no_lock_file_is_for_strangers(
    tmp_path: Path, own_memory: Path, umask: Callable[[int], int], mask: int, expected: int
) -> None:
    umask(mask)
    assert {path.name: mode(path) for path in lock_files(tmp_path)} == {
        ".lock": expected, ".statehold-catalog.sqlite.lock": expected, ".journal": expected,
        "locks": expected,
    }  # fmt: skip


@pytest.mark.parametrize("before", [0o644, 0o600, 0o666])
@pytest.mark.parametrize(("mask", "more"), [(0o002, 0o060), (0o077, 0)])
def test_a_lock_file_of_an_older_version_gets_the_mode_too(
    tmp_path: Path, umask: Callable[[int], int], before: int, mask: int, more: int
) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".lock").chmod(before)
    umask(mask)
    RunLock(str(tmp_path)).release()
    assert mode(tmp_path / ".lock") == (before & 0o660) | more


def test_a_lock_file_that_may_not_be_read_counts_as_taken(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(store_lock, "LockFile", refuse)
    assert is_saved_into(str(tmp_path))
    with pytest.raises(StorageError, match="chmod g"):
        RunLock(str(tmp_path))


def test_a_lock_file_of_ones_own_that_may_not_be_written(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(store_lock, "LockFile", refuse)
    (tmp_path / ".lock").touch(0o400)
    with pytest.raises(StorageError, match=r"chmod u\+rw"):
        RunLock(str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorageError, match="chmod g"):
        RunLock(str(tmp_path))


# -- file systems without locks ---------------------------------------------------------------


@pytest.fixture
def own_memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """The memory of the host that lock files are in."""
    path = tmp_path_factory.mktemp("memory")
    monkeypatch.setattr(file_locks, "SHARED_MEMORY", str(path))
    return path


@pytest.fixture
def on_fuse(own_memory: Path, tmp_path: Path, monkeypatch) -> Path:
    """A run where the kernel ends no lock of an open file, as on FUSE: something keeps it open."""
    found, real = os.stat(tmp_path), fcntl.fcntl
    mounts = own_memory / "mountinfo"
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 / rw\n36 1 {device} / /m rw - fuse.seaweedfs s rw\n")
    monkeypatch.setattr(file_locks, "_MOUNTS", mounts)
    monkeypatch.setattr(file_locks, "_warned", set())

    def keeping(fd: int, command: int, *values: Any) -> Any:
        if command == fcntl.F_OFD_SETLK:
            where = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if where.is_relative_to(tmp_path):
                os.dup(fd)
        return real(fd, command, *values)

    monkeypatch.setattr(fcntl, "fcntl", keeping)
    return tmp_path


def test_a_run_on_fuse_is_free_once_its_holder_has_ended(on_fuse: Path, caplog) -> None:
    for _ in range(2):
        lock = RunLock(str(on_fuse))
        assert is_saved_into(str(on_fuse))
        assert forked(lambda: tried(on_fuse)) == BUSY
        lock.release()
        assert not is_saved_into(str(on_fuse))
    assert forked(lambda: taken_and_killed(on_fuse)) == -signal.SIGKILL
    assert tried(on_fuse) == GOT
    assert not caplog.records


def test_other_hosts_are_kept_from_a_run_on_fuse(
    on_fuse: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> None:
    def on_another_host() -> int:
        file_locks.SHARED_MEMORY = str(tmp_path_factory.mktemp("another"))
        return tried(on_fuse)

    lock = RunLock(str(on_fuse))
    assert forked(lambda: GOT) == GOT  # a fork forgets it, and does not end it
    assert forked(on_another_host) == BUSY
    lock.release()
    assert forked(on_another_host) == GOT


def test_a_run_is_closed_although_its_server_on_fuse_is_gone(on_fuse: Path, monkeypatch) -> None:
    lock, asked = RunLock(str(on_fuse)), []

    def without_a_server(_fd: int, how: int) -> None:
        asked.append(how)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", without_a_server)
        lock.release()
    assert asked == [fcntl.LOCK_UN]
    assert tried(on_fuse) == GOT


def test_an_agent_gives_up_a_run_on_fuse(on_fuse: Path) -> None:
    gives_up_a_run(on_fuse)


@pytest.fixture(params=REFUSALS, ids=errno.errorcode.get)
def without(request: Any, own_memory: Path, monkeypatch) -> Callable[[Path], None]:
    """Takes the locks away from what lies below a path."""
    real = fcntl.fcntl
    monkeypatch.setattr(file_locks, "_warned", set())

    def take(below: Path) -> None:
        def refusing(fd: int, command: int, *values: Any) -> Any:
            where = os.readlink(f"/proc/self/fd/{fd}")
            if command in LOCKING and Path(where).is_relative_to(below):
                raise OSError(request.param, os.strerror(request.param))
            return real(fd, command, *values)

        monkeypatch.setattr(fcntl, "fcntl", refusing)

    return take


@pytest.mark.thorough
def test_a_file_system_without_locks_takes_a_run_with_one_warning(
    tmp_path: Path, without: Callable[[Path], None], caplog
) -> None:
    without(tmp_path)
    for step in (1, 2):
        with statehold.Checkpointer(tmp_path / "run", **THREADS) as ckpt:
            committed(ckpt, step)
            assert forked(lambda: tried(tmp_path / "run")) == BUSY
            assert is_saved_into(str(tmp_path / "run"))
            with pytest.raises(RunBusyError, match="another Checkpointer of this process"):
                RunLock(str(tmp_path / "run"))
            assert ckpt.steps()[-1] == step
    assert [each.levelno for each in caplog.records if "has no locks" in each.message] == [
        logging.WARNING
    ]


def test_a_killed_holder_frees_a_run_without_locks(
    tmp_path: Path, without: Callable[[Path], None]
) -> None:
    without(tmp_path)
    assert forked(lambda: taken_and_killed(tmp_path)) == -signal.SIGKILL
    assert tried(tmp_path) == GOT


def test_an_agent_gives_up_a_run_without_locks(
    tmp_path: Path, without: Callable[[Path], None]
) -> None:
    without(tmp_path)
    gives_up_a_run(tmp_path)


def gives_up_a_run(run: Path) -> None:
    """An agent, for a trainer that asks."""
    read, write = os.pipe()

    def agent() -> int:
        lock = RunLock(str(run), yields=True)
        os.write(write, b"!")
        while not lock.is_wanted:
            pass
        lock.release()
        return GOT

    pid = os.fork()
    if pid == 0:
        os._exit(agent())
    assert os.read(read, 1) == b"!"
    lock = RunLock(str(run))
    assert lock.took_over
    lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == GOT


def test_every_lock_works_on_a_file_system_without(
    tmp_path: Path, without: Callable[[Path], None]
) -> None:
    without(tmp_path)
    assert len(list(lock_files(tmp_path))) == 5
    fs = open_fs("threads")
    claims = [claim_folder(fs, str(tmp_path)) for _ in range(2)]
    assert claims[0].folder != claims[1].folder
    journal = Journal(str(tmp_path), "work")
    with pytest.raises(RunBusyError):
        Journal(str(tmp_path), "work")
    journal.close()
    for each in claims:
        each.release()


def test_the_doctor_says_that_there_are_no_locks(
    tmp_path: Path, without: Callable[[Path], None], capsys
) -> None:
    without(tmp_path)
    assert cli.main(["doctor", str(tmp_path), "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    [found] = [each for each in checks if each["name"] == "locks"]
    assert (found["ok"], found["value"]) == (None, "no")
    assert "on this host" in found["means"]


def test_a_process_excludes_itself_where_no_kernel_has_locks(
    tmp_path: Path, own_memory: Path, without: Callable[[Path], None]
) -> None:
    without(Path("/"))
    lock = LockFile(str(tmp_path / "file"))
    other = LockFile(str(tmp_path / "file"))
    assert lock.try_take(0)
    assert other.is_taken(0)
    assert not other.try_take(0)
    assert other.try_take(1)
    other.drop(0)  # not its own
    assert not other.try_take(0)
    lock.close()
    assert other.try_take(0)
    other.close()


# -- what only speeds things up ---------------------------------------------------------------


def test_a_turn_is_not_waited_for_for_ever(tmp_path: Path, own_memory: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "WAIT_S", 0.01)
    stopped, mine = PathTurns(str(tmp_path)), PathTurns(str(tmp_path))
    done = []
    with stopped.read.taken():
        for number in range(3):
            with mine.read.taken():
                done.append(number)
    assert done == [0, 1, 2]
    for _ in range(2):  # it takes turns again
        with mine.read.taken(), contextlib.closing(LockFile.in_memory(str(tmp_path))) as onlooker:
            assert not onlooker.try_take(0)
    for each in (stopped, mine):
        each.close()


def test_a_file_for_turns_that_a_stranger_has_made_is_not_used(
    tmp_path: Path, own_memory: Path
) -> None:
    home = own_memory / f"statehold-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    mine = PathTurns(str(tmp_path))
    with mine.read.taken():
        assert not mine.read.is_wanted
    assert list(home.iterdir()) == []
    mine.close()
