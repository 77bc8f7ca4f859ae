"""Waits until the names in some directories may have changed: told by the kernel, or by looking.

Owns: one inotify descriptor, and a pipe that ends a wait from another thread.
Invariants: a change after watch() ends the next wait(), or wait() returns within `POLL_S`. The
kernel tells about changes by processes of this host only, so a directory that other hosts can
change is looked at every `POLL_S`. Nobody who changes a directory waits for this.
Not here: what the names mean (subscribe).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Iterable

from statehold.io.mounts import mount_of

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
    """One thread waits; any thread may call wake()."""

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
