"""The optimizers of a node move bytes on a path one at a time, in each direction.

Several writers on one device make each other slower than they would be one after another
(MLP-Offload, arXiv 2509.02480). So a transfer takes the turn of its path and direction. Threads
that want the turn while it is being taken share it. Later ones join them, unless another optimizer
waits. Then the turn ends with the transfers that are under way.

Who waits holds NEXT, and then takes TURN. So the last owner, who has to take NEXT first, cannot
overtake: nobody starves. A turn is held only around a transfer, and with no other turn, so there is
no deadlock. The kernel drops the lock of an owner that dies.

The locks are bytes of one file of this user in the memory of the node: other nodes that use a
parallel file system have turns of their own, and taking a turn is no I/O.

Invariants: with turns that cannot be taken, transfers go on without. They are only for speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator

from statehold.observe.once import log_once
from statehold.process.file_locks import LockFile

__all__ = ["Turn", "Turns"]

SHARED_MEMORY = "/dev/shm"


class Turn:
    """The turn of one path and direction. lock: None takes no turns. byte: and the next one."""

    def __init__(self, lock: LockFile | None, byte: int) -> None:
        self._lock, self._turn, self._next = lock, byte, byte + 1
        self._changed = threading.Condition()
        self._users = 0  # threads that have the turn, or share the one that is being taken
        self._is_held = False

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
            lock.take(self._next)
            lock.take(self._turn)
            lock.drop(self._next)
        with self._changed:
            self._is_held = True
            self._changed.notify_all()

    def _leave(self, lock: LockFile) -> None:
        with self._changed:
            self._users -= 1
            if self._users == 0:
                self._is_held = False
                lock.drop(self._turn)
                self._changed.notify_all()


class Turns:
    """The turns of the optimizer that makes this, on the path `directory`: `read` and `write`.

    directory: None waits for nobody.
    """

    def __init__(self, directory: str | None) -> None:
        self._lock = None if directory is None else _open()
        byte = 0 if directory is None else _first_byte(directory)
        self.read, self.write = Turn(self._lock, byte), Turn(self._lock, byte + 2)

    def close(self) -> None:
        """No transfer is under way."""
        if self._lock is not None:
            self._lock.close()


def _open() -> LockFile | None:
    folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()
    path = f"{folder}/statehold-offload-{os.getuid()}.lock"
    try:
        return LockFile(path)
    except OSError as error:
        log_once(f"optimizers take no turns on their paths, because {path} fails: {error}")
        return None


def _first_byte(directory: str) -> int:
    """Where the four bytes of a directory are, under whatever name it is known."""
    found = os.stat(directory)
    name = f"{found.st_dev}:{found.st_ino}".encode()
    return 4 * int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
