"""CUDA and ROCm: a side stream for each device and lane, and copies by the copy engines.

Torch has 32 streams a device, and hands each of them out again and again: its pool is what graphs
are captured on and what collectives run on. A side stream is not of that pool. Copies on the stream
of a capture would be captured, and collectives behind copies would wait for them. All of a process
share the side streams of a device: torch's allocator keeps scratch for the stream that took it.
Invariants: no side stream is destroyed, because the allocator knows its memory by it. No call makes
a context on a device that the calling thread was not asked to work for. The runtime makes one,
which takes half a gigabyte, on whatever device is current: for a new thread that is device 0.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import cuda

from statehold.tensors.devices import cuda_runtime, numa
from statehold.tensors.devices.backends import CHECKPOINTS
from statehold.tensors.devices.jobs import CallCopies, Copies

_SIDE_STREAMS: dict[tuple[torch.device, str], cuda.Stream] = {}


class CudaBackend:
    """See StreamBackend."""

    def __init__(self) -> None:
        self._nodes: dict[torch.device, int | None] = {}

    def pin(self, address: int, nbytes: int) -> bool:
        node = self._current_node()
        if node is not None:
            numa.bring(address, nbytes, node)
        _keep_from_children(address, nbytes)
        portable = 1  # for every device, not only the current one
        failed = int(_cudart().cudaHostRegister(address, nbytes, portable))
        if failed:
            cuda_runtime.clear_error()
        return not failed

    def _current_node(self) -> int | None:
        device = torch.device("cuda", cuda.current_device())
        if device not in self._nodes:
            self._nodes[device] = numa.node_of(device)
        return self._nodes[device]

    def unpin(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)

    @contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        with cuda.device(device), cuda_runtime.relaxed_captures():
            yield

    def fork(self, device: torch.device, lane: str = CHECKPOINTS) -> cuda.Stream:
        stream = _SIDE_STREAMS.get((device, lane))
        if stream is None:
            stream = _SIDE_STREAMS.setdefault((device, lane), _new_stream(device))
        stream.wait_stream(cuda.current_stream(device))
        return stream

    @contextmanager
    def on(self, stream: cuda.Stream) -> Iterator[None]:
        with cuda.stream(stream):
            yield

    def record(self, stream: cuda.Stream) -> cuda.Event:
        # Blocking waits sleep: the processors are for training.
        event = cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def is_complete(self, event: cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: cuda.Event) -> None:
        event.synchronize()

    def make_current_wait(self, event: cuda.Event) -> None:
        cuda.current_stream(event.device).wait_event(event)

    def copies_by_address(self) -> bool:
        return cuda_runtime.has_copies()

    def copy_to_host(self, stream: cuda.Stream, copies: Copies, call: CallCopies) -> None:
        cuda_runtime.copy_to_host(copies, stream.cuda_stream, call)


def _keep_from_children(address: int, nbytes: int) -> None:
    """A fork shares no page that a device reaches: the kernel copies it there and then, or, before
    Linux 5.12, the parent's next write moves the parent to another page than the device's."""
    libc: Any = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTFORK)


def _cudart() -> Any:
    return cuda.cudart()  # type: ignore[no-untyped-call]


def _new_stream(device: torch.device) -> cuda.Stream:
    """A stream that torch does not hand out; one that it does, where the runtime is not found."""
    with cuda.device(device):
        address = cuda_runtime.new_stream()
    if address is None:
        return cuda.Stream(device)  # type: ignore[no-untyped-call]
    return cuda.ExternalStream(address, device)  # type: ignore[no-untyped-call]
