"""Runtime: what moves bytes in this process. It knows no run, no step and no rank.

    file system      io_uring or threads; or one from the caller
    staging memory   the engine and its buffers. With staging_bytes it has this size from the
                     opening on. Otherwise it has FIRST_BYTES, which is enough for a restore. If
                     this rank writes more than that of a step, it gets one and a quarter of what
                     it writes, but at most its share of the memory that is available
    devices          copies between devices and these buffers
    budget           how many ranks share the memory of this host

Invariants: a runtime outlives its sessions, which come one after the other. The next session finds
the staging memory as the last one left it, so a change of membership faults no page in again. Only
one session at a time uses a runtime: a step that makes the memory grow waits only for that session.
The size of staging memory is chosen before a byte of such a step is copied, while nothing is under
way. It is chosen again only for a step that has outgrown that quarter, because an optimizer has no
state before its first step. In between nothing grows. There are always two buffers.
Not here: the memory that is available (process/host_memory), the use of buffers (the engine), the
meaning of the bytes (checkpoint).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from statehold import _core
from statehold._core import Engine, Fs
from statehold.errors import StorageError
from statehold.io.clients import open_engine
from statehold.io.profile import tuned
from statehold.observe.background_log import log_once
from statehold.options import Options
from statehold.options.io import settled
from statehold.process import host_memory as memory
from statehold.process.host_memory import Room, ranks_on_host
from statehold.process.warn import logger
from statehold.tensors.devices import Devices
from statehold.units import GiB, format_bytes


class Runtime:
    """The file system, the staging memory, the engine and the devices.

    storage: the directory whose profile tunes `options`.
    fs: a file system from the caller, which no profile knows and which close() leaves open.
    world: the ranks of the job. Those on this host share its memory.
    engine: moves the bytes of saves and restores. devices: copy to and from its buffers. Both are
        others once the staging memory has grown. staging_bytes: what a save may use of it.
    """

    engine: Engine
    devices: Devices
    staging_bytes: int

    def __init__(
        self, options: Options, storage: str, *, world: int = 1, fs: Fs | None = None
    ) -> None:
        self.has_own_fs = fs is None
        self._fits = 0  # bytes of the largest step for which a size was chosen
        self._copied = 0  # bytes of the largest step so far
        self.serve(world)
        with contextlib.ExitStack() as owned:
            if fs is None:
                options, note = tuned(options, storage)
                log_once(note)
                fs = _open_fs(options)
                owned.callback(fs.close)
            self.fs, self.options = fs, options
            size = options.staging_size
            self._open(chosen(0, memory.available().nbytes, self._ranks) if size is None else size)
            owned.callback(self._close_engine)
            self._owned = owned.pop_all()

    def serve(self, world: int) -> None:
        """From now on the job has so many ranks."""
        self._ranks = ranks_on_host(world)

    def close(self) -> None:
        """Release everything. Every session on this runtime has ended."""
        self._owned.close()

    # -- staging memory --------------------------------------------------------------------

    def fit(self, step_bytes: int, drain: Callable[[], None]) -> None:
        """Make sure that there is memory for copying `step_bytes`. `drain` ends the work under
        way."""
        if self.options.staging_bytes is not None:
            return
        if step_bytes > max(self._fits, self.staging_bytes):
            self._choose(step_bytes, drain)
        self._copied = max(self._copied, step_bytes)

    def _choose(self, step_bytes: int, drain: Callable[[], None]) -> None:
        before = self.staging_bytes
        drain()
        room = memory.available()
        # The old memory is released before new memory is taken.
        size = chosen(step_bytes, room.nbytes + min(before, self._copied), self._ranks)
        if size > before:
            self._close_engine()
            try:
                self._open(size)
            except StorageError as error:
                logger.warning("cannot enlarge the staging memory: %s", error)
                self._open(before)
        self._fits = step_bytes + step_bytes // 4
        self._log_size(step_bytes, room)

    def _open(self, size: int) -> None:
        moving = settled(self.options.io)
        buffer = moving.buffer_bytes
        whole = max(2, size // buffer) * buffer
        self.engine = open_engine(self.fs, whole, buffer, moving.copy_threads)
        self.staging_bytes = whole
        self.devices = Devices(_core.call_copies)

    def _close_engine(self) -> None:
        """Every job has ended."""
        self.devices.close()
        self.engine.close()

    def _log_size(self, step_bytes: int, room: Room) -> None:
        size = self.staging_bytes
        shared = f", shared by {self._ranks} ranks" if self._ranks > 1 else ""
        text = (
            f"staging memory of {format_bytes(size)} for {format_bytes(step_bytes)} of a step: at "
            f"most a third of {format_bytes(room.nbytes)} {room.limit}{shared}"
        )
        if size < step_bytes:
            text += "; updates also wait for writes, and staging_bytes=... overrides this"
        logger.info("%s", text)


def _open_fs(options: Options) -> Fs:
    moving = settled(options.io)
    fs = _core.open_fs(moving.backend, moving.queue_depth)
    if moving.backend != "threads":  # otherwise a user asked for it
        log_once(fs.note and f"saving with threads instead of io_uring: {fs.note}")
    return fs


FIRST_BYTES = GiB
# The ranks of a host get one part in so many of the available memory. The rest is for training
# after its first save: activations, data loaders, page cache.
SHARE = 3


def chosen(step_bytes: int, available_bytes: int, ranks: int) -> int:
    """The staging memory for steps in which this rank writes `step_bytes`.

    A quarter more than the step. So a state may grow a little, and the next save finds buffers
    while the last ones of this save are written.
    """
    wanted = max(FIRST_BYTES, step_bytes + step_bytes // 4)
    return min(wanted, available_bytes // SHARE // ranks)
