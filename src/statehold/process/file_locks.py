"""Locks on bytes of a file, which the kernel drops when their holder dies, however it dies.

They are "open file description" locks: two LockFiles exclude each other in one process as in two,
and a lock stays until its own LockFile is closed, whatever else the process opens and closes.
Unlike record locks they know nothing of deadlocks, and so never mistake two threads for one.

On FUSE the kernel does not tell the file system that such a lock ends with its file, so it would
stay until the file system is unmounted. There the locks are taken in a file in the memory of this
host, and who has byte 0 also has flock(), which keeps other hosts and users away.

Where a file system has no locks (Lustre without `flock`, NFS without lockd), the same locks are
taken in a file in the memory of this host. They then exclude what this user runs on this host, and
a warning says so. Where even the memory has none, and on a simulated disk, they exclude only what
this process has.

Invariants: a byte needs no content, so locks may lie anywhere in an empty file. A forked child
closes its copy of the file at once, and so never holds a lock of its parent. A lock file is
readable only for its owner and its group, less the umask, because a process that can read a file
can lock it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
import time
from pathlib import Path

from statehold.errors import StorageError
from statehold.process.forks import forget_in_children
from statehold.process.host_memory import SHARED_MEMORY, boot_id, home
from statehold.process.warn import logger

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_NAME = "locks"  # of the file in memory
_BYTES_OF_FILE = 4  # what each file or directory has there
_MOUNTS = Path("/proc/self/mountinfo")
_FUSE = ("fuse", "virtiofs")
_LOOK_S_MIN, _LOOK_S_MAX = 0.0001, 0.002

_warned: set[int] = set()  # file systems without locks
# Who holds a byte where no kernel has locks: by the simulated disk (0: none), the file, the byte.
_held_here: dict[tuple[int, str, int], LockFile] = {}


class LockFile:
    """The file at `path`. Thread-safe. Raises OSError.

    is_made: whether to make it if it is not there; otherwise nothing can be locked, only looked at.
    disk: the simulated disk that it lies on, which only this process can know; 0: none.
    """

    def __init__(self, path: str, *, is_made: bool = True, disk: int = 0) -> None:
        self.path = path
        self.has_locks = True  # False once the file system has refused one
        self._disk = disk
        self._first = 0  # where the bytes begin, if they are in memory
        self._fd = self._memory = -1
        self._is_here = bool(disk)
        self._has_flock = False  # whether byte 0 is a flock(), too
        forget_in_children(self)
        if not disk:
            self._fd = _opened(path, is_made=is_made)
            if _is_fuse(os.fstat(self._fd)):
                self._has_flock = True
                self._go_to_memory()

    @classmethod
    def in_memory(cls, directory: str) -> LockFile:
        """Locks for a directory, whatever its name, among what this user runs on this host."""
        lock = cls(memory_path())
        lock._first = _first_byte(os.stat(directory))
        return lock

    def note(self, text: str) -> None:
        """Leave words in the file, for people who find a lock taken."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)

    def noted(self) -> str:
        """The words in the file."""
        return os.pread(self._fd, 200, 0).decode(errors="replace").strip() if self._fd >= 0 else ""

    def take(self, byte: int, timeout_s: float | None = None) -> bool:
        """Lock a byte; waits until nobody else has it, but no longer than `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        look_s = _LOOK_S_MIN
        while not self.try_take(byte):
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_S_MAX)
        return True

    def try_take(self, byte: int) -> bool:
        """Lock a byte if nobody else has it."""
        if not self._set(fcntl.F_WRLCK, byte):
            return False
        if byte or not self._has_flock or self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            return True
        self.drop(byte)
        return False

    def share(self, byte: int) -> None:
        """Lock a byte together with others that share it. Nobody locks it alone."""
        self._set(fcntl.F_RDLCK, byte)

    def drop(self, byte: int) -> None:
        """Unlock a byte."""
        if self._has_flock and not byte:
            self._flock(fcntl.LOCK_UN)
        self._set(fcntl.F_UNLCK, byte)

    def is_taken(self, byte: int) -> bool:
        """Whether somebody else has locked a byte. False once this is closed."""
        if self._fd < 0 and not self._disk:
            return False
        found = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        if found is None:
            return _held_here.get(self._key(byte), self) is not self
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def is_taken_by(self, pid: int, byte: int) -> bool:
        """Whether the kernel says that this is the process that has locked a byte alone."""
        if self._is_here:
            return pid == os.getpid() and self._key(byte) in _held_here
        with contextlib.suppress(OSError):
            mine = os.fstat(self._locked_fd)
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    is_same = os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), mine)
                    if is_same and self._has_line(Path(f"/proc/{pid}/fdinfo/{fd}"), byte):
                        return True
        return False

    @property
    def host(self) -> str:
        """Processes that see the same locks get the same answer, until their host boots again."""
        return f"{boot_id()[:8]}{_first_byte(os.fstat(self._locked_fd)):x}"

    @property
    def is_lost(self) -> bool:
        """Whether another file, or none, has its name by now."""
        if self._fd < 0:
            return False
        try:
            named = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # unknown; the next use of the storage finds out
        return not os.path.samestat(named, os.fstat(self._fd))

    def close(self) -> None:
        """Drop all locks. Idempotent."""
        for key in [key for key, holder in list(_held_here.items()) if holder is self]:
            _held_here.pop(key, None)
        with contextlib.suppress(OSError):  # a server that is gone drops the lock itself
            if self._has_flock and self._fd >= 0:
                self._flock(fcntl.LOCK_UN)  # FUSE hears of the close later
        fds, self._fd, self._memory = (self._fd, self._memory), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def forget(self) -> None:
        """In a forked child: let the parent alone hold its locks."""
        self._has_flock = False  # the parent has it by the same open file
        with contextlib.suppress(OSError):
            self.close()

    @property
    def _locked_fd(self) -> int:
        return self._memory if self._memory >= 0 else self._fd

    def _key(self, byte: int) -> tuple[int, str, int]:
        return self._disk, os.path.realpath(self.path), self._first + byte

    def _set(self, kind: int, byte: int) -> bool:
        try:
            if self._call(fcntl.F_OFD_SETLK, kind, byte) is None:
                return self._set_here(kind, byte)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def _set_here(self, kind: int, byte: int) -> bool:
        if kind == fcntl.F_WRLCK:
            return _held_here.setdefault(self._key(byte), self) is self
        if kind == fcntl.F_UNLCK and _held_here.get(self._key(byte)) is self:
            del _held_here[self._key(byte)]
        return True

    def _call(self, command: int, kind: int, byte: int) -> bytes | None:
        """The kernel's answer; None: no kernel has locks here."""
        if self._fd < 0 and not self._disk:
            raise OSError(errno.EBADF, "the lock file is closed", self.path)
        while not self._is_here:
            asked = struct.pack(_FLOCK, kind, os.SEEK_SET, self._first + byte, 1, 0)
            try:
                return fcntl.fcntl(self._locked_fd, command, asked)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._lock_elsewhere(error)
        return None

    def _flock(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self._warn(error)
        return True

    def _lock_elsewhere(self, refused: OSError) -> None:
        """The file system has no locks: go on in memory, and if that has none, in this process."""
        if self._first:
            self.has_locks = False
            self._is_here = True
            return
        self._warn(refused)
        self._go_to_memory()

    def _warn(self, refused: OSError) -> None:
        self.has_locks = False
        device = os.fstat(self._fd).st_dev
        if device not in _warned:
            _warned.add(device)
            logger.warning(
                "%s has no locks (%s): statehold cannot keep jobs of other hosts and users away "
                "from it, only what this user runs on this host. Let one job at a time save there",
                os.path.dirname(self.path), errno.errorcode.get(refused.errno or 0, refused.errno),
            )  # fmt: skip

    def _go_to_memory(self) -> None:
        try:
            self._memory = _opened(memory_path(), is_made=True)
            self._first += _first_byte(os.fstat(self._fd))
        except (OSError, StorageError):
            self._is_here = True

    def _has_line(self, fdinfo: Path, byte: int) -> bool:
        at = [str(self._first + byte)] * 2
        lines = (line.split() for line in fdinfo.read_text().splitlines())
        return any(
            line[0] == "lock:" and "WRITE" in line and line[-2:] == at for line in lines if line
        )


def _opened(path: str, *, is_made: bool) -> int:
    """The descriptor of a lock file. It is no standard stream, whose output would land there."""
    how = os.O_RDWR | os.O_CREAT if is_made else os.O_RDONLY
    fd = os.open(path, how | _FLAGS, 0o660)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "a lock file must be a regular file", path)
        wanted = (found.st_mode | ~_umask()) & 0o660
        if is_made and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != wanted:
            os.fchmod(fd, wanted)  # an older version has made it, or a script
        if fd > 2:
            return fd
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return moved


def _is_fuse(found: os.stat_result) -> bool:
    """Whether a file lies on a file system in user space."""
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split(" ")[2] == device and kind.startswith(_FUSE):
                return True
    return False


def _umask() -> int:
    """The umask of this process. os.umask() would change it for other threads, too."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/thread-self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def memory_path() -> str:
    """The file in memory whose bytes this user locks instead of those of files on a storage."""
    base = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()
    return os.path.join(home(base), _NAME)


def _first_byte(found: os.stat_result) -> int:
    """Where the bytes of a file or directory are, under whatever name it is known."""
    name = f"{found.st_dev}:{found.st_ino}".encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
    return _BYTES_OF_FILE * (number + 1)
