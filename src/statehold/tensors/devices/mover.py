"""The side streams of one save or restore, and the newest work on each.

Invariants: no wait of a save's thread is inside the driver. A process can end beside a thread that
sleeps between two questions, and a device that hangs must not keep it from that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import groupby

import torch

from statehold.tensors.captured import Number
from statehold.tensors.devices.backends import Event, Stream, StreamBackend
from statehold.tensors.devices.jobs import CallCopies, Lent, Piece
from statehold.tensors.devices.pinning import Pinning
from statehold.tensors.storable import device_of

# Before a device is asked again: at first, and after some vain questions. Each question takes the
# interpreter lock from a program that launches kernels.
PATIENCE_S, PATIENCE_MAX_S = 0.001, 0.016

# Enqueues the work between buffers and tensors of one device, on its stream.
Enqueue = Callable[[Stream, Sequence[tuple[torch.Tensor, Sequence[Piece]]]], object]


class Mover:
    """Work between lent buffers and device tensors, on one side stream a device. device_of: of the
    tensors, by segment; distinct: all for which there is a stream."""

    def __init__(
        self,
        backend: StreamBackend,
        device_of: Mapping[int, torch.device],
        pinning: Pinning,
        distinct: Iterable[torch.device],
        call: CallCopies | None = None,
    ) -> None:
        self.backend = backend
        self.call = call
        self._pinning = pinning
        self._device_of = device_of
        self._streams: dict[torch.device, Stream] = dict.fromkeys(distinct)
        with self.using():
            self._streams = {device: backend.fork(device) for device in self._streams}
        self._newest: dict[torch.device, Event] = {}
        # Since when there is work that a device has done none of, on the monotonic clock.
        self.waits_since: float | None = None

    def using(self) -> AbstractContextManager[None]:
        """Inside, the calling thread works for these devices; see StreamBackend."""
        return self.backend.using(next(iter(self._streams)))

    def pinned(self) -> AbstractContextManager[None]:
        """Inside, what is pinned stays pinned."""
        return self._pinning.used()

    def newest(self) -> list[Event]:
        """The events that complete with all that was enqueued so far."""
        return list(self._newest.values())

    def wait(self) -> None:
        """Return once the side streams have done all that they were given. Torch then reads what
        they made without a wait of its own. Inside using()."""
        for stream in self._streams.values():
            self.wait_for(self.backend.record(stream))

    def wait_for(self, event: Event) -> None:
        """Return once the event has completed. Inside using()."""
        if threading.current_thread() is threading.main_thread():
            # No signal's handler may end this wait: the memory that the device uses would be freed.
            self.backend.synchronize(event)
            return
        self.waits_since = self.waits_since or time.monotonic()
        patience_s = PATIENCE_S
        while not self.backend.is_complete(event):
            time.sleep(patience_s)
            patience_s = min(2 * patience_s, PATIENCE_MAX_S)
        self.waits_since = None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Inside, work is enqueued. What raises there comes out once that has been done: until then
        nobody may give memory back that it touches. Inside using()."""
        try:
            yield
        except BaseException:
            for stream in self._streams.values():
                with suppress(RuntimeError):  # of the device: it is on its way to the caller
                    self.wait_for(self.backend.record(stream))
            raise

    def make_current_wait(self, events: Iterable[Event] | None = None) -> None:
        """Order the current streams after the events; None: after all that was moved."""
        with self.using():
            for event in self.newest() if events is None else events:
                self.backend.make_current_wait(event)

    def move(self, lent: Iterable[Lent], enqueue: Enqueue) -> list[Event]:
        """Enqueue the work on buffers: for each device on its stream. The events that complete
        with it."""
        parts: dict[torch.device, list[tuple[torch.Tensor, Sequence[Piece]]]] = {}
        for buffer in lent:
            host = torch.frombuffer(buffer.view, dtype=torch.uint8)
            self._pinning.pin(host)
            device, *others = self._streams
            if not others:  # then a question for each piece tells nothing
                parts.setdefault(device, []).append((host, buffer.pieces))
                continue
            for device, pieces in groupby(buffer.pieces, lambda piece: self._device_of[piece[0]]):
                parts.setdefault(device, []).append((host, list(pieces)))
        for device, each in parts.items():
            with self.on(device):
                enqueue(self._streams[device], each)
        return [self._newest[device] for device in parts]

    def read(self, numbers: Iterable[Number]) -> None:
        """Fill in what these tensors hold. After wait()."""
        with self.using():
            for number in numbers:
                with self.on(device_of(number.tensor)):
                    number.fill_in(number.tensor.item())

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Inside, what the calling thread does on the device is work of its side stream."""
        stream = self._streams[device]
        try:
            with self.backend.on(stream):
                yield
        finally:  # part of it may be under way
            self._newest[device] = self.backend.record(stream)
