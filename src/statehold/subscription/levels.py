"""The levels of a run that a process beside its job can read, the nearest first.

Owns: which levels count, and the wait until the names in their directories may have changed.
Invariants: nothing is created, changed or locked. A level counts if it is a directory that exists
now: the run directory, another directory, or the memory of this host. A level of several hosts, of
which each has a part, an object store, and a level of another run do not count.
Not here: which levels a run has (checkpoint/levels/remembered), which copy is read (steps/nearest).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from statehold.checkpoint.levels.remembered import Remembered, itself, recall
from statehold.errors import CorruptionError, StorageError
from statehold.io.mounts import mount_of
from statehold.process.ownership import is_own
from statehold.steps.owners import other_owner
from statehold.steps.publish import is_directory
from statehold.steps.shelf import DirectoryShelf

if TYPE_CHECKING:
    from collections.abc import Hashable

    from statehold._core import Fs


# -- the levels ------------------------------------------------------------------------------------


class LevelShelf(DirectoryShelf):
    """A level, read only. read_bytes: of its documents. could_not_list: whether steps() failed."""

    def __init__(self, fs: Fs, entry: Remembered) -> None:
        super().__init__(fs, os.path.realpath(entry.where), entry.name)
        self.read_bytes = 0
        self.could_not_list = False

    def steps(self) -> list[int]:
        try:
            return super().steps()
        except StorageError:
            self.could_not_list = True
            raise

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        raw = super().read(step, name, max_bytes)
        self.read_bytes += len(raw)
        return raw

    def committed_s(self, step: int) -> float | None:
        """When the directory of a step got its name, in seconds since 1970."""
        try:
            return os.stat(self.where(step)).st_ctime
        except OSError:
            return None


def levels_of(run: str) -> list[Remembered]:
    """The levels that may be read here, whether they exist or not; the run directory at least."""
    try:
        noted = recall(run)
    except CorruptionError:  # the note is only a note
        noted = ()
    here = [entry for entry in noted if _is_here(entry, run) and not other_owner(entry.where, run)]
    if not any(os.path.realpath(entry.where) == os.path.realpath(run) for entry in here):
        here.append(itself(run))
    return here


class Places(list[LevelShelf]):
    """The levels that exist, for one look. has_all: whether all of them do."""

    def __init__(self, fs: Fs, levels: list[Remembered]) -> None:
        super().__init__(LevelShelf(fs, entry) for entry in levels if is_directory(entry.where))
        self.has_all = len(self) == len(levels)

    @property
    def were_listed(self) -> bool:
        """After their steps were asked for: whether no step can be at a level that was not seen."""
        return self.has_all and not any(place.could_not_list for place in self)

    @property
    def read_bytes(self) -> int:
        """How many bytes of documents were read."""
        return sum(place.read_bytes for place in self)

    def stamps(self, step: int) -> Hashable:
        """Tells the save of a step at all levels from other saves."""
        return tuple(place.stamp(step) for place in self)

    def committed_s(self, step: int) -> float:
        """When the step was committed at the nearest level, in seconds since 1970."""
        known = (place.committed_s(step) for place in self)
        return next((each for each in known if each is not None), time.time())


def _is_here(entry: Remembered, run: str) -> bool:
    is_near = entry.kind != "objects" and not entry.per_host
    return is_near and entry.host in ("", socket.gethostname()) and _is_trusted(entry, run)


def _is_trusted(entry: Remembered, run: str) -> bool:
    """The owner of the run has made what is read as its memory."""
    where = os.path.realpath(entry.where)
    return entry.kind != "memory" or not os.path.exists(where) or is_own(where, os.stat(run).st_uid)


# -- waiting for a change --------------------------------------------------------------------------
# The kernel tells about changes by processes of this host only, so a directory that other hosts can
# change is looked at every `POLL_S`. Nobody who changes a directory waits for this.


POLL_S = 0.25
# A look now and then costs nothing, and survives an event that was lost.
TOLD_POLL_S = 5.0
# File systems that no other host changes.
_LOCAL = frozenset(
    {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay"}
)
_MOVED_TO, _DELETE_SELF, _MOVE_SELF = 0x80, 0x400, 0x800  # linux/inotify.h
_EVENTS = _MOVED_TO | _DELETE_SELF | _MOVE_SELF
_EVENT_BYTES = 64 << 10


class Watching:
    """One thread waits; any thread may call wake().

    It has one inotify descriptor, and a pipe that ends a wait from another thread. A change after
    watch() ends the next wait(), or wait() returns within `POLL_S`.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._opened()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_told = False
        self._local: dict[str, bool] = {}
        self._poll = select.poll()
        for descriptor in (self._events, self._woken):
            if descriptor >= 0:
                self._poll.register(descriptor, select.POLLIN)

    def _opened(self) -> int:
        """An inotify descriptor; -1 if the kernel has none for this process."""
        if not hasattr(self._libc, "inotify_init1"):
            return -1
        return int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def watch(self, directories: Iterable[str]) -> None:
        """Wait for changes of these directories from now on. Missing ones are looked for."""
        told = [self._add(each) for each in directories]  # all of them, whatever the first one is
        self._is_told = all(told)

    def wait(self, timeout_s: float | None) -> None:
        """Return after a change, after wake(), or when it is time to look or to end."""
        limit_s = TOLD_POLL_S if self._is_told else POLL_S
        if timeout_s is not None:
            limit_s = min(limit_s, timeout_s)
        for descriptor, _ in self._poll.poll(max(0.0, limit_s) * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, _EVENT_BYTES)

    def wake(self) -> None:
        """End the wait under way, or the next one."""
        with contextlib.suppress(BlockingIOError):  # it is full of calls that nobody has heard
            os.write(self._waker, b"\0")

    def close(self) -> None:
        """End; no thread waits."""
        for descriptor in (self._events, self._woken, self._waker):
            if descriptor >= 0:
                os.close(descriptor)
        self._events = self._woken = self._waker = -1

    def _add(self, directory: str) -> bool:
        """Whether the kernel tells about every change of a directory."""
        path = os.fsencode(directory)
        if self._events < 0 or self._libc.inotify_add_watch(self._events, path, _EVENTS) < 0:
            return False
        if directory not in self._local:
            self._local[directory] = mount_of(directory).kind in _LOCAL
        return self._local[directory]
