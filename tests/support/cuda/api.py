"""What statehold calls of `torch.cuda` and of the CUDA runtime, for an emulated machine.

Invariants: the facts about CUDA that have bitten. The current device and stream are each thread's
own; the runtime makes a context on whatever device is current; a stream context of torch comes back
through the device that was current; torch has few streams, and hands each out again and again; an
error is reported by whatever is called next, for ever; in a capture of the global mode other
threads may not call what is unsafe, unless they have said that they know.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from support.cuda.streams import Event, Stream

if TYPE_CHECKING:
    from support.cuda.machine import Machine


class Graph:
    """CUDAGraph: the work that was given to a stream while it was captured."""

    machine: Machine

    def __init__(self, keep_graph: bool = False) -> None:
        self.work: list[Any] = []
        self._stream: Stream | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self.work, self._stream = [], self.machine.current()
        self._stream.capture = self.work
        self.machine.begin_capture(self, capture_error_mode)

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.capture = None
        joined = [each for each in self.machine.timeline.streams if each.capture is self.work]
        self.machine.end_capture(self)
        if joined:
            raise torch.AcceleratorError("CUDA error: capturing stream has unjoined work")

    def replay(self) -> None:
        stream = self.machine.current()
        for work in self.work:
            self.machine.timeline.give(stream, work)

    def reset(self) -> None:
        self.work = []

    def pool(self) -> tuple[int, int]:
        return (0, id(self))


class AcceleratorGraph(Graph):
    """torch.accelerator.Graph: the same with settings of its own. It is no CUDAGraph."""

    def capture_begin(self) -> None:
        super().capture_begin()

    def __enter__(self) -> None:
        self.capture_begin()

    def __exit__(self, *_: object) -> None:
        self.capture_end()


class Cuda:
    """In the place of the module torch.cuda."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.Event = Event
        self.CUDAGraph = type("CUDAGraph", (Graph,), {"machine": machine})
        # A library's own, such as CuPy's: torch knows nothing of it.
        self.ForeignGraph = type("ForeignGraph", (Graph,), {"machine": machine})

    def Stream(self, device: Any = None) -> Stream:
        return self._machine.pooled_stream(self._machine.device(device))

    def ExternalStream(self, stream_ptr: int, device: Any = None) -> Stream:
        stream = self._machine.created[stream_ptr]
        assert stream.device == self._machine.device(device)
        return stream

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self._machine.is_initialized

    def device_count(self) -> int:
        return self._machine.count

    def current_device(self) -> int:
        self._machine.is_initialized = True
        return self._machine.local.device

    def set_device(self, device: Any) -> None:
        self._machine.set_device(self._machine.device(device).index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._machine.local.device
        self._machine.set_device(self._machine.device(device).index)
        try:
            yield
        finally:  # torch goes back without making a context
            self._machine.local.device = before

    def current_stream(self, device: Any = None) -> Stream:
        self._machine.is_initialized = True
        return self._machine.current(self._machine.device(device).index)

    def default_stream(self, device: Any = None) -> Stream:
        return self._machine.default(self._machine.device(device).index)

    def set_stream(self, stream: Stream) -> None:
        assert stream.device.index is not None
        self._machine.set_device(stream.device.index)
        self._machine.local.streams[stream.device.index] = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        here = self.current_stream()
        there = self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            if here.device != stream.device:
                self.set_stream(there)
            self.set_stream(here)

    def synchronize(self, device: Any = None) -> None:
        self._machine.finish()

    def is_current_stream_capturing(self) -> bool:
        if self._machine.local.device not in self._machine.contexts:
            return False  # torch makes no context for that
        self._machine.touch("cudaStreamIsCapturing")
        return self._machine.current().capture is not None

    @contextmanager
    def graph(self, graph: Any, stream: Stream | None = None, **options: Any) -> Iterator[None]:
        with self.stream(stream or self.Stream()):
            graph.capture_begin(**options)
            try:
                yield
            finally:
                graph.capture_end()

    def cudart(self) -> Runtime:
        self._machine.is_initialized = True
        return Runtime(self._machine)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        index = self._machine.device(device).index
        limit = self._machine.memory.limits.get(index, 1 << 40)
        return limit - self._machine.memory.allocated.get(index, 0), limit


class Runtime:
    """The functions of the CUDA runtime that statehold calls."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self._machine.answers("cudaHostRegister"):
            return 700
        if not self._machine.may_pin:
            self._machine.local.error = "CUDA error: out of memory"
            return 2
        return self._machine.pins.add(address, nbytes)

    def cudaHostUnregister(self, address: int) -> int:
        if not self._machine.answers("cudaHostUnregister"):
            return 700
        return self._machine.unpin(address)

    @property
    def cudaMemcpyAsync(self) -> Any:
        """A function for C; statehold has the engine call it."""
        return self._machine.copy_async

    def cudaStreamCreateWithFlags(self, stream: Any, flags: int) -> int:
        assert flags == 1, "a stream that waits for the default stream"
        if not self._machine.answers("cudaStreamCreateWithFlags"):
            return 700
        if not self._machine.may_create_streams:
            self._machine.local.error = "CUDA error: out of memory"
            return 2
        _pointed(stream, ctypes.c_void_p).value = self._machine.create_stream()
        return 0

    def cudaGetLastError(self) -> None:
        self._machine.local.error = ""

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        before = 2 if self._machine.local.is_relaxed else 0
        self._machine.local.is_relaxed = _pointed(mode, ctypes.c_int).value == 2
        _pointed(mode, ctypes.c_int).value = before


def _pointed(to: Any, kind: Any) -> Any:
    """What an argument that was made by ctypes.byref() points to."""
    return ctypes.cast(to, ctypes.POINTER(kind)).contents


def copy_async(machine: Machine) -> Any:
    """cudaMemcpyAsync from a device to the host. Errors are returned, as those of the runtime."""

    def copy(to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        assert kind == 2, "not a copy to the host"
        try:
            machine.copy_to_host(to, source, nbytes, machine.timeline.by_number[stream])
        except torch.AcceleratorError:
            return 700
        return 0

    size, address = ctypes.c_size_t, ctypes.c_size_t
    return ctypes.CFUNCTYPE(ctypes.c_int, address, address, size, ctypes.c_int, address)(copy)


class Local(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.is_relaxed = False
        self.error = ""  # a call has returned it; the next launch reports it once more


def device_of(machine: Machine, device: Any) -> torch.device:
    if device is None:
        return torch.device("cuda", machine.local.device)
    if isinstance(device, int):
        return torch.device("cuda", device)
    device = torch.device(device)
    return device if device.index is not None else torch.device("cuda", machine.local.device)
