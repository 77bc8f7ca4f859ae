"""Memory for the next save: a file that is made before it asks.

    RUN/.ready/rank-00000-of-00001.safetensors

Invariants: there is one such file at a time, and each rank has its own. All ranks that make one
take at most half of the free memory.
Not here: whether the level may keep one more file, and the files that are mapped (store).
"""

from __future__ import annotations

import contextlib
import errno
import threading

from statehold._core import File, Fs
from statehold.errors import StateholdError
from statehold.io.memory_room import free_bytes, open_file
from statehold.process.warn import logger
from statehold.process.worker import Flag, yield_processor
from statehold.steps.directories import unless

# -- the next file ---------------------------------------------------------------------------------
# Making the pages of a new file takes longer than copying into them. The first saves of a run have
# no retired file to overwrite. So a background thread makes a file, and the next save takes it as
# it would take a retired one. A save waits for the file that is being made, and never makes a
# second one. If the file cannot be made, a line is logged, and the save makes its own.


READY_NAME = ".ready"
_PART_BYTES = 64 << 20


class Ready:
    """At most one file, of the run directory `root`, made for the next save of one of `ranks`.

    Not thread-safe, except for the thread that makes the file. Callers hold the store's guard, or
    are its only user, the thread that commits.
    """

    def __init__(self, fs: Fs, root: str, ranks: int) -> None:
        self._fs = fs
        self._folder = f"{root}/{READY_NAME}"
        self._ranks = ranks
        self._name = ""
        self._file: File | None = None
        self._done = Flag()
        self._done.set()
        self._is_wanted = False

    def begin(self, name: str, file_bytes: int) -> None:
        """Make a file for the next save, which will call it `name`, unless there is one."""
        if self._file is not None or not self._done.is_set:
            return
        self._name, self._is_wanted = name, False
        self._done = Flag()
        try:
            threading.Thread(target=self._run, args=(file_bytes,), name="statehold-ready").start()
        except RuntimeError:  # no more threads, or the interpreter ends
            self._done.set()

    def wait(self) -> None:
        """Return once no file is being made, and hurry: a caller waits from now on."""
        self._is_wanted = True
        self._done.wait()

    def file(self, name: str) -> File | None:
        """The file of this name, if it is ready."""
        return self._file if self._done.is_set and self._name == name else None

    def path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def taken(self) -> None:
        """The file now belongs to a save."""
        self._file = None

    def drop(self) -> None:
        """Delete it, and the directory unless other ranks have files there."""
        self.wait()
        if not self._name:
            return
        file, self._file = self._file, None
        if file is not None:
            file.close()
            with unless(errno.ENOENT):  # rank 0 cleared the run
                self._fs.unlink(self.path(self._name))
        with contextlib.suppress(StateholdError):  # not empty, gone, or never made
            self._fs.rmdir(self._folder)

    # -- on the thread ---------------------------------------------------------------------

    def _run(self, file_bytes: int) -> None:
        reason = None
        try:
            yield_processor()
            reason = self._make(file_bytes)
        except (StateholdError, OSError) as error:
            reason = str(error)
        finally:
            self._done.set()
        if reason is not None:  # logged when no caller waits
            logger.info("cannot prepare a file in memory for the next save: %s", reason)

    def _make(self, file_bytes: int) -> str | None:
        """None, or why there is no file."""
        with unless(errno.EEXIST):  # another rank made it, or it was needed before
            self._fs.mkdir(self._folder)
        free = free_bytes(self._folder)
        if file_bytes * self._ranks > free // 2:
            return f"{file_bytes} bytes for each of {self._ranks} ranks, and {free} are free"
        path = self.path(self._name)
        if self._fs.stat_bytes(path) is not None:  # left by a killed job with this rank
            self._fs.unlink(path)
        file = open_file(self._fs, path, file_bytes, mapped=True, ranks=self._ranks)
        for begin in range(0, file_bytes, _PART_BYTES):
            if self._is_wanted:
                break  # the threads that copy do the rest, all of them
            file.populate(begin, min(_PART_BYTES, file_bytes - begin))
        self._file = file
        return None
