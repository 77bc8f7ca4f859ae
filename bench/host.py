"""`python -m bench.host`: what a save of many device tensors costs the host, without a device.

Owns: the milliseconds of save() on the trainer's thread, and those of enqueueing small pieces on
the stage thread, for states of 800 and 20,000 tensors. Tensors with dimensions are taken for those
of a device whose every call returns at once, so the figures are those of the library's own Python.
Invariants: seconds are those of the processor and of the thread that is asked; medians of several
saves, without the first two of a run, which learn the structure of the state.
Not here: what a device adds to it (gpu), other sizes of tensors (save).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import statehold
from statehold.tensors import captured, found
from statehold.tensors.devices import copying, devices

SAVES = 8
LEARNING = 2  # the first saves
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


def state_of(tensors: int) -> dict[str, Any]:
    """Modules of ten parameters of 4 KiB, and AdamW after a step."""
    count = max(1, tensors // OF_EACH // 10)
    layers = [nn.ParameterList([torch.randn(32, 32) for _ in range(10)]) for _ in range(count)]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@contextmanager
def emulated(enqueued_s: list[float]) -> Iterator[None]:
    """Inside, tensors with dimensions are a device's. Collects seconds of the stage thread."""
    run = copying.DeviceCopies.run

    def timed(copies: copying.DeviceCopies) -> None:
        begin_s = time.thread_time()
        run(copies)
        enqueued_s.append(time.thread_time() - begin_s)

    with (
        mock.patch.object(devices, "backend_for", return_value=AtOnce()),
        mock.patch.object(captured, "is_external", lambda tensor: tensor.dim() > 0),
        mock.patch.object(found, "is_external", lambda tensor: tensor.dim() > 0),
        mock.patch.object(copying.DeviceCopies, "run", timed),
    ):
        yield


def measure(tensors: int) -> str:
    """A line of the table."""
    state, blocked_s, enqueued_s = state_of(tensors), [], list[float]()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        emulated(enqueued_s),
        statehold.Checkpointer(f"{directory}/run", keep=2) as ckpt,
    ):
        for step in range(SAVES):
            begin_s = time.thread_time()
            save = ckpt.save(step, state)
            blocked_s.append(time.thread_time() - begin_s)
            save.wait("committed")
        count = save.stats.tensors
    return f"{count:>8}  {_ms(blocked_s)}  {_ms(enqueued_s)}"


def _ms(seconds: list[float]) -> str:
    """Median and smallest."""
    kept = [1e3 * each for each in seconds[LEARNING:]]
    return f"{statistics.median(kept):>9.1f} {min(kept):>9.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[800, 20_000])
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'':8}  {'save(), ms':>19}  {'enqueueing, ms':>19}")
    print(f"{'tensors':>8}  {'median':>9} {'least':>9}  {'median':>9} {'least':>9}")
    for tensors in given.tensors:
        print(measure(tensors))


if __name__ == "__main__":
    main()
