"""A device for machines without one: host tensors stand in for device tensors.

`Deferred` does what a device does at its worst: nothing happens until somebody waits for an event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

DEADLINE_S = 10.0


class Deferred:
    """A device whose work is done only when it must be, and not before `may_run` is set.

    `log` has what was asked, in order.
    """

    def __init__(self, *, fail_at: int | None = None, pin_note: str = "") -> None:
        self.log: list[str] = []
        self.waiting: list[Callable[[], object]] = []
        self.done = 0
        self.copies = 0
        self.may_run = threading.Event()
        self.may_run.set()
        self._fail_at = fail_at
        self._pin_note = pin_note
        self._guard = threading.RLock()

    def follow(self, device: torch.device) -> None:
        self.log.append("follow")

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        with self._guard:
            if self.copies == self._fail_at:
                raise RuntimeError("the device is lost")
            self.copies += 1
            self.waiting.append(lambda: target.copy_(source))

    def record(self, device: torch.device) -> Point:
        with self._guard:
            return Point(self, len(self.waiting))

    def hold_back(self, device: torch.device, event: Any) -> None:
        self.log.append(f"hold back {event.position}")

    def pin(self, address: int, nbytes: int) -> str:
        self.log.append(f"pin {nbytes}")
        return self._pin_note

    def unpin(self, address: int) -> None:
        self.log.append("unpin")

    def run_until(self, position: int) -> None:
        assert self.may_run.wait(DEADLINE_S)
        with self._guard:
            while self.done < position:
                self.waiting[self.done]()
                self.done += 1


class Point:
    def __init__(self, backend: Deferred, position: int) -> None:
        self.backend, self.position = backend, position

    def synchronize(self) -> None:
        self.backend.run_until(self.position)


class Ordered(Deferred):
    """The same for a training loop whose own work is done at once, on the host: a stream that is
    held back has to have everything before it done."""

    def hold_back(self, device: torch.device, event: Any) -> None:
        super().hold_back(device, event)
        self.may_run.set()
        event.synchronize()
