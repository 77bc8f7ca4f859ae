"""The optimizers of a node move bytes on a path one at a time, in each direction.

Several writers on one device make each other slower than they would be one after another
(MLP-Offload, arXiv 2509.02480). So a transfer takes the turn of its path and direction. Threads
that want the turn while it is being taken share it. Later ones join them, unless another optimizer
waits. Then the turn ends with the transfers that are under way.

Who waits holds NEXT, and then takes TURN. So the last owner, who has to take NEXT first, cannot
overtake: nobody starves. A turn is held only around a transfer, and with no other turn, so there is
no deadlock. The kernel drops the lock of an owner that dies. An owner that was stopped keeps it:
who has waited WAIT_S goes on without the turn, and waits no more until the turn is free again.

The locks are bytes of one file of this user in the memory of the node (process/file_locks): other
nodes that use a parallel file system have turns of their own, and taking a turn is no I/O.

Invariants: with turns that cannot be taken, transfers go on without. They are only for speed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from statehold.errors import StorageError
from statehold.observe.background_log import log_once
from statehold.process.file_locks import LockFile

WAIT_S = 5.0


class Turn:
    """The turn of one path and direction. lock: None takes no turns. byte: and the next one."""

    def __init__(self, lock: LockFile | None, byte: int) -> None:
        self._lock, self._turn, self._next = lock, byte, byte + 1
        self._changed = threading.Condition()
        self._users = 0  # threads that have the turn, or share the one that is being taken
        self._is_held = False
        self._patience_s = WAIT_S

    @property
    def is_wanted(self) -> bool:
        """Whether another optimizer waits for the turn."""
        return self._lock is not None and self._lock.is_taken(self._next)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Around a transfer."""
        if self._lock is None:
            yield
            return
        self._enter(self._lock)
        try:
            yield
        finally:
            self._leave(self._lock)

    def _enter(self, lock: LockFile) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_held and self.is_wanted))
            self._users += 1
            if self._users > 1:
                self._changed.wait_for(lambda: self._is_held)
                return
        with contextlib.suppress(OSError):  # the kernel is out of locks
            self._wait_for(lock)
        with self._changed:
            self._is_held = True
            self._changed.notify_all()

    def _wait_for(self, lock: LockFile) -> None:
        is_ours = False
        if lock.take(self._next, self._patience_s):
            try:
                is_ours = lock.take(self._turn, self._patience_s)
            finally:
                lock.drop(self._next)
        if not is_ours:
            log_once(f"an optimizer goes on without its turn on a path, after {WAIT_S:g} s")
        self._patience_s = WAIT_S if is_ours else 0.0

    def _leave(self, lock: LockFile) -> None:
        with self._changed:
            self._users -= 1
            if self._users == 0:
                self._is_held = False
                lock.drop(self._turn)
                self._changed.notify_all()


class PathTurns:
    """The turns of the optimizer that makes this, on the path `directory`: `read` and `write`.

    directory: None waits for nobody.
    """

    def __init__(self, directory: str | None) -> None:
        self._lock = None if directory is None else _open(directory)
        self.read, self.write = Turn(self._lock, 0), Turn(self._lock, 2)

    def close(self) -> None:
        """No transfer is under way."""
        if self._lock is not None:
            self._lock.close()


def _open(directory: str) -> LockFile | None:
    try:
        return LockFile.in_memory(directory)
    except (OSError, StorageError) as error:
        log_once(f"optimizers take no turns on their paths, because their locks fail: {error}")
        return None
