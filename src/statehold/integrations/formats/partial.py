"""What an export or an import has written so far: resumed after a kill, renamed when it is whole.

    DST.partial/            beside the destination, never under its name
    DST.partial/.journal    the identity of the work, then a line for each part that is durable

Owns: files that are written at offsets, their syncs, the journal, the rename.
Invariants: a line stands in the journal only after the bytes that it is about were synced. A
journal of other work, or of a source that has changed since, is thrown away with all that it is
about, before it is taken for new work. What no export has left at DST.partial is refused, and
stays. The destination appears whole, by one rename, after every byte of it was synced. One process
works on a destination at a time. No link is followed out of it, and a directory that another user
has made is refused.
Not here: what is written (one module for each format). torch is not imported: a command refuses a
destination without it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from statehold._version import __version__
from statehold.errors import (
    InvariantError,
    NoSpaceError,
    RunBusyError,
    UnsupportedValueError,
    UsageError,
    storing,
)
from statehold.process.file_locks import LockFile
from statehold.process.ownership import make_own_directory
from statehold.process.whole_files import open_regular, sync_files
from statehold.units import MiB

JOURNAL = ".journal"
SYNC_BYTES = 256 * MiB
# (bytes that were written or found written) -> nothing.
Done = Callable[[int], None]


class Journal:
    """Which parts of the work in `directory` are durable: key -> a note about it."""

    def __init__(self, directory: str, identity: str) -> None:
        self._path = f"{directory}/{JOURNAL}"
        self._lock = LockFile(self._path)
        if not self._lock.try_take(0):
            self._lock.close()
            raise RunBusyError(
                "another process writes to this destination", facts={"path": directory}
            )
        self._file = _opened(self._path, os.O_RDWR)
        self._waiting: list[tuple[str, str]] = []
        self._directory, self._identity = directory, identity
        self._done = self._read(identity)
        self.is_fresh = self._done is None

    def begin(self) -> None:
        """Forget other work, with its files. A kill in between leaves a journal of no work."""
        self._head(identity_of(clearing=self._directory))
        for path in Path(self._directory).iterdir():
            if path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._head(self._identity)

    def _head(self, identity: str) -> None:
        line = f"{json.dumps([identity])}\n".encode()
        os.pwrite(self._file, line, 0)  # before the cut: an empty journal would be nobody's
        os.ftruncate(self._file, len(line))
        os.fdatasync(self._file)

    def _read(self, identity: str) -> dict[str, str] | None:
        with open(self._path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")[:-1]  # the last one may be cut
        if not lines or lines[0] != json.dumps([identity]):
            return None
        found = {}
        for line in lines[1:]:
            with contextlib.suppress(ValueError, TypeError):
                key, note = json.loads(line)
                found[key] = note
        return found

    def get(self, key: str) -> str | None:
        """The note about a part that is durable; None for any other."""
        return self._done.get(key) if self._done else None

    def note(self, key: str, note: str) -> None:
        """A part is written. It counts after the next flush()."""
        self._waiting.append((key, note))

    def flush(self) -> None:
        """All that was noted is durable by now."""
        lines = "".join(f"{json.dumps(pair)}\n" for pair in self._waiting)
        os.lseek(self._file, 0, os.SEEK_END)
        os.write(self._file, lines.encode())
        self._waiting.clear()
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)
        self._lock.close()


def _opened(path: str, how: int) -> int:
    """The descriptor of a file that has no other name: no link leads out of the work."""
    fd = open_regular(path, how, 0o644)
    if os.fstat(fd).st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EPERM, "not a file of its own", path)
    return fd


class Checksums(Protocol):
    """Of bytes, as they pass."""

    def add(self, view: memoryview) -> None: ...
    def end(self) -> str: ...


class OutFile:
    """A file of the work, written at offsets."""

    def __init__(self, path: str, journal: Journal) -> None:
        self._fd = _opened(path, os.O_RDWR | os.O_CREAT)
        sync_files([os.path.dirname(path)])  # the journal may not outlive the name
        self._journal = journal
        self._unsynced = 0

    def write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count
            self._unsynced += count

    def note(self, key: str, note: str = "") -> None:
        """A part is written; now and then everything so far is synced."""
        self._journal.note(key, note)
        if self._unsynced >= SYNC_BYTES:
            self.sync()

    def put(
        self,
        key: str,
        nbytes: int,
        views: Iterator[memoryview],
        begin: int,
        done: Done,
        sums: Checksums | None = None,
    ) -> str:
        """Write a tensor from `begin` on, unless it is durable; returns its checksums."""
        known = self._journal.get(key)
        if known is not None:
            done(nbytes)
            return known
        at = begin
        for view in views:
            self.write(view, at)
            at += len(view)
            if sums is not None:
                sums.add(view)
            done(len(view))
        if at != begin + nbytes:
            facts = {"expected": nbytes, "got": at - begin}
            raise InvariantError("a tensor has another number of bytes than it said", facts=facts)
        found = "" if sums is None else sums.end()
        self.note(key, found)
        return found

    def sync(self) -> None:
        os.fdatasync(self._fd)
        self._unsynced = 0
        self._journal.flush()

    def size(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def close(self) -> None:
        os.close(self._fd)


def check_free(path: str) -> None:
    """Raises UsageError if the destination of an export exists."""
    if os.path.lexists(path):
        facts = {"path": path, "expected": "nothing there"}
        hint = "name another place, or remove it"
        raise UsageError("the destination of an export exists", facts=facts, hint=hint)


def _check_left(path: str) -> None:
    """Raises UsageError if there is anything but what an export has left."""
    if not os.path.lexists(path):
        return
    with contextlib.suppress(OSError, ValueError, TypeError):
        if not (names := os.listdir(path)):
            return
        with open(_opened(f"{path}/{JOURNAL}", os.O_RDONLY), encoding="utf-8") as file:
            line = file.readline(MiB)
        # A journal without a line was made a moment before the death of its export.
        if (not line and names == [JOURNAL]) or "statehold" in json.loads(*json.loads(line)):
            return
    facts = {"path": path, "expected": "nothing, or an unfinished export", "got": "something else"}
    hint = "nothing was changed: move it away, or name another destination"
    raise UsageError("something else lies where an export is made", facts=facts, hint=hint)


class PartialExport:
    """The destination of an export: a directory, or (is_file) one file."""

    def __init__(self, destination: str, identity: str, *, is_file: bool, done: Done) -> None:
        self.path = destination
        self.directory = f"{self.path}.partial"
        self._is_file = is_file
        self.done = done
        check_free(self.path)
        _check_left(self.directory)
        make_own_directory(self.directory, "of an unfinished export", 0o775)
        self.journal = Journal(self.directory, identity)
        if self.journal.is_fresh:
            self.journal.begin()

    def place(self, name: str) -> str:
        """Where a file of the destination is written; names of a state must not lead out of it."""
        path = f"{self.directory}/{name}"
        if os.path.normpath(path) != path or not path.startswith(f"{self.directory}/"):
            facts = {"name": name, "expected": "a name without .. and empty parts"}
            raise UnsupportedValueError("a name of the state cannot name a file", facts=facts)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        sync_files(each for each in Path(path).parents if each.is_relative_to(self.directory))
        return path

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[OutFile]:
        """A file in the destination, or the destination itself; synced when it is left."""
        with contextlib.closing(OutFile(self.place(name), self.journal)) as out:
            yield out
            out.sync()

    def put(self, name: str, content: bytes, note: str = "") -> None:
        """A small file, as a whole; the journal notes it by its name."""
        with self.file(name) as out:
            out.write(content, 0)
            out.size(len(content))
            out.note(name, note)

    def commit(self) -> None:
        """Make the destination appear."""
        check_free(self.path)
        if self._is_file:
            [name] = [name for name in os.listdir(self.directory) if name != JOURNAL]
            os.rename(f"{self.directory}/{name}", self.path)
            sync_files([os.path.dirname(self.path)])
            shutil.rmtree(self.directory)
        else:
            sync_files(parent for parent, _, _ in os.walk(self.directory))
            os.unlink(f"{self.directory}/{JOURNAL}")
            os.rename(self.directory, self.path)
        sync_files([os.path.dirname(self.path)])

    def close(self) -> None:
        self.journal.close()


@contextlib.contextmanager
def work_on(
    destination: str, identity: str, *, is_file: bool, done: Done
) -> Iterator[PartialExport]:
    """Work that is committed when it is left without an error.

    A refusal removes it, and so does a storage without room, which others need. After other errors
    it can be resumed.
    """
    opened = partial(storing, "write a checkpoint", destination)
    with opened():
        work = PartialExport(destination, identity, is_file=is_file, done=done)
    try:
        with opened():
            yield work
            work.commit()
    except (UsageError, NoSpaceError):  # a refusal would come again
        shutil.rmtree(work.directory, ignore_errors=True)
        raise
    finally:
        work.close()


def identity_of(**facts: Any) -> str:
    """What has to be the same for work to be resumed."""
    return json.dumps({**facts, "statehold": __version__}, sort_keys=True)
