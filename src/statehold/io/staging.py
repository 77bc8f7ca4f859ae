"""The staging memory of a run: its size, and the engine and the devices that use it.

    staging_bytes is given    this size, from the opening on
    it is not                 FIRST_BYTES from the opening on, which is enough for a restore. If
                              this rank writes more than that of a step: one and a quarter of what
                              it writes, but at most its share of the memory that is available

Invariants: the size is chosen before a byte of such a step is copied, while nothing is under way.
It is chosen again only for a step that has outgrown that quarter, because an optimizer has no state
before its first step. In between nothing grows. There are always two buffers.
Not here: the memory that is available (process/host_memory), the use of buffers (the engine).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from statehold import _core
from statehold.errors import StorageError
from statehold.io.clients import open_engine
from statehold.options.io import settled
from statehold.process import host_memory as memory
from statehold.tensors.devices import Devices
from statehold.units import GiB, format_bytes

if TYPE_CHECKING:
    from statehold._core import Engine, Fs
    from statehold.options import Options
    from statehold.process.host_memory import Room

FIRST_BYTES = GiB
# The ranks of a host get one part in so many of the available memory. The rest is for training
# after its first save: activations, data loaders, page cache.
SHARE = 3

logger = logging.getLogger("statehold")


def chosen(step_bytes: int, available_bytes: int, ranks: int) -> int:
    """The staging memory for steps in which this rank writes `step_bytes`.

    A quarter more than the step. So a state may grow a little, and the next save finds buffers
    while the last ones of this save are written.
    """
    wanted = max(FIRST_BYTES, step_bytes + step_bytes // 4)
    return min(wanted, available_bytes // SHARE // ranks)


class Staging:
    """An engine and its devices. `ranks`: how many share the memory of the host."""

    engine: Engine
    devices: Devices
    nbytes: int  # what a save, or another client of the engine, may use

    def __init__(self, fs: Fs, options: Options, ranks: int) -> None:
        self._fs = fs
        self._options = options
        self.ranks = ranks
        self._fits = 0  # bytes of the largest step for which a size was chosen
        self._copied = 0  # bytes of the largest step so far
        size = options.staging_size
        self._open(chosen(0, memory.available().nbytes, ranks) if size is None else size)

    def fit(self, step_bytes: int, drain: Callable[[], None]) -> None:
        """Make sure that there is memory for copying `step_bytes`. `drain` ends the work under
        way."""
        if self._options.staging_bytes is not None:
            return
        if step_bytes > max(self._fits, self.nbytes):
            self._choose(step_bytes, drain)
        self._copied = max(self._copied, step_bytes)

    def close(self) -> None:
        """Release the memory. Every job has ended."""
        self.devices.close()
        self.engine.close()

    def _choose(self, step_bytes: int, drain: Callable[[], None]) -> None:
        before = self.nbytes
        drain()
        room = memory.available()
        # The old memory is released before new memory is taken.
        size = chosen(step_bytes, room.nbytes + min(before, self._copied), self.ranks)
        if size > before:
            self._reopen(size, before)
        self._fits = step_bytes + step_bytes // 4
        self._log_size(step_bytes, room)

    def _reopen(self, size: int, before: int) -> None:
        self.close()
        try:
            self._open(size)
        except StorageError as error:
            logger.warning("cannot enlarge the staging memory: %s", error)
            self._open(before)

    def _open(self, size: int) -> None:
        moving = settled(self._options.io)
        buffer = moving.buffer_bytes
        whole = max(2, size // buffer) * buffer
        self.engine = open_engine(self._fs, whole, buffer, moving.copy_threads)
        self.nbytes = whole
        self.devices = Devices(_core.call_copies)

    def _log_size(self, step_bytes: int, room: Room) -> None:
        size = self.nbytes
        shared = f", shared by {self.ranks} ranks" if self.ranks > 1 else ""
        text = (
            f"staging memory of {format_bytes(size)} for {format_bytes(step_bytes)} of a step: at "
            f"most a third of {format_bytes(room.nbytes)} {room.limit}{shared}"
        )
        if size < step_bytes:
            text += "; updates also wait for writes, and staging_bytes=... overrides this"
        logger.info("%s", text)
