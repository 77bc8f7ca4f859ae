"""Runtime: what moves bytes in this process. It knows no run, no step and no rank.

    file system      io_uring or threads; or one from the caller
    staging memory   the engine and its buffers, which a larger step may ask to grow
    devices          copies between devices and these buffers
    budget           how many ranks share the memory of this host

Invariants: a runtime outlives its sessions, which come one after the other. The next session finds
the staging memory as the last one left it, so a change of membership faults no page in again. Only
one session at a time uses a runtime: a step that makes the memory grow waits only for that session.
Not here: the size of the staging memory (staging), the meaning of the bytes (checkpoint).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from statehold import _core
from statehold.io.profile import tuned
from statehold.io.staging import Staging
from statehold.observe.background_log import log_once
from statehold.options.io import settled
from statehold.process.host_memory import ranks_on_host

if TYPE_CHECKING:
    from statehold._core import Engine, Fs
    from statehold.options import Options
    from statehold.tensors.devices import Devices


class Runtime:
    """The file system, the staging memory, the engine and the devices.

    storage: the directory whose profile tunes `options`.
    fs: a file system from the caller, which no profile knows and which close() leaves open.
    world: the ranks of the job. Those on this host share its memory.
    """

    def __init__(
        self, options: Options, storage: str, *, world: int = 1, fs: Fs | None = None
    ) -> None:
        self.has_own_fs = fs is None
        with contextlib.ExitStack() as owned:
            if fs is None:
                options, note = tuned(options, storage)
                log_once(note)
                fs = _open_fs(options)
                owned.callback(fs.close)
            self.fs, self.options = fs, options
            self._staging = Staging(fs, options, ranks_on_host(world))
            self.fit = self._staging.fit  # makes sure that a step has staging memory
            owned.callback(self._staging.close)
            self._owned = owned.pop_all()

    @property
    def engine(self) -> Engine:
        """The engine, which moves the bytes of saves and restores."""
        return self._staging.engine

    @property
    def staging_bytes(self) -> int:
        """How much staging memory a save may use."""
        return self._staging.nbytes

    @property
    def devices(self) -> Devices:
        """The devices, which copy to and from the engine's buffers."""
        return self._staging.devices

    @staticmethod
    def hash_memory(address: int, nbytes: int) -> int:
        """XXH3-64 of memory that the caller keeps alive and unchanged."""
        return _core.hash_memory(address, nbytes)

    def serve(self, world: int) -> None:
        """From now on the job has so many ranks."""
        self._staging.ranks = ranks_on_host(world)

    def close(self) -> None:
        """Release everything. Every session on this runtime has ended."""
        self._owned.close()


def _open_fs(options: Options) -> Fs:
    moving = settled(options.io)
    fs = _core.open_fs(moving.backend, moving.queue_depth)
    if moving.backend != "threads":  # otherwise a user asked for it
        log_once(fs.note and f"saving with threads instead of io_uring: {fs.note}")
    return fs
