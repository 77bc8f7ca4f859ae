"""Between device memory and the engine's buffers: copies on side streams, and what may follow them.

General layout: a StreamBackend knows one kind of device; `Devices` belongs to an open engine and
pins its buffers as they are used; `DeviceCopies` fills the buffers of one save, `Devices.load`
empties those of one restore. The engine appears only as the protocols below.

Holds, for a save:
- the side stream starts after everything that the current stream had been given when save() ran;
- a buffer is given back only after the copies into it have completed, also when the save fails;
- a source is kept alive until then;
- an update is let through before that only if every copy is enqueued, nothing has changed so far,
  and the updating stream has been made to wait for the last copy.
For a restore: the copies start after, and end before, what the current stream does around it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from statehold.errors import StateholdError
from statehold.state.capture import Capture, CapturedTensor

logger = logging.getLogger("statehold")

Event = Any
Stream = Any


class StreamBackend(Protocol):
    """What has to be known of a kind of device."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Let the device reach this host memory itself; False when it cannot."""

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy is under way."""

    def fork(self, device: torch.device) -> Stream:
        """A side stream whose work follows what the device's current stream has been given."""

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy between contiguous tensors of equal size."""

    def record(self, stream: Stream) -> Event:
        """An event that completes once the stream's work so far has."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event completes."""

    def make_current_wait(self, event: Event) -> None:
        """Order what the current stream of the event's device is given from now on after it."""


class Lent(Protocol):
    """A buffer in the hands of Python: (segment, offset in it, offset in `view`, bytes)."""

    @property
    def pieces(self) -> Sequence[tuple[int, int, int, int]]: ...
    @property
    def view(self) -> memoryview: ...


LentT = TypeVar("LentT", bound=Lent)


class FillJob(Protocol[LentT]):
    """The side of the engine's WriteJob that is used here."""

    def next_fill(self, timeout: float | None) -> LentT | None: ...
    def filled(self, fill: LentT) -> None: ...
    def wait_eager(self, timeout: float | None) -> bool: ...
    @property
    def fills_left(self) -> int: ...


class ReadyJob(Protocol[LentT]):
    """The side of the engine's ReadJob that is used here."""

    def next_ready(self, timeout: float | None) -> LentT | None: ...
    def release(self, ready: LentT) -> None: ...


class CudaBackend:
    """CUDA and ROCm: one side stream a device, copies by its copy engine."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pin(self, address: int, nbytes: int) -> bool:
        portable = 1  # for every device, not only the current one
        failed = int(_cudart().cudaHostRegister(address, nbytes, portable))
        if failed:
            # CUDA reports an error once more to whoever asks next: that must not be the trainer.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return not failed

    def unpin(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)

    def fork(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def copy(self, stream: torch.cuda.Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking waits sleep: the processors are for training.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def make_current_wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(event.device).wait_event(event)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class BlockingBackend:
    """Every other accelerator: plain copies, complete when they return."""

    def pin(self, address: int, nbytes: int) -> bool:
        return True  # nothing to do, and nothing to report

    def unpin(self, address: int) -> None:
        pass

    def fork(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def copy(self, stream: None, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def record(self, stream: None) -> None:
        pass

    def synchronize(self, event: None) -> None:
        pass

    def make_current_wait(self, event: None) -> None:
        pass


def backend_for(device: torch.device) -> StreamBackend:
    """The backend for devices of this type; a process has one type of accelerator."""
    return CudaBackend() if device.type == "cuda" else BlockingBackend()


class Devices:
    """The devices' side of one engine; does nothing until a state has tensors on a device."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._backend: StreamBackend | None = None
        self._pinned: set[int] = set()  # the addresses of buffers
        self._may_pin = True

    def copies(
        self, job: FillJob[LentT], captured: Capture, ordered: Sequence[CapturedTensor]
    ) -> DeviceCopies | None:
        """The device copies of a save; None when all is host memory. Call it inside save().

        Segment i + 1 of the job is ordered[i].
        """
        external = {
            segment: each.tensor for segment, each in enumerate(ordered, 1) if each.external
        }
        if not external:
            return None
        return DeviceCopies(job, captured, _Mover(self._for(external), external, self._pin))

    def load(self, job: ReadyJob[LentT], external: Mapping[int, torch.Tensor]) -> None:
        """Empty every buffer of a read into the device tensors, by segment."""
        if not external:
            return
        mover = _Mover(self._for(external), external, self._pin)
        mover.relay(job.next_ready, job.release, mover.buffer_to_device)
        mover.make_current_wait()

    def close(self) -> None:
        """Unpin; every job has ended."""
        while self._backend is not None and self._pinned:
            self._backend.unpin(self._pinned.pop())

    def _for(self, external: Mapping[int, torch.Tensor]) -> StreamBackend:
        if self._backend is None:
            self._backend = backend_for(next(iter(external.values())).device)
        return self._backend

    def _pin(self, buffer: torch.Tensor) -> None:
        """Pin a buffer of the engine when it is lent for the first time. Pinning makes memory
        present: a buffer that is never used should not take any."""
        address = buffer.data_ptr()
        with self._guard:
            if not self._may_pin or address in self._pinned:
                return
            assert self._backend is not None
            self._may_pin = self._backend.pin(address, buffer.nbytes)
            if self._may_pin:
                self._pinned.add(address)
            else:
                logger.warning("staging memory could not be pinned: device copies are slower")


class DeviceCopies:
    """The device copies of one save: `run` on a thread of their own, `passing` from the gate."""

    def __init__(self, job: FillJob[Any], captured: Capture, mover: _Mover) -> None:
        self._job = job
        self._captured = captured
        self._mover = mover
        self._enqueued = threading.Event()
        self._streams_suffice = not any(map(_is_lazy_on_host, captured.tensors))

    def run(self) -> None:
        """Fill every buffer the engine lends; returns when all the copies have completed."""
        self._note_progress()
        self._mover.relay(self._job.next_fill, self._job.filled, self._fill)

    def passing(self) -> bool:
        """Let updates on the current stream through, if they can be ordered after the copies.

        Not while a copy is still to be enqueued, nor for states with lazy tensors on the host,
        whose copying no stream waits for; nor if something has changed, which fails the save.
        """
        try:
            if not (self._streams_suffice and self._enqueued.is_set() and self._job.wait_eager(0)):
                return False
        except StateholdError:
            return False  # the save has failed, and its handle is about to say so
        if self._captured.settle() is not None:
            return False
        self._mover.make_current_wait()
        return True

    def _fill(self, fill: Lent) -> list[Event]:
        events = self._mover.device_to_buffer(fill)
        self._note_progress()
        return events

    def _note_progress(self) -> None:
        if self._job.fills_left == 0:
            self._enqueued.set()


class _Mover:
    """Copies between lent buffers and device tensors, on one side stream a device."""

    def __init__(
        self,
        backend: StreamBackend,
        tensors: Mapping[int, torch.Tensor],
        pin: Callable[[torch.Tensor], None],
    ) -> None:
        self._backend = backend
        self._tensors = tensors
        self._pin = pin
        devices = {tensor.device for tensor in tensors.values()}
        self._streams = {device: backend.fork(device) for device in devices}
        self._newest: dict[torch.device, Event] = {}

    def relay(
        self,
        take: Callable[[float | None], LentT | None],
        give_back: Callable[[LentT], None],
        move: Callable[[LentT], list[Event]],
    ) -> None:
        """Move every buffer that `take` lends; several are under way at once.

        The engine may have no buffer to lend before it gets one back, so this never waits for
        the next one while it holds any.
        """
        moving: deque[tuple[LentT, list[Event]]] = deque()
        try:
            while True:
                lent = take(0 if moving else None)
                if lent is not None:
                    moving.append((lent, []))  # before anything can fail: it is given back
                    moving[-1][1].extend(move(lent))
                elif moving:
                    self._land(*moving[0], give_back)
                    moving.popleft()
                else:
                    return
        finally:
            if moving:
                self._abandon(moving, give_back)

    def device_to_buffer(self, lent: Lent) -> list[Event]:
        """Enqueue the copies into a buffer; the events that complete with them."""
        return self._move(lent, lambda stream, host, own: self._backend.copy(stream, host, own))

    def buffer_to_device(self, lent: Lent) -> list[Event]:
        """Enqueue the copies out of a buffer; the events that complete with them."""
        return self._move(lent, lambda stream, host, own: self._backend.copy(stream, own, host))

    def make_current_wait(self) -> None:
        """Order the current streams after all that was moved."""
        for event in self._newest.values():
            self._backend.make_current_wait(event)

    def _move(
        self, lent: Lent, copy: Callable[[Stream, torch.Tensor, torch.Tensor], None]
    ) -> list[Event]:
        host = torch.frombuffer(lent.view, dtype=torch.uint8)
        self._pin(host)
        touched: dict[torch.device, Event] = {}
        try:
            for segment, offset, at, nbytes in lent.pieces:
                tensor = self._tensors[segment]
                own = _flat_bytes(tensor)[offset : offset + nbytes]
                touched[tensor.device] = None
                copy(self._streams[tensor.device], host[at : at + nbytes], own)
        finally:
            for device in touched:
                touched[device] = self._newest[device] = self._backend.record(self._streams[device])
        return list(touched.values())

    def _land(self, lent: LentT, events: list[Event], give_back: Callable[[LentT], None]) -> None:
        for event in events:
            self._backend.synchronize(event)
        give_back(lent)

    def _abandon(
        self, moving: Iterable[tuple[LentT, list[Event]]], give_back: Callable[[LentT], None]
    ) -> None:
        """After a failure: no buffer is given back while a copy may still touch it."""
        for event in self._newest.values():
            self._backend.synchronize(event)
        for lent, _ in moving:
            give_back(lent)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, whatever its dtype and flags."""
    begin = tensor.storage_offset() * tensor.element_size()
    size = tensor.numel() * tensor.element_size()
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), begin, (size,), (1,))


def _is_lazy_on_host(captured: CapturedTensor) -> bool:
    is_copied_in_time = captured.external or captured.owned or captured.eager
    return not is_copied_in_time and captured.spec.nbytes > 0
