"""`statehold doctor [PATH]`: what statehold can do on this machine and in PATH.

It also lists the leftovers of dead jobs: memory, fetched files, half copies.

Invariants: reports only what was tried or read just now, through the same file system layer that
saves use. All trials happen in a temporary directory in PATH, which is removed again.
Not here: how fast it is (bench).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from statehold import _core
from statehold._core import Fs
from statehold.checkpoint.agent.looking import LOG_NAME, agents_of
from statehold.checkpoint.levels.remembered import FILE_NAME
from statehold.cli import codes
from statehold.cli.output import bad, counted, emit, good, say, table, weak
from statehold.cli.places import bytes_of, leftovers_of
from statehold.errors import StateholdError
from statehold.io.mounts import mount_of
from statehold.io.profile import described, find, path_for
from statehold.options.io import DEFAULTS
from statehold.process import host_memory as memory
from statehold.process.host_memory import SHARED_MEMORY, home_path
from statehold.process.whole_files import open_regular
from statehold.reading.places import NotFoundError, directory_of, file_system
from statehold.reading.sizes import sizes
from statehold.steps.lock import RunLock, is_saved_into
from statehold.steps.near_files import PREFIX
from statehold.units import MiB, format_bytes

# -- the machine and the path ----------------------------------------------------------------------


_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "9p", "fuse", "beegfs", "afs"}
_VOLATILE = {"tmpfs", "ramfs"}
_FILE_BYTES = 1 * MiB


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    ok: True; False: saving will not work; None: it works, but less well.
    means: what statehold does about it.
    """

    name: str
    value: str
    ok: bool | None = True
    means: str = ""


def run(args: argparse.Namespace) -> int:
    path = directory_of(args.path)
    if not os.path.isdir(path):
        raise NotFoundError("no such directory", facts={"path": path})
    checks = [*_machine(), *_storage(path), *left_behind(file_system(), path)]
    healthy = all(check.ok is not False for check in checks)
    if args.json:
        emit({"path": path, "healthy": healthy, "checks": [asdict(check) for check in checks]})
    else:
        header = ("", "CHECK", "FOUND", "WHAT STATEHOLD DOES")
        say(table(header, map(_row, checks), prose=header[-1]))
    return codes.YES if healthy else codes.NO


def _row(check: Check) -> tuple[object, ...]:
    mark = {True: good("ok"), False: bad("NO"), None: weak("--")}[check.ok]
    return mark, check.name, check.value, check.means


# -- the machine -----------------------------------------------------------------------------------


def _machine() -> Iterator[Check]:
    yield Check("system", f"{platform.system()} {platform.release()}, Python "
                f"{platform.python_version()}")  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    threads = DEFAULTS.copy_threads
    yield Check("cores", str(cores), means=f"copies and checks with {threads} threads")
    yield _package("torch", "needed to save and restore; the commands do not need it")
    yield _package("numpy", "needed by diff, and by show for statistics")
    yield _backend()
    yield _sysctl()
    room = memory.available()
    yield Check(
        "memory",
        f"{format_bytes(room.nbytes)} {room.limit}",
        bool(room.nbytes) or None,
        "all ranks together use at most a third of it as staging memory",
    )
    yield _limit("locked memory", resource.RLIMIT_MEMLOCK, format_bytes,
                 "staging memory is registered with io_uring if it fits")  # fmt: skip
    yield _limit("open files", resource.RLIMIT_NOFILE, str,
                 "a restore opens every file that it reads, twice")  # fmt: skip


def _package(name: str, means: str) -> Check:
    try:
        return Check(name, importlib.metadata.version(name), means=means)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "not installed", None, means)


def _backend() -> Check:
    fs = _core.open_fs("auto")
    with contextlib.closing(fs):
        if fs.note:
            return Check("backend", fs.backend, None, f"uses threads: {fs.note}")
        return Check(
            "backend", fs.backend, means="queues many transfers instead of one for each thread"
        )


def _sysctl() -> Check:
    path = Path("/proc/sys/kernel/io_uring_disabled")
    try:
        value = path.read_text().strip()
    except OSError:
        return Check("kernel.io_uring_disabled", "not there", means="the kernel has no such switch")
    means = {"0": "io_uring is allowed", "1": "io_uring needs CAP_SYS_ADMIN or a group"}
    ok = True if value == "0" else None
    return Check("kernel.io_uring_disabled", value, ok, means.get(value, "io_uring is off"))


def _limit(name: str, which: int, shown: Callable[[int], str], means: str) -> Check:
    soft, hard = (
        "unlimited" if value == resource.RLIM_INFINITY else shown(value)
        for value in resource.getrlimit(which)
    )
    return Check(name, soft if soft == hard else f"{soft} (up to {hard})", means=means)


# -- the storage -----------------------------------------------------------------------------------


def _storage(path: str) -> Iterator[Check]:
    yield _file_system(path)
    info = os.statvfs(path)
    yield Check("free space", format_bytes(info.f_bavail * info.f_frsize),
                means="a run needs room for the steps it keeps, and one more")  # fmt: skip
    yield _profile(path)
    yield from _agents(path)
    try:
        directory = tempfile.mkdtemp(prefix=".statehold-doctor-", dir=path)
    except OSError as error:
        yield Check("writing", os.strerror(error.errno or 0), False, "nothing can be saved here")
        return
    try:
        with contextlib.closing(_core.open_fs("auto")) as fs:
            yield from _tried(fs, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _file_system(path: str) -> Check:
    kind = mount_of(path).kind
    if kind.split(".")[0] in _NETWORK:
        means = "commits need rename and fsync as on a local disk: test it before you trust it"
        return Check("file system", kind, None, means)
    if kind in _VOLATILE:
        return Check("file system", kind, None, "memory: nothing here outlives the machine")
    return Check("file system", kind)


def _profile(path: str) -> Check:
    """The profile that a Checkpointer of a run here would use."""
    try:
        profile = find("auto", path)
    except StateholdError as error:
        return Check("I/O profile", "unusable", None, f"is ignored: {error.summary}")
    if profile is None:
        means = "usual settings; measure with: statehold bench io PATH"
        return Check("I/O profile", "none", means=means)
    return Check("I/O profile", str(path_for(path)), means=described(profile.moving))


def _agents(path: str) -> Iterator[Check]:
    """The agents of a run here: they wait for the trainer's end, or work after its death."""
    means = (
        f"when the trainer dies, copies its newest step from memory; {LOG_NAME} says what it did"
    )
    for pid in agents_of(path):
        yield Check("agent", f"process {pid}", means=means)


def _tried(fs: Fs, directory: str) -> Iterator[Check]:
    file = f"{directory}/file"
    yield _try("O_DIRECT", lambda: _direct(fs, file),
               "reads and writes pass the page cache", "goes through the page cache")  # fmt: skip
    yield _try("F_SETLEASE", lambda: fs.can_reuse(file),
               "retired files of steps and optimizers are overwritten, which is faster",
               "retired files of steps and optimizers are deleted, and new ones made")  # fmt: skip
    yield _try("renameat2 exchange", lambda: _exchange(fs, directory),
               "a step or a checkpoint can be replaced in one operation",
               "replacing a step or a checkpoint takes two renames and two syncs more")  # fmt: skip
    yield _try("fsync of a directory", lambda: _sync(fs, directory),
               "a commit is durable", "nothing can be committed here", needed=True)  # fmt: skip
    yield _try("locks", lambda: _lock(directory), "only one job saves into a run",
               "jobs of this user on this host exclude each other; keep other hosts and users out "
               "yourself")  # fmt: skip


def _try(name: str, act: Callable[[], bool], good: str, bad: str, *, needed: bool = False) -> Check:
    try:
        works, value = act(), "no"
    except StateholdError as error:
        works, value = False, str(error.facts.get("errno", error.summary))
    if works:
        return Check(name, "works", True, good)
    return Check(name, value, False if needed else None, bad)


def _direct(fs: Fs, path: str) -> bool:
    """Whether a transfer past the page cache succeeds, not only the opening of the file."""
    _core.raw_write(fs, path, _FILE_BYTES, _FILE_BYTES, 1, False)
    file = fs.open_write(path, _FILE_BYTES, True)
    with contextlib.closing(file):
        return file.direct


def _exchange(fs: Fs, directory: str) -> bool:
    a, b = f"{directory}/a", f"{directory}/b"
    fs.mkdir(a)
    fs.mkdir(b)
    fs.write_file(f"{a}/x", b"")
    fs.exchange(a, b)
    return fs.stat_bytes(f"{b}/x") is not None


def _sync(fs: Fs, directory: str) -> bool:
    fs.sync_dir(directory)
    return True


def _lock(directory: str) -> bool:
    lock = RunLock(directory)
    lock.release()
    return not lock.is_of_host_only


# -- leftovers of dead jobs ------------------------------------------------------------------------
# The search for them changes nothing. It ignores files of other users, and follows no link. A line
# says what a live job uses, as far as the kernel knows.


_LINE_BYTES_MAX = 4096


# kind (places.leftovers_of), name, meaning, and whether a live job uses it.
_LEFT = (
    ("partial", "half steps",
     "from a save or copy that did not end; the next one removes it or continues it", True),
    ("shared", "shared files",
     "names of files of steps that a job kept for its next save; the next job clears them", True),
    ("corrupt", "set aside", "damaged and set aside, for a person to inspect", False),
)  # fmt: skip


def left_behind(fs: Fs, path: str, shared: str = SHARED_MEMORY) -> Iterator[Check]:
    """The leftovers in the run `path`, if it is one, and in the memory of this host. ok: None for
    waste, which nobody needs, as far as one can see."""
    yield from _memory(home_path(shared))
    for folder in dict.fromkeys((shared, path)):
        yield from _near(folder)
    yield from _in_run(fs, path)


def _memory(home: str) -> Iterator[Check]:
    runs = [os.path.join(home, name) for name in _own_directories(home)]
    if not runs:
        return
    used = sum(is_saved_into(run) for run in runs)
    found = f"{counted(len(runs), 'run')}, {used} in use, {format_bytes(sizes(runs).bytes)}"
    means = f"steps that stay until the host restarts, in {home}; statehold free RUN frees them"
    yield Check("memory of runs", found, means=means)


def _near(folder: str) -> Iterator[Check]:
    found = [name for name in _own_directories(folder) if name.startswith(PREFIX)]
    if found:
        size = format_bytes(sizes(os.path.join(folder, name) for name in found).bytes)
        means = "files of a restore that is under way or was killed; remove them if it was killed"
        yield Check("brought near", f"{size} in {folder}/{PREFIX}*", None, means)


def _in_run(fs: Fs, path: str) -> Iterator[Check]:
    left = leftovers_of(fs, path)
    is_used = is_saved_into(path)
    for kind, name, means, is_jobs in _LEFT:
        if found := [each for each in left if each["kind"] == kind]:
            means, ok = ("a job is at work", True) if is_jobs and is_used else (means, None)
            size = format_bytes(bytes_of(path, found))
            yield Check(name, f"{len(found)}, {size}", ok, means)
    if os.path.lexists(os.path.join(path, FILE_NAME)):
        means = "to list their steps: statehold ls RUN --levels"
        yield Check("levels", "noted in " + FILE_NAME, means=means)
    line = _last_line(os.path.join(path, LOG_NAME))
    if line:
        means = f"its last report after the death of a trainer: {LOG_NAME}"
        yield Check("agent's log", line[:120], means=means)


def _own_directories(folder: str) -> list[str]:
    """The names of directories of this user; none if the parent cannot be read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                is_own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
                if is_own and entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
    return sorted(found)


def _last_line(path: str) -> str:
    lines = [""]
    with contextlib.suppress(OSError), open(path, "rb", opener=open_regular) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LINE_BYTES_MAX))
        lines += file.read(_LINE_BYTES_MAX).decode("utf-8", "replace").strip().splitlines()
    return lines[-1]
