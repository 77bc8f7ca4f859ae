"""Files of a far place, brought near before they are read: only the ranges that are needed.

A file comes near as a sparse one of its full length, with the needed ranges in their places: what
reads it has the same offsets as everywhere, and checks the same checksums.
Owns: where such files lie, and when they go: when the step is not read any more, or at close().
Invariants: a range has its storage before a byte of it is written as memory; without room, that is
an error with a name and not a signal. Names of files here are nobody else's.
Not here: how ranges are fetched (checkpoint/store/objects, remote), which ranges (reads).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

from statehold.errors import NoSpaceError, storage_error
from statehold.io.objects.parallel import Target

__all__ = ["PREFIX", "NearFiles", "coalesced"]

# Of the directories that such files lie in; the number of the process comes next.
PREFIX = ".statehold-fetched-"

# A request costs as much as so many bytes, or more, wherever it goes: what lies between two ranges
# that are closer comes along.
GAP_BYTES = 1 << 20

Range = tuple[int, int]


class NearFiles:
    """Files brought near into `directories`: the first with room is taken. Thread-safe; one file of
    a step is brought by one thread at a time."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = directories
        self._guard = threading.Lock()
        self._readers: dict[int, int] = {}  # step -> how many
        self._folders: dict[tuple[int, str], str] = {}  # step, file

    def bring(
        self,
        step: int,
        name: str,
        nbytes: int,
        needed: Sequence[Range] | None,
        fetch: Callable[[Sequence[Target]], None],
    ) -> str:
        """The path of a file of which `fetch` has filled the ranges `needed` (None: all of it).
        One that was brought before is brought anew: who asks again was not content with it."""
        self._drop(step, name)
        wanted = coalesced([(0, nbytes)] if needed is None else needed)
        folder = self._folder_for(sum(end - begin for begin, end in wanted))
        with self._guard:
            self._folders[step, name] = folder
        path = f"{folder}/{name}"
        try:
            memory = _allocated(path, nbytes, wanted)
            fetch([(begin, memory[begin:end]) for begin, end in wanted])
        except BaseException:
            self._drop(step, name)
            raise
        return path

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep what is brought near of a step until here, and no longer."""
        with self._guard:
            self._readers[step] = self._readers.get(step, 0) + 1
        try:
            yield
        finally:
            with self._guard:
                self._readers[step] -= 1
                is_last = not self._readers[step]
                if is_last:
                    del self._readers[step]
                done = [key for key in self._folders if is_last and key[0] == step]
            for key in done:
                self._drop(*key)

    def close(self) -> None:
        with self._guard:
            done = list(self._folders)
        for key in done:
            self._drop(*key)

    def _drop(self, step: int, name: str) -> None:
        with self._guard:
            folder = self._folders.pop((step, name), None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _folder_for(self, nbytes: int) -> str:
        """A new directory with room for so much."""
        for directory in self._directories:
            with contextlib.suppress(OSError):
                free = os.statvfs(directory)
                if free.f_bavail * free.f_frsize > nbytes:
                    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=directory)
        raise NoSpaceError(
            "not enough space to fetch a file of a step",
            facts={"needed": f"{nbytes} bytes", "looked at": ", ".join(self._directories)},
        )


def coalesced(ranges: Sequence[Range], gap_bytes: int = GAP_BYTES) -> list[Range]:
    """Ranges in order, without those that are empty; two with at most `gap_bytes` between them are
    one."""
    found: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and begin - found[-1][1] <= gap_bytes:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _allocated(path: str, nbytes: int, ranges: Sequence[Range]) -> memoryview:
    """A new file as memory, of which `ranges` have their storage; mapped as long as it is used."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            for begin, end in ranges:
                os.posix_fallocate(fd, begin, end - begin)
            return memoryview(mmap.mmap(fd, nbytes) if nbytes else b"")
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error("fetch a file", error.errno or 0, path) from error
