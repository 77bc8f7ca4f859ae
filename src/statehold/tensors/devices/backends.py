"""What has to be known of a kind of device: where its work is queued, and what waits for what.

Owns: the seam between statehold and the streams of torch.
Not here: CUDA and ROCm (cuda), which bytes go where (copying, loading).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from statehold.tensors.devices.jobs import CallCopies, Copies

Event = Any
Stream = Any

CHECKPOINTS = "checkpoints"  # the lane of saves and restores


class StreamBackend(Protocol):
    """The devices of one kind in this process."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Let the devices reach this host memory themselves; False when they cannot. From then on
        no forked child has it: it is whole pages, which were mapped for nothing else."""

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy is under way."""

    def using(self, device: torch.device) -> AbstractContextManager[None]:
        """Inside, the calling thread works for this device, and takes no part in a graph that
        another thread captures; after it, all is as before."""

    def fork(self, device: torch.device, lane: str = CHECKPOINTS) -> Stream:
        """The side stream of a lane, whose work from now on follows what the device's current
        stream has been given. Lanes do not wait for one another."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Inside, what the calling thread does on the device is work of the stream, and the memory
        that it takes there is the stream's: what it gives back is used again in that order. Called
        inside using()."""

    def record(self, stream: Stream) -> Event:
        """An event that completes once the stream's work so far has."""

    def is_complete(self, event: Event) -> bool:
        """Whether the event has completed."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event completes."""

    def make_current_wait(self, event: Event) -> None:
        """Order what the current stream of the event's device is given from now on after it."""

    def copies_by_address(self) -> bool:
        """Whether there is copy_to_host()."""

    def copy_to_host(self, stream: Stream, copies: Copies, call: CallCopies) -> None:
        """Enqueue copies on a stream by one call, without the interpreter lock. Inside on()."""


class BlockingBackend:
    """Every accelerator that is not CUDA: plain copies, complete when they return."""

    def pin(self, address: int, nbytes: int) -> bool:
        return True  # nothing to do, and nothing to report

    def unpin(self, address: int) -> None:
        pass

    @contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        yield

    def fork(self, device: torch.device, lane: str = CHECKPOINTS) -> torch.device:
        torch.accelerator.synchronize(device)
        return device

    @contextmanager
    def on(self, stream: torch.device) -> Iterator[None]:
        yield
        torch.accelerator.synchronize(stream)

    def record(self, stream: torch.device) -> None:
        pass

    def is_complete(self, event: None) -> bool:
        return True

    def synchronize(self, event: None) -> None:
        pass

    def make_current_wait(self, event: None) -> None:
        pass

    def copies_by_address(self) -> bool:
        return False

    def copy_to_host(self, stream: torch.device, copies: Copies, call: CallCopies) -> None:
        raise NotImplementedError
