"""How much memory this process may still take, how many ranks share it, and what it may write.

Owns: reading /proc, the control groups and the limits of the process; the directory of this user in
the memory of the host, `/dev/shm/statehold-UID`.
Invariants: the smallest of all limits counts. A limit that cannot be read does not count.
Not here: the use of the memory (io/runtime, steps/ready).
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path, PurePosixPath

from statehold.errors import StorageError, storing

# -- the memory of the host ------------------------------------------------------------------------
# Facts about Linux:
# - MemAvailable counts page cache that the kernel can drop. It knows nothing of control groups.
# - The usage of a group counts page cache, too; the kernel can drop `active_file` and
#   `inactive_file`.
# - A limit of a group holds for every group inside it. /proc/self/cgroup names the group of a
#   process from the root of the hierarchy. A container may not see that path. Then its group is the
#   one that it sees as the root.
# - With vm.overcommit_memory = 2, and for ulimit -v, mapped memory counts, whether it is used or
#   not.


_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_NEVER_OVERCOMMIT = "2"
_CACHE = ("active_file", "inactive_file")
# As torchrun, Open MPI, MPICH and SLURM set them. The launcher that starts the ranks comes first.
_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_TASKS_PER_NODE",
)
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x[0-9]{1,6}\))?")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that can still be taken, and the limit behind the number."""

    nbytes: int
    limit: str


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> Room:
    """The memory that this process may still take. Without readable limits, there is no limit."""
    rooms = [*_of_host(proc), *_of_groups(proc, groups), *_of_process(proc)]
    least = min(rooms, key=lambda room: room.nbytes, default=Room(0, "unknown"))
    return Room(max(0, least.nbytes), least.limit)


def ranks_on_host(world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks share the memory of this host: the launcher's number, or else all of them."""
    for name in _RANKS:
        found = _TASKS.findall(environ.get(name, ""))
        if found:
            return max(1, *map(int, found))
    return world_size


def boot_id() -> str:
    """Tells this run of the host's kernel from all others. Raises OSError."""
    return (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def _of_host(proc: Path) -> Iterator[Room]:
    known = _numbers(proc / "meminfo")
    if "MemAvailable" in known:
        yield Room(known["MemAvailable"] * 1024, "available on this host")
    if _text(proc / "sys/vm/overcommit_memory") != _NEVER_OVERCOMMIT:
        return
    if "CommitLimit" in known and "Committed_AS" in known:
        left = known["CommitLimit"] - known["Committed_AS"]
        yield Room(left * 1024, "left to be committed on this host")


def _of_groups(proc: Path, groups: Path) -> Iterator[Room]:
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = groups / controllers
            for name in (path, *map(str, PurePosixPath(path).parents)):
                yield from _of_group(root / name.lstrip("/"), name)


def _of_group(group: Path, name: str) -> Iterator[Room]:
    stat = _numbers(group / "memory.stat")
    # Version 1 has other names for the counts that include inner groups.
    cached = sum(stat.get(f"total_{key}", stat.get(key, 0)) for key in _CACHE)
    for used, limits in (
        ("memory.current", ("memory.max", "memory.high")),
        ("memory.usage_in_bytes", ("memory.limit_in_bytes",)),
    ):
        for limit in limits:
            at_most, now = _text(group / limit), _text(group / used)
            if at_most.isdecimal() and now.isdecimal():  # "max": no limit
                yield Room(int(at_most) - int(now) + cached, f"left to the control group {name}")


def _of_process(proc: Path) -> Iterator[Room]:
    pages = _text(proc / "self/statm").split()
    for kind, index, name in (
        (resource.RLIMIT_AS, 0, "ulimit -v"),
        (resource.RLIMIT_DATA, 5, "ulimit -d"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and len(pages) > index:
            used = int(pages[index]) * resource.getpagesize()
            yield Room(limit - used, f"left to this process ({name})")


def _numbers(file: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number, with a unit or without."""
    lines = (line.replace(":", " ").split() for line in _text(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _text(file: Path) -> str:
    """The content of a kernel file; "" if it does not exist or cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


class ReadOnly:
    """The memory that this process may not write; nothing where the system does not say.

    It is looked up when the first question comes: that takes milliseconds.
    """

    _found: list[tuple[int, int]] | None = None

    def holds(self, begin: int, nbytes: int) -> bool:
        """Whether any of these bytes is such memory now."""
        if self._found is None:
            self._found = _read_only_ranges()
        if not self._overlaps(begin, nbytes):
            return False
        self._found = _read_only_ranges()  # an allocator has made some of it writable since
        return self._overlaps(begin, nbytes)

    def _overlaps(self, begin: int, nbytes: int) -> bool:
        found = self._found or []
        after = bisect_right(found, begin, key=itemgetter(1))
        return after < len(found) and found[after][0] < begin + nbytes


def _read_only_ranges() -> list[tuple[int, int]]:
    """(begin, end) of each, in order."""
    found = []
    for line in _text(Path("/proc/self/maps")).splitlines():
        addresses, rights = line.split(" ", 2)[:2]
        if "w" not in rights:
            begin, end = addresses.split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


# -- the directory of this user --------------------------------------------------------------------
# The directory belongs to this user, and no other user may look into it. Anything else with that
# name is refused, and neither followed nor changed.


SHARED_MEMORY = "/dev/shm"


def home_path(base: str = SHARED_MEMORY) -> str:
    """Where the directory is. Nothing is made."""
    return os.path.join(base, f"statehold-{os.getuid()}")


def home(base: str = SHARED_MEMORY) -> str:
    """The directory, which exists on return. Raises StorageError."""
    path = home_path(base)
    with storing("create a memory level", path):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            check_home(base)
    return path


def check_home(base: str = SHARED_MEMORY) -> None:
    """Raise StorageError if something else is where the directory belongs."""
    path = home_path(base)
    if not os.path.lexists(path):
        return
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return
    raise StorageError(
        "the directory for memory levels does not belong to this user alone",
        errno=errno.EPERM,
        path=path,
        facts={"expected": f"a directory of user {os.getuid()}, mode 0700",
               "got": f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"},
        hint="pass Memory(path=...) on a tmpfs; the existing directory may hold another user's "
        "steps",
    )  # fmt: skip
