"""Files of a far place, fetched before they are read: only the needed ranges.

A fetched file is a sparse one of its full length, with the needed ranges in their places. So its
readers use the same offsets as everywhere, and check the same checksums.
Owns: the place of such files, and their end: when the step is not read any more, or at close(). A
killed process leaves them, and the next one of the host that fetches removes them.
Invariants: a range has its storage before a byte of it is written as memory. Without space, that is
an error with a name, and not a signal. No other process uses the names of these files.
Not here: how ranges are fetched (objects, levels/hosts/remote), which ranges (read_plan).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from statehold.errors import NoSpaceError, StorageError, storing
from statehold.io.memory_room import free_bytes
from statehold.io.objects.parallel import Extent
from statehold.process.file_locks import LockFile, memory_path
from statehold.process.host_memory import SHARED_MEMORY
from statehold.process.ownership import is_own

# Of the directories of such files. The number of the process comes next, then the host, then the
# number of a byte, which is locked as long as the files are used (process/file_locks). A run may be
# shared with hosts and containers that have locks of their own.
PREFIX = ".statehold-fetched-"
_BYTE_BITS = 56

# A request costs at least as much as so many bytes. If two ranges are closer than this, the bytes
# between them are fetched, too.
GAP_BYTES = 1 << 20

Range = tuple[int, int]


class NearFiles:
    """Files fetched into `directories`; the first with space is taken, and made if it is a run.

    Thread-safe; one thread at a time fetches one file of a step.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = directories
        self._guard = threading.Lock()
        self._readers = Counter[int]()  # of each step
        self._folders: dict[tuple[int, str], str] = {}  # step, file
        self._lock: LockFile | None = None
        self._prefix = ""

    def bring(
        self,
        step: int,
        name: str,
        nbytes: int,
        needed: Sequence[Range] | None,
        fetch: Callable[[Sequence[Extent]], None],
    ) -> str:
        """The path of a file after `fetch` has filled its ranges `needed` (None: all of it).

        A second call fetches the file again, because the caller was not content with the first one.
        """
        self._drop(step, name)
        wanted = coalesced([(0, nbytes)] if needed is None else needed)
        try:
            path, memory = self._room_for(step, name, nbytes, wanted)
            fetch([(begin, memory[begin:end]) for begin, end in wanted])
        except BaseException:
            self._drop(step, name)
            raise
        return path

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep the fetched files of a step until here, and no longer."""
        with self._guard:
            self._readers[step] += 1
        try:
            yield
        finally:
            with self._guard:
                self._readers -= Counter((step,))
                is_last = step not in self._readers
                done = [key for key in self._folders if is_last and key[0] == step]
            for key in done:
                self._drop(*key)

    def has_readers(self, step: int) -> bool:
        """Whether somebody reads the step, or keeps it."""
        with self._guard:
            return step in self._readers

    def close(self) -> None:
        with self._guard:
            done = list(self._folders)
        for key in done:
            self._drop(*key)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _drop(self, step: int, name: str) -> None:
        with self._guard:
            folder = self._folders.pop((step, name), None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _room_for(
        self, step: int, name: str, nbytes: int, wanted: Sequence[Range]
    ) -> tuple[str, memoryview]:
        """A new file with storage for the ranges, where there is space: its path, and memory."""
        needed = sum(end - begin for begin, end in wanted)
        self._mark()
        for directory in self._directories:
            with contextlib.suppress(OSError, NoSpaceError):  # other ranks take space, too
                if directory != SHARED_MEMORY:
                    os.makedirs(directory, exist_ok=True)  # a run that is new on its host
                if free_bytes(directory) > needed:
                    folder = tempfile.mkdtemp(prefix=self._prefix, dir=directory)
                    with self._guard:
                        self._folders[step, name] = folder
                    return f"{folder}/{name}", _allocated(f"{folder}/{name}", nbytes, wanted)
            self._drop(step, name)
        raise NoSpaceError(
            "not enough space to fetch a file of a step",
            errno=errno.ENOSPC,
            facts={"needed": f"{needed} bytes", "looked at": ", ".join(self._directories)},
        )

    def _mark(self) -> None:
        """Lock a byte for the names of the directories; before, remove what dead processes have
        left."""
        with self._guard:
            if self._lock is None:
                byte = secrets.randbits(_BYTE_BITS)
                self._prefix = PREFIX
                with contextlib.suppress(OSError, StorageError):  # nobody removes them then
                    self._lock = LockFile(memory_path())
                    self._lock.take(byte)
                    self._prefix = f"{PREFIX}{os.getpid()}-{self._lock.host}-{byte:x}-"
                    for directory in self._directories:
                        _remove_of_dead(self._lock, Path(directory))


def _remove_of_dead(lock: LockFile, directory: Path) -> None:
    for folder in directory.glob(f"{PREFIX}*-{lock.host}-*-*"):
        with contextlib.suppress(OSError, ValueError):  # of others, or gone
            is_used = lock.is_taken(int(folder.name.split("-")[-2], 16))
            if not is_used and lock.has_locks and is_own(str(folder)):
                shutil.rmtree(folder, ignore_errors=True)


def coalesced(ranges: Sequence[Range], gap_bytes: int = GAP_BYTES) -> list[Range]:
    """Ranges in order, without empty ones; two with at most `gap_bytes` between them become one."""
    found: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and begin - found[-1][1] <= gap_bytes:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _allocated(path: str, nbytes: int, ranges: Sequence[Range]) -> memoryview:
    """A new file as memory, with storage for `ranges`; mapped as long as it is used."""
    with storing("fetch a file", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            for begin, end in ranges:
                os.posix_fallocate(fd, begin, end - begin)
            return memoryview(mmap.mmap(fd, nbytes) if nbytes else b"")
        finally:
            os.close(fd)
