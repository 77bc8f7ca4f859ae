"""Telemetry of the saves and loads that torch drives, as for a Checkpointer.

A run is here the directory of the checkpoints. The ranks that publish a save report it, because
torch does not announce its end to the others. Nothing stays open between two calls. So the events
of a trace belong to the process, and its file is written again at the end of each call.

Invariants: nothing here fails a save or a load.
Not here: the reports (checkpoint/telemetry), the calls (writer, reader).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from statehold.checkpoint.telemetry.watch import SaveStats, Watch
from statehold.integrations.dcp.among import rank_and_world
from statehold.observe.tracing import Trace

TRACES_MAX = 16

_traces: dict[str, Trace] = {}
_guard = threading.Lock()


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
        found = self._stats
        return SaveStats(
            step,
            state_bytes=found.state_bytes,
            written_bytes=found.written_bytes,
            tensors=found.tensors,
            committed_s=time.perf_counter() - self._begin_s,
        )
