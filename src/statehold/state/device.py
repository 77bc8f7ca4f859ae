"""Bytes between a device and the engine's staging buffers, through streams and events.

Owns: the side stream of each device, the order of copies against the training stream, the pinning
of the staging memory (once), and the moment from which the device state may change again.
Holds: a copy reads the state as the training stream had left it when the stager was made. A buffer
goes back to the engine only after the event behind its last copy, on failure too: the device never
writes into memory that is somebody else's by then. Nothing here waits for the device on the
training thread.
Not here: which tensors (capture, restore), the buffers themselves (engine).

How an update passes without waiting for bytes: once every copy is *enqueued*, the training stream
is made to wait for their last event (`DeviceStager.passing`); the update is queued behind them on
the device while the host goes on. Version counters are compared at that moment, because afterwards
they may move; if nobody passes, they are compared when all copies are done.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

logger = logging.getLogger("statehold")

__all__ = [
    "BlockingBackend",
    "CudaBackend",
    "DeviceLink",
    "DeviceLoader",
    "DeviceStager",
    "StreamBackend",
]

Piece = tuple[int, int, int, int]  # segment, offset in it, offset in the buffer, bytes


class Lent(Protocol):
    """A staging buffer that the engine lends to Python: a Fill or a Ready."""

    @property
    def pieces(self) -> list[Piece]: ...
    @property
    def view(self) -> memoryview: ...


LentT = TypeVar("LentT", bound=Lent)


class FillJob(Protocol[LentT]):
    """What the stager needs of a WriteJob."""

    @property
    def fills_left(self) -> int: ...
    def next_fill(self, timeout: float | None, /) -> LentT | None: ...
    def filled(self, fill: LentT, /) -> None: ...


class ReadyJob(Protocol[LentT]):
    """What the loader needs of a ReadJob."""

    @property
    def ready_left(self) -> int: ...
    def next_ready(self, timeout: float | None, /) -> LentT | None: ...
    def release(self, ready: LentT, /) -> None: ...


class Event(Protocol):
    """A point in the work of a side stream."""

    def synchronize(self) -> None:
        """Wait, on the host, until the work before it is done."""


class StreamBackend(Protocol):
    """The whole of what is asked of a device runtime."""

    def follow(self, device: torch.device) -> None:
        """Side work starts after what the current stream has been given so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        """Enqueue a copy between the device and the host on the side stream."""

    def record(self, device: torch.device) -> Event:
        """The point behind everything enqueued on the side stream so far."""

    def hold_back(self, device: torch.device, event: Event) -> None:
        """Later work of the current stream starts after the event."""

    def pin(self, address: int, nbytes: int) -> str:
        """Make host memory reachable by the device's copy engines; why not, or ""."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


class CudaBackend:
    """One side stream per device; staging memory registered with the driver."""

    # cudaHostRegisterPortable: pinned for every device of this process, not for the current one.
    _PORTABLE = 1

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def follow(self, device: torch.device) -> None:
        self._stream(device).wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        with torch.cuda.stream(self._stream(device)):
            target.copy_(source, non_blocking=True)

    def record(self, device: torch.device) -> Event:
        # blocking=True: the waiting thread sleeps instead of taking a core from the trainer.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(device))
        return event

    def hold_back(self, device: torch.device, event: Any) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def pin(self, address: int, nbytes: int) -> str:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, nbytes, self._PORTABLE)
        return "" if int(result) == 0 else f"cudaHostRegister failed with {result}"

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        return self._streams[device]


class _Passed:
    """The event behind a copy that is already done."""

    def synchronize(self) -> None:
        pass


class BlockingBackend:
    """For devices without streams of their own here: every copy is done when it returns."""

    def follow(self, device: torch.device) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        target.copy_(source)

    def record(self, device: torch.device) -> Event:
        return _Passed()

    def hold_back(self, device: torch.device, event: Event) -> None:
        pass

    def pin(self, address: int, nbytes: int) -> str:
        return ""

    def unpin(self, address: int) -> None:
        pass


class DeviceLink:
    """The way between devices and one engine's staging memory; it is pinned at the first use."""

    def __init__(
        self, staging: memoryview, address: int, backend: StreamBackend | None = None
    ) -> None:
        self._bytes = len(staging)
        self._address = address
        self._backend = backend
        self._is_pinned = False
        self.note = ""

    def stager(
        self, sources: Mapping[int, torch.Tensor], moved: Callable[[], str | None]
    ) -> DeviceStager:
        """Begin a save of `sources` (by segment) on the thread that trains."""
        return DeviceStager(self._opened(sources.values()), sources, moved)

    def loader(self, targets: Mapping[int, torch.Tensor]) -> DeviceLoader:
        """Begin a restore into `targets` (by segment)."""
        return DeviceLoader(self._opened(targets.values()), targets)

    def close(self) -> None:
        """Unpin. No job may be under way."""
        if self._backend is not None and self._is_pinned:
            self._backend.unpin(self._address)
            self._is_pinned = False

    def _opened(self, tensors: Iterable[torch.Tensor]) -> StreamBackend:
        if self._backend is None:
            kinds = {tensor.device.type for tensor in tensors}
            self._backend = CudaBackend() if kinds == {"cuda"} else BlockingBackend()
        if not self._is_pinned and not self.note:
            self.note = self._backend.pin(self._address, self._bytes)
            self._is_pinned = not self.note
            if self.note:
                logger.warning("staging memory is not pinned, copies are slower: %s", self.note)
        return self._backend


class DeviceStager:
    """The device tensors of one save. Make it, then `run` it on another thread."""

    def __init__(
        self,
        backend: StreamBackend,
        sources: Mapping[int, torch.Tensor],
        moved: Callable[[], str | None],
    ) -> None:
        self._wires = _Wires(backend, sources)
        self._moved: Callable[[], str | None] | None = moved
        self._guard = threading.Lock()
        self._torn: str | None = None
        self._enqueued = threading.Event()
        self._failed = False

    def run(self, job: FillJob[LentT]) -> None:
        """Fill every buffer that needs device bytes; returns when all copies are done.

        Raises the job's error, or the device's. Buffers go back to the engine either way.
        """
        lender = _Lender(job.next_fill, lambda: job.fills_left, job.filled)
        try:
            self._wires.pump(lender, self._wires.copy_out, self._enqueued.set)
            self._settle()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._wires.let_go()
            self._enqueued.set()

    def passing(self, timeout: float | None = None) -> bool:
        """Order the current streams behind the copies, without waiting for these.

        Waits until all are enqueued; False when that did not happen in time, or the copying failed.
        """
        if not self._enqueued.wait(timeout) or self._failed:
            return False
        self._settle()
        self._wires.hold_back()
        return True

    def torn(self) -> str | None:
        """The tensor that had changed when change was not allowed yet; valid after `run`."""
        return self._torn

    def _settle(self) -> None:
        with self._guard:
            if self._moved is not None:
                self._torn = self._moved()
                self._moved = None  # it holds on to the captured state


class DeviceLoader:
    """The device tensors of one restore."""

    def __init__(self, backend: StreamBackend, targets: Mapping[int, torch.Tensor]) -> None:
        self._wires = _Wires(backend, targets)

    def run(self, job: ReadyJob[LentT]) -> None:
        """Empty every verified buffer with device bytes; returns when all copies are done."""
        lender = _Lender(job.next_ready, lambda: job.ready_left, job.release)
        self._wires.pump(lender, self._wires.copy_in, lambda: None)
        self._wires.hold_back()


@dataclass(slots=True)
class _Lender(Generic[LentT]):
    """The two jobs, seen the same way."""

    take: Callable[[float | None], LentT | None]
    left: Callable[[], int]
    give_back: Callable[[LentT], None]


class _Wires:
    """Tensors by segment, as bytes, and the streams that move them."""

    def __init__(self, backend: StreamBackend, tensors: Mapping[int, torch.Tensor]) -> None:
        self._backend = backend
        self._bytes = {segment: _as_bytes(tensor) for segment, tensor in tensors.items()}
        self._ends: dict[torch.device, Event] = {}
        for device in {tensor.device for tensor in tensors.values()}:
            backend.follow(device)

    def pump(
        self,
        lender: _Lender[LentT],
        copy: Callable[[LentT], list[Event]],
        enqueued: Callable[[], None],
    ) -> None:
        """Lend, copy, give back, until the job has nothing more; `enqueued` after the last copy."""
        lent: deque[tuple[LentT, list[Event]]] = deque()
        try:
            while (buffer := _next(lender, lent)) is not None:
                # In the queue before the copies: whatever fails, it is given back.
                events: list[Event] = []
                lent.append((buffer, events))
                events += copy(buffer)
            enqueued()
            while lent:
                _give_back_oldest(lender, lent)
        finally:
            self._give_back_all(lender, lent)

    def copy_out(self, buffer: Lent) -> list[Event]:
        """Enqueue device -> buffer."""
        return self._copy(buffer, lambda host, device: (host, device))

    def copy_in(self, buffer: Lent) -> list[Event]:
        """Enqueue buffer -> device."""
        return self._copy(buffer, lambda host, device: (device, host))

    def let_go(self) -> None:
        """Forget the tensors; nothing is copied any more."""
        self._bytes.clear()

    def hold_back(self) -> None:
        """Order the current stream of every device behind all copies so far."""
        for device, event in self._ends.items():
            self._backend.hold_back(device, event)

    def _copy(
        self,
        buffer: Lent,
        direct: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> list[Event]:
        host = torch.frombuffer(buffer.view, dtype=torch.uint8)
        used: dict[torch.device, None] = {}
        for segment, offset, place, nbytes in buffer.pieces:
            remote = self._bytes[segment]
            here, there = host[place : place + nbytes], remote[offset : offset + nbytes]
            self._backend.copy(*direct(here, there), remote.device)
            used[remote.device] = None
        events = {device: self._backend.record(device) for device in used}
        self._ends.update(events)
        return list(events.values())

    def _give_back_all(
        self, lender: _Lender[LentT], lent: deque[tuple[LentT, list[Event]]]
    ) -> None:
        """After a failure: the device may still be writing, so wait before giving back."""
        while lent:
            for device in {remote.device for remote in self._bytes.values()}:
                _wait_regardless(self._backend, device)
            lender.give_back(lent.popleft()[0])


def _next(lender: _Lender[LentT], lent: deque[tuple[LentT, list[Event]]]) -> LentT | None:
    """The next buffer. While the device holds some, none may be free before one is given back."""
    while lender.left():
        buffer = lender.take(0.0 if lent else None)
        if buffer is not None:
            return buffer
        if lent:
            _give_back_oldest(lender, lent)
    return None


def _give_back_oldest(lender: _Lender[LentT], lent: deque[tuple[LentT, list[Event]]]) -> None:
    buffer, events = lent[0]
    for event in events:
        event.synchronize()
    lent.popleft()
    lender.give_back(buffer)


def _wait_regardless(backend: StreamBackend, device: torch.device) -> None:
    try:
        backend.record(device).synchronize()
    except RuntimeError:
        # The device's context is lost: it writes nowhere any more, and the first error is raised.
        return


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
