"""What an offloaded optimizer has moved and waited for, since it was made.

Invariants: a `Stats` is a value, and later updates do not change it. The seconds of a direction are
those in which at least one of its transfers was under way, or waited for the turn of its path,
however many there were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["read", "update", "write"]


@dataclass(frozen=True, slots=True)
class PathStats:
    """The figures of one path, in bytes and seconds.

    Attributes:
        path: as the optimizer was given it.
        subgroups: those that the path gets now, by the bandwidths so far.
        read_bytes: read from the path.
        read_s: seconds with a read under way.
        written_bytes: written to the path.
        write_s: seconds with a write under way.
        busy_s: seconds with a read, a write, or both under way.
        given_up: None, or why the path gets no more writes.
    """

    path: str
    subgroups: int
    read_bytes: int
    read_s: float
    written_bytes: int
    write_s: float
    busy_s: float
    given_up: str | None


@dataclass(frozen=True, slots=True)
class Stats:
    """All figures of an optimizer, in bytes and seconds.

    Attributes:
        updates: calls of step() that have updated parameters.
        update_s: their duration.
        compute_s: the part of update_s that is arithmetic.
        waited_s: the part of update_s that is waits for transfers.
        hidden_s: seconds with a transfer under way in which nothing waited for it.
        hits: subgroups that an update has found in memory.
        misses: subgroups that an update has read.
        state_bytes: the whole state.
        cache_bytes: what Host keeps of the state.
        buffer_bytes: memory that the pipeline has in addition.
        pinned_bytes: copies of what parameters on devices have.
        device_bytes: memory on devices for updates there.
        device_updates: updates of a subgroup on a device.
        device_subgroups: the subgroups that devices update.
        paths: the figures of each path.
    """

    updates: int
    update_s: float
    compute_s: float
    waited_s: float
    hidden_s: float
    hits: int
    misses: int
    state_bytes: int
    cache_bytes: int
    buffer_bytes: int
    pinned_bytes: int
    device_bytes: int
    device_updates: int
    device_subgroups: int
    paths: Sequence[PathStats]


@dataclass(frozen=True, slots=True)
class Event:
    """A subgroup was read from a path, updated in memory, or written to a path.

    Attributes:
        kind: which of the three.
        subgroup: its number.
        path: the path; of an update the device, and None on the host.
        begin_s: of time.perf_counter().
        end_s: of time.perf_counter().
    """

    kind: Kind
    subgroup: int
    path: str | None
    begin_s: float
    end_s: float


class Timeline:
    """Keeps events while somebody records them, and nothing otherwise. Thread-safe."""

    def __init__(self) -> None:
        self._events: list[Event] | None = None

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """A list that takes each event when it ends, until the block is left."""
        outer, self._events = self._events, []
        try:
            yield self._events
        finally:
            self._events = outer

    @contextmanager
    def during(self, kind: Kind, subgroup: int, path: str | None = None) -> Iterator[None]:
        """Around one event. An event that fails is kept, too, because it has taken its time."""
        events, begin = self._events, time.perf_counter()
        try:
            yield
        finally:
            if events is not None:
                events.append(Event(kind, subgroup, path, begin, time.perf_counter()))


class Meter:
    """Bytes of transfers, and the seconds with at least one of them under way. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._active, self._since = 0, 0.0
        self.nbytes, self.busy_s = 0, 0.0

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Around a transfer of `nbytes`, which count if it succeeds."""
        with self._guard:
            if self._active == 0:
                self._since = time.perf_counter()
            self._active += 1
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._guard:
                self._active -= 1
                self.nbytes += moved
                if self._active == 0:
                    self.busy_s += time.perf_counter() - self._since
