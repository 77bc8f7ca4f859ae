"""What the checks ask of a device. On the CPU everything has happened when a call returns, and
device memory is the anonymous memory of the process.

Invariants: nothing here makes a CUDA context before a check asks for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.memory import tree_bytes

__all__ = ["Work", "allocated", "launches", "products", "sleep", "status_bytes", "synchronize"]

SLEEP_CYCLES = 1 << 30  # half a second at 2 GHz
CHUNK = 8


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of device memory that tensors take."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else tree_bytes()


def sleep(device: torch.device) -> None:
    """Keep the device's current stream busy for some tenths of a second."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


def status_bytes(key: str) -> int:
    """A line of /proc/self/status; 0 where there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


class Work:
    """The forward and backward of a step: as many repetitions of an action as take a given time."""

    def __init__(self, action: Callable[[], object], seconds: float, device: torch.device) -> None:
        self._action = action
        self._device = device
        self._count = CHUNK
        self._run_for(seconds)

    def __call__(self) -> None:
        """Give the device its work. The caller waits for it."""
        for _ in range(self._count):
            self._action()

    def _run_for(self, seconds: float) -> None:
        """Choose the count; by trials that get longer, because the first ones warm things up."""
        took = 0.0
        while took < seconds / 2:
            synchronize(self._device)
            begin = time.perf_counter()
            self()
            synchronize(self._device)
            took = max(time.perf_counter() - begin, 1e-6)
            self._count = max(1, round(self._count * min(seconds / took, 8)))


def products(device: torch.device, seconds: float, is_small: bool) -> Work:
    """Steps that are bound by the device: products of large matrices."""
    side = 64 if is_small else 8192
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(side, side, device=device, dtype=dtype)
    out = torch.empty_like(left)
    return Work(lambda: torch.mm(left, left, out=out), seconds, device)


def launches(device: torch.device, seconds: float) -> Work:
    """Steps that are bound by the thread that launches: additions of a few numbers."""
    tiny = torch.zeros(16, device=device)
    return Work(lambda: tiny.add_(1), seconds, device)
