"""`python -m bench.host`: what a save of many tensors costs the processor, whatever their sizes.

Owns: the milliseconds of save() on the trainer's thread, those of enqueueing small pieces on the
stage thread, and those of the manifest's bytes on the commit thread, while the structure of the
state stays as it is: of the benchmarks' own 804
tensors in host memory, made small, and of 800 and 20,000 tensors of a device. There tensors with
dimensions are taken for those of a device whose every call returns at once, so the figures are
those of the library's own Python.
Invariants: seconds are those of the processor and of the thread that is asked; the first save of a
run, and medians of several without the first two, which learn the structure of the state.
Not here: what a device adds to it (gpu), other sizes of tensors (save).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

import statehold
from bench.state import Shape, TrainingState
from statehold.checkpoint.save import writes
from statehold.tensors import columns, found
from statehold.tensors.devices import copying, devices, gathering

LEARNING = 2  # the first saves
HEAD = f"{'least':>8} {'median':>8} {'most':>8}"
OF_EACH = 4  # a parameter, its two moments and its step


class AtOnce:
    """A StreamBackend whose work takes no time."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_: True

    @contextmanager
    def using(self, _: object) -> Iterator[None]:
        yield

    on = using

    def fork(self, device: torch.device) -> torch.device:
        return device


class Launched:
    """torch as gathering.py uses it. A device joins tensors after the call has returned, so the
    processor joins none here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def cat(self, _: object, **__: object) -> None:
        return None


def device_if_dimensions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """In the place of statehold's function; hardly slower than that."""
    return [0 if dimensions else -1 for dimensions in map(torch.Tensor.dim, tensors)]


def state_of(tensors: int) -> dict[str, Any]:
    """Modules of ten parameters of 4 KiB, and AdamW after a step."""
    count = max(1, tensors // OF_EACH // 10)
    layers = [
        nn.ParameterList([torch.randn(32, 32, device="cpu") for _ in range(10)])
        for _ in range(count)
    ]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def timed(kind: type, name: str, seconds: list[float]) -> Any:
    """Collects what each call of a method costs its thread."""
    method = getattr(kind, name)

    def timing(*given: Any) -> Any:
        begin_s = time.thread_time()
        found = method(*given)
        seconds.append(time.thread_time() - begin_s)
        return found

    return mock.patch.object(kind, name, timing)


@contextmanager
def emulated() -> Iterator[None]:
    """Inside, tensors with dimensions are a device's."""
    with (
        mock.patch.object(devices, "backend_for", return_value=AtOnce()),
        mock.patch.object(found, "is_external", lambda tensor: tensor.dim() > 0),
        mock.patch.object(columns, "devices_of", device_if_dimensions),
        mock.patch.object(gathering, "torch", Launched()),
    ):
        yield


def llama() -> dict[str, Any]:
    """The 804 tensors of the other benchmarks, with few elements each."""
    training = TrainingState.of(Shape(dim=64, layers=22, hidden=176, vocab=512))
    training.fill(seed=1)
    return {
        "model": training.model,
        "optimizer": training.optimizer,
        "progress": training.progress,
    }


def measure(state: dict[str, Any], saves: int, *, on_device: bool) -> str:
    """A line of the table. An update comes before each save."""
    blocked_s, enqueued_s, sealed_s = list[float](), list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        emulated() if on_device else nullcontext(),
        timed(copying.DeviceCopies, "run", enqueued_s) if on_device else nullcontext(),
        timed(writes.Sealing, "manifest", sealed_s),
        statehold.Checkpointer(f"{directory}/run", keep=2) as ckpt,
    ):
        for step in range(saves + LEARNING):
            state["optimizer"].step()
            begin_s = time.thread_time()
            save = ckpt.save(step, state)
            blocked_s.append(time.thread_time() - begin_s)
            save.wait("committed")
        count = save.stats.tensors
    where = "device" if on_device else "host"
    first = f"{1e3 * blocked_s[0]:>8.1f}"
    return f"{count:>8}  {where:>6}  {first}  {_ms(blocked_s)}  {_ms(enqueued_s)}  {_ms(sealed_s)}"


def _ms(seconds: list[float]) -> str:
    """Least, median and largest."""
    kept = [1e3 * each for each in seconds[LEARNING:]]
    if not kept:
        return f"{'-':>8} {'-':>8} {'-':>8}"
    return f"{min(kept):>8.1f} {statistics.median(kept):>8.1f} {max(kept):>8.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="*", default=[800, 20_000])
    parser.add_argument("--saves", type=int, default=50)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    heads = "  ".join(f"{each:>26}" for each in ("save(), ms", "enqueueing, ms", "manifest, ms"))
    print(f"{'':8}  {'':>6}  {'first':>8}  {heads}")
    print(f"{'tensors':>8}  {'on':>6}  {'save':>8}  {HEAD}  {HEAD}  {HEAD}")
    print(measure(llama(), given.saves, on_device=False))
    for tensors in given.tensors:
        print(measure(state_of(tensors), given.saves, on_device=True))


if __name__ == "__main__":
    main()
