"""The machine of one save or load: a file system, an engine and its telemetry, opened for it alone.

Invariants: nothing is open between two calls, so writers and readers can be pickled, forked around
and thrown away without close(). The staging memory is never larger than the moved bytes.
Not here: what is moved (writing, targets).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statehold import _core
from statehold.checkpoint.telemetry.watch import UNWATCHED
from statehold.integrations.dcp.telemetry import watch_of
from statehold.io.clients import open_engine
from statehold.io.profile import tuned
from statehold.io.staging import chosen
from statehold.observe.background_log import log_once
from statehold.options import Options
from statehold.options.io import settled
from statehold.process.host_memory import available, ranks_on_host

if TYPE_CHECKING:
    from statehold._core import Engine, Fs


class Machine:
    """Opens engines with `options`."""

    watch = UNWATCHED  # not of the instance, which is pickled

    def __init__(self, options: Options) -> None:
        self.options = options
        self.borrowed_fs: Fs | None = None  # for tests

    def at(self, directory: str) -> Machine:
        """The machine for the checkpoint `directory`, watched.

        Options that were not given come from the profile of its storage.
        """
        options, note = self.options, ""
        if self.borrowed_fs is None:  # a profile belongs to a real storage
            options, note = tuned(options, directory)
        log_once(note)
        found = copy.copy(self)
        found.options, found.watch = options, watch_of(directory, options.trace)
        return found

    @contextlib.contextmanager
    def storage(self) -> Iterator[Fs]:
        if self.borrowed_fs is not None:
            yield self.borrowed_fs
            return
        moving = settled(self.options.io)
        fs = _core.open_fs(moving.backend, moving.queue_depth)
        try:
            yield fs
        finally:
            fs.close()

    @contextlib.contextmanager
    def engine(self, fs: Fs, nbytes: int) -> Iterator[Engine]:
        """An engine for moving `nbytes`."""
        moving = settled(self.options.io)
        buffer = moving.buffer_bytes
        needed = (max(0, nbytes) // buffer + 2) * buffer
        given = self.options.staging_size
        size = chosen(needed, available().nbytes, ranks_on_host(1)) if given is None else given
        staging = min(size, needed)
        engine = open_engine(fs, staging, buffer, moving.copy_threads)
        try:
            yield engine
        finally:
            engine.close()
