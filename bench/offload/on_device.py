"""Cases whose parameters are on a device: a Llama of 7B, or smaller, and its updates.

The model has the matrices of Llama 2 7B, in an order in which each takes what the one before gives.
Backward pass and update are timed until the device has done all of it. Weights are the same number
everywhere, because their values do not matter and making random ones takes minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch

from bench.offload.cases import Case
from bench.offload.process import LR, WARM_UP, Clock, forget_peak, memory_bytes
from statehold import offload

BATCH = 8

Record = dict[str, Any]
Place = Callable[[torch.nn.Module], torch.nn.Module]


class Model(torch.nn.Sequential):
    """Matrices in bfloat16, placed one by one."""

    def __init__(self, widths: tuple[int, ...], place: Place) -> None:
        super().__init__()
        for into, out in itertools.pairwise(widths):
            layer = torch.nn.utils.skip_init(
                torch.nn.Linear, into, out, bias=False, dtype=torch.bfloat16
            )
            torch.nn.init.constant_(layer.weight, 1 / into)
            self.append(place(layer))
        self._batch = torch.ones_like(self[0].weight[:BATCH])

    def backward(self) -> None:
        self(self._batch).float().square().mean().backward()


def run_on_device(
    case: Case,
    numel: int,
    updates: int,
    ready: Callable[[], None],
    place: Place = torch.nn.Module.cuda,
    settle: Callable[[], None] = torch.cuda.synchronize,
) -> list[Record]:
    """An offloaded optimizer, or torch's on masters on the device. settle: until all is done."""
    logging.basicConfig(level=logging.INFO)  # the rates that "auto" has measured
    with contextlib.ExitStack() as stack:
        model = Model(case.widths, place)
        forget_peak()
        before = memory_bytes("VmRSS")
        step, figures = _torchs(model) if case.kind == "torch_on_device" else _ours(
            case, model, stack
        )  # fmt: skip
        backwards, clock = Clock(), Clock()
        for update in range(WARM_UP + updates):
            if update == WARM_UP:
                ready()
            backwards.timed(lambda: (model.backward(), settle()))
            clock.timed(lambda: (step(), settle()))
        found = figures()
        peak = memory_bytes("VmHWM") - before
    return [
        {
            "name": case.name,
            "updates": clock.updates[WARM_UP:],
            "backward": backwards.updates[WARM_UP:],
            "peak_bytes": peak,
            **found,
        }
    ]


def _ours(
    case: Case, model: Model, stack: contextlib.ExitStack
) -> tuple[Callable[[], None], Callable[[], Record]]:
    optimizer = offload.AdamW(
        model.parameters(),
        lr=LR,
        tiers=[offload.Host(case.host)],
        drain_gradients=case.drains,
        device_every=case.device_every,
    )
    stack.callback(optimizer.close)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def figures() -> Record:
        stats = optimizer.stats
        return {
            "announced_bytes": stats.cache_bytes + stats.buffer_bytes + stats.pinned_bytes,
            "device_bytes": stats.device_bytes,
            "device_subgroups": stats.device_subgroups,
            "compute_s": stats.compute_s / stats.updates,
            "waited_s": stats.waited_s / stats.updates,
        }

    return step, figures


def _torchs(model: Model) -> tuple[Callable[[], None], Callable[[], Record]]:
    params = list(model.parameters())
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    plain = torch.optim.AdamW(masters, lr=LR, fused=True)

    @torch.no_grad()
    def step() -> None:
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        plain.step()
        for master, param in zip(masters, params, strict=True):
            param.copy_(master)
            master.grad = None

    return step, dict
