"""What a StorageReader and a StorageWriter stand on: directory, ranks, machine and telemetry.

The machine of one save or load is a file system and an engine, opened for it alone.

Invariants: nothing is open between two calls, so writers and readers can be pickled, forked around
and thrown away without close(). The staging memory is never larger than the moved bytes. A
directory is absolute as soon as it is given. Without one, the error says how to give it. Telemetry
fails no save and no load.
Not here: what is moved (writing, reader), the reports (checkpoint/telemetry).
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import torch.distributed as dist

from statehold import _core
from statehold._core import Engine, Fs
from statehold.checkpoint.telemetry.watch import UNWATCHED, SaveStats, Watch
from statehold.errors import UsageError
from statehold.io.clients import open_engine
from statehold.io.profile import tuned
from statehold.io.runtime import chosen
from statehold.observe.background_log import log_once
from statehold.observe.tracing import Trace
from statehold.options import Options
from statehold.options.io import settled
from statehold.options.paths import absolute
from statehold.process.host_memory import available, ranks_on_host

TRACES_MAX = 16

_traces: dict[str, Trace] = {}
_guard = threading.Lock()


# -- the common part of a reader and a writer ------------------------------------------------------


class StepEndpoint:
    """A directory that torch may replace, and the machine that moves bytes from or to it."""

    _call: str  # a call of torch that may give it

    def __init__(self, path: str | os.PathLike[str] | None, options: Options) -> None:
        super().__init__()
        self._path = None if path is None else absolute(path, "the checkpoint")
        self._machine = Machine(options)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the next call."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = absolute(checkpoint_id, "the checkpoint")

    def _directory(self) -> str:
        path = self.checkpoint_id
        if path is None:
            raise UsageError(
                f"a {self._call} needs a directory",
                hint=f"give {self._call}() a checkpoint_id, or the {type(self).__name__} a path",
            )
        return path


# -- the machine -----------------------------------------------------------------------------------


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
        with contextlib.closing(_core.open_fs(moving.backend, moving.queue_depth)) as fs:
            yield fs

    @contextlib.contextmanager
    def engine(self, fs: Fs, nbytes: int) -> Iterator[Engine]:
        """An engine for moving `nbytes`."""
        moving = settled(self.options.io)
        buffer = moving.buffer_bytes
        needed = (max(0, nbytes) // buffer + 2) * buffer
        given = self.options.staging_size
        size = chosen(needed, available().nbytes, ranks_on_host(1)) if given is None else given
        staging = min(size, needed)
        with contextlib.closing(open_engine(fs, staging, buffer, moving.copy_threads)) as engine:
            yield engine


# -- the ranks -------------------------------------------------------------------------------------


def rank_and_world() -> tuple[int, int]:
    """The rank of this process among those that load or save, and their number."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# -- telemetry -------------------------------------------------------------------------------------
# Telemetry is as for a Checkpointer. A run is here the directory of the checkpoints. The ranks that
# publish a save report it, because torch does not announce its end to the others. The events of a
# trace belong to the process, and its file is written again at the end of each call.


def watch_of(directory: str, trace: str | os.PathLike[str] | None) -> Watch:
    """The watch of a call that saves or loads the checkpoint `directory`."""
    rank, ranks = rank_and_world()
    recorded = None if trace is None else _recorded(os.path.abspath(trace), rank, ranks)
    return Watch(os.path.dirname(directory), rank, ranks, trace, recorded=recorded)


def _recorded(path: str, rank: int, ranks: int) -> Trace:
    with _guard:
        found = _traces.pop(path, None) or Trace(rank, ranks)
        _traces[path] = found  # now the newest
        while len(_traces) > TRACES_MAX:
            del _traces[next(iter(_traces))]
        return found


@contextlib.contextmanager
def traced(watch: Watch) -> Iterator[None]:
    """A call at whose end the trace is written, if there is one."""
    try:
        yield
    finally:
        with _guard:  # saves may end at the same time, on threads of their own
            watch.close()


class SaveWatch:
    """A save, from its first call to the last one that this rank gets."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()
        self._stats = SaveStats(0)

    @contextlib.contextmanager
    def stage(self, watch: Watch, name: str, step: int, *, is_last: bool) -> Iterator[None]:
        """A call of torch. The last call of a save that this rank publishes is reported."""
        with traced(watch):
            try:
                with watch.stage(name, step=step):
                    yield
            except BaseException:
                watch.save_began()
                watch.save_failed(self._begin_s, self._stats_at(step))
                raise
            if is_last:
                # torch does not announce the end of a save that another rank has failed. If saves
                # that begin without an end were counted, the figure would only grow.
                watch.save_began()
                watch.save_committed(self._begin_s, self._stats_at(step))

    def wrote(self, nbytes: int, tensors: int) -> None:
        """This rank's part is durable."""
        self._stats = SaveStats(0, state_bytes=nbytes, written_bytes=nbytes, tensors=tensors)

    def _stats_at(self, step: int) -> SaveStats:
        return replace(self._stats, step=step, committed_s=time.perf_counter() - self._begin_s)
