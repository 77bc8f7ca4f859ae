"""A device made of host memory, whose copies happen as late as its events allow.

Tensors with at least one dimension count as device memory. A copy runs when somebody waits for it
and not before, so whoever forgets to wait, or waits too late, gets wrong bytes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import statehold
from statehold.state import capture, destinations, device
from support.faults import DEADLINE_S, must


class LateStreams:
    """A StreamBackend for one device with one side stream."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[int] = []
        self.may_pin = True
        self.waits = 0
        self.finish = threading.Event()  # cleared: no copy completes by itself
        self.finish.set()
        self._guard = threading.Lock()
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ran = 0

    def pin(self, address: int, nbytes: int) -> bool:
        self.pinned.append((address, nbytes))
        return self.may_pin

    def unpin(self, address: int) -> None:
        self.unpinned.append(address)

    def fork(self, device: torch.device) -> str:
        return f"side stream of {device}"

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        must(dst.dtype == src.dtype == torch.uint8)
        with self._guard:
            self._queue.append((dst, src))

    def record(self, stream: str) -> int:
        return len(self._queue)

    def synchronize(self, event: int) -> None:
        must(self.finish.wait(DEADLINE_S))
        self._run_until(event)

    def make_current_wait(self, event: int) -> None:
        self.waits += 1
        self._run_until(event)

    def _run_until(self, event: int) -> None:
        with self._guard:
            for dst, src in self._queue[self._ran : event]:
                dst.copy_(src)
            self._ran = max(self._ran, event)


def install(patch: pytest.MonkeyPatch) -> LateStreams:
    """Make every checkpointer take tensors with dimensions for device memory."""
    streams = LateStreams()

    def is_external(tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0

    patch.setattr(capture, "is_external", is_external)
    patch.setattr(destinations, "is_external", is_external)
    patch.setattr(device, "backend_for", lambda _: streams)
    return streams


def copies_of(ckpt: statehold.Checkpointer) -> Any:
    """The DeviceCopies of the save that the gate holds updates for."""
    [(_, passing)] = ckpt._gate._saves
    return passing.__self__
