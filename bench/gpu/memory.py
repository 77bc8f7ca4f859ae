"""Memory: of the device during saves and restores, pinned memory, contexts on other devices."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import statehold
from bench.gpu import figures
from bench.gpu.device import allocated, status_bytes, synchronize
from bench.gpu.figures import Figure
from bench.gpu.task import Skipped, Task
from bench.peers.base import DEADLINE_S

__all__ = ["CountedRuntime", "contexts", "device_memory", "dropped"]

MB = 1e6
SHARE = 0.25  # of the state: clones and scratch at any time
REST_BYTES = 1 << 20  # what may stay once all is staged
ROUNDS = 3
COLLECTED_S = 5.0


def _states(task: Task) -> Iterator[tuple[str, Any]]:
    """States of about a gigabyte that no optimizer owns, or that are not contiguous."""
    device = task.torch_device
    side = 32 if task.is_smoke else 16384
    yield "state_dict()", nn.Linear(side, side, device=device).state_dict()
    channels = 16 if task.is_smoke else 2304
    conv = nn.Conv2d(channels, channels, 7, device=device)
    yield "channels_last", conv.to(memory_format=torch.channels_last)


def device_memory(task: Task) -> Iterator[Figure]:
    for name, value in _states(task):
        nbytes = sum(tensor.nbytes for tensor in _tensors_of(value))
        yield from _save_and_restore(task, name, value, nbytes)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return list(value.values() if isinstance(value, dict) else value.parameters())


def _save_and_restore(task: Task, name: str, value: Any, nbytes: int) -> Iterator[Figure]:
    device, run = task.torch_device, task.path / name.replace("()", "")
    with statehold.Checkpointer(run, staging_bytes=nbytes + (64 << 20), keep=1) as ckpt:
        ckpt.save(0, {"x": torch.zeros(8, device=device)}).wait("committed", DEADLINE_S)
        with _Peak(device) as saving:
            save = ckpt.save(1, {"x": value})
            at_return = allocated(device) - saving.before
            save.wait("staged", DEADLINE_S)
            ckpt.gate(DEADLINE_S)
            gc.collect()
            staged = allocated(device) - saving.before
            save.wait("committed", DEADLINE_S)
        del save
        with _Peak(device) as restoring:
            ckpt.restore({"x": value})
    if device.type != "cuda":  # the host's memory counts more than copies of the state
        yield figures.measured(f"memory at save(), {name}", at_return / MB, "MB")
        yield figures.measured(f"memory at staged, {name}", staged / MB, "MB")
        return
    limit = nbytes * SHARE / MB
    yield figures.at_most(f"device memory at save(), {name}", at_return / MB, limit, "MB")
    yield figures.at_most(f"device memory of a save, {name}", saving.extra / MB, limit, "MB")
    yield figures.at_most(f"device memory at staged, {name}", staged / MB, REST_BYTES / MB, "MB")
    yield figures.at_most(f"device memory of a restore, {name}", restoring.extra / MB, limit, "MB")


class _Peak:
    """The peak of a CUDA device's memory inside a with statement, above that at its begin."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = self.extra = 0

    def __enter__(self) -> _Peak:
        gc.collect()
        synchronize(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.before = allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        synchronize(self._device)
        if self._device.type == "cuda":
            self.extra = torch.cuda.max_memory_allocated(self._device) - self.before


class CountedRuntime:
    """The CUDA runtime, which remembers what is pinned. Inside a with statement torch has it."""

    def __init__(self) -> None:
        self._torchs = torch.cuda.cudart
        self._runtime = torch.cuda.cudart()
        self.pinned: dict[int, int] = {}
        self.most = self.calls = 0

    def __enter__(self) -> CountedRuntime:
        torch.cuda.cudart = lambda: self
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.cudart = self._torchs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        status = self._runtime.cudaHostRegister(address, nbytes, flags)
        self.calls += 1
        if not int(status):
            self.pinned[address] = nbytes
            self.most = max(self.most, sum(self.pinned.values()))
        return status

    def cudaHostUnregister(self, address: int) -> Any:
        self.pinned.pop(address, None)
        return self._runtime.cudaHostUnregister(address)


def dropped(task: Task) -> Iterator[Figure]:
    """A Checkpointer that nobody closes gives its pinned memory back when it is collected."""
    task.need_cuda("pinned memory")
    before = status_bytes("VmPin"), status_bytes("VmRSS")
    with CountedRuntime() as cudart:
        for number in range(ROUNDS):
            ckpt = statehold.Checkpointer(task.path / f"run-{number}", staging_bytes="256MiB")
            weights = torch.randn(task.at_most_bytes(1 << 28) // 4, device=task.torch_device)
            ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
            del ckpt
            _wait_until_unpinned(cudart)
    yield figures.at_least("pinned before it was dropped", cudart.most / MB, 1, "MB")
    yield figures.equal("still pinned after it was dropped", sum(cudart.pinned.values()), 0)
    after = status_bytes("VmPin"), status_bytes("VmRSS")
    yield figures.measured("VmPin, more than before", (after[0] - before[0]) / MB, "MB")
    yield figures.measured("VmRSS, more than before", (after[1] - before[1]) / MB, "MB")


def _wait_until_unpinned(cudart: CountedRuntime) -> None:
    """Threads of the Checkpointer may hold it for a moment after it was dropped."""
    ends = time.monotonic() + COLLECTED_S
    while True:
        gc.collect()
        if not cudart.pinned or time.monotonic() > ends:
            return
        time.sleep(0.05)


def contexts(task: Task) -> Iterator[Figure]:
    """A rank that works on the last device makes no context on the first one."""
    task.need_cuda("contexts")
    count = torch.cuda.device_count()
    if count < 2:
        raise Skipped("contexts on other devices: there is one device")
    torch.cuda.set_device(count - 1)
    weights = torch.randn(task.at_most_bytes(1 << 26) // 4, device=task.torch_device)
    with statehold.Checkpointer(task.path / "run", staging_bytes="64MiB") as ckpt:
        ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
        ckpt.restore({"w": weights})
    others = [each for each in range(count - 1) if torch._C._cuda_hasPrimaryContext(each)]
    yield figures.equal("contexts on other devices", len(others), 0)
