"""One case in a process of its own: `python -m bench.offload.process JSON`.

The process prints "ready" after its first updates and waits for a line. Then it does the updates
that count, and prints what they took as JSON. All cases of a run have the same parameters in
bfloat16, and the same gradients unless they train.

Facts: DeepSpeed 0.19.8 moves 16 bytes of a parameter each way: its gradient in float32, too. The
library never does. A fourth field of the state (amsgrad's) is moved in just this way, so it stands
for the gradient in "storage" cases.
Invariants: a bench process measures only itself. Bytes are those of /proc/self/io, which does not
count file systems in memory; the optimizer's own count is beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import statehold
from bench.offload.cases import Case, directory_of, rate_of, width_of
from statehold import offload

# Updates until every path has been measured, and every file is there: those of the state, and with
# saves those of two steps.
WARM_UP = 4
LR = 1e-4
TORCH, TORCH_CAST = "torch, float32 masters", "torch, float32 masters, and casts"

Record = dict[str, Any]


class Model(torch.nn.Sequential):
    """Square matrices, one after the other; the same each time."""

    def __init__(self, numel: int) -> None:
        width = width_of(numel)
        torch.manual_seed(1)
        linears = (torch.nn.Linear(width, width, bias=False) for _ in range(numel // width**2))
        super().__init__(*linears)
        self.bfloat16()
        self._batch = torch.randn(8, width, device="cpu").bfloat16()
        if dist.is_initialized():
            fully_shard(self)

    def give_gradients(self) -> None:
        for param in self.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            grad = torch.randn(local.shape, device="cpu").bfloat16()
            if isinstance(param, DTensor):
                grad = DTensor.from_local(grad, param.device_mesh, param.placements)
            param.grad = grad

    def backward(self) -> None:
        self.zero_grad()
        self(self._batch).float().square().mean().backward()


def digest(params: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for param in params:
        local = param.detach().to_local() if isinstance(param, DTensor) else param.detach()
        found.update(local.view(torch.int16).numpy())
    return found.hexdigest()


class Clock:
    """What each update takes: seconds, processor seconds, bytes of devices."""

    def __init__(self) -> None:
        self.updates: list[Record] = []

    def timed(self, step: Callable[[], object]) -> None:
        device, cpu, begin = device_bytes(), time.process_time(), time.perf_counter()
        step()
        end = time.perf_counter()
        self.updates.append(
            {"begin": begin, "end": end, "wall_s": end - begin,
             "cpu_s": time.process_time() - cpu, "io_bytes": device_bytes() - device}
        )  # fmt: skip


def device_bytes() -> int:
    """What this process has read from devices and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers["read_bytes"]) + int(numbers["write_bytes"])


def memory_bytes(name: str) -> int:
    """VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_offload(case: Case, numel: int, updates: int, ready: Callable[[], None]) -> list[Record]:
    """An offloaded optimizer, and, if the case saves, a run beside its first path."""
    model, clock, trained = Model(numel), Clock(), Clock()
    model.give_gradients()
    with contextlib.ExitStack() as stack:
        # torch imports much for its first optimizer
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device="cpu"))])
        forget_peak()
        before = memory_bytes("VmRSS")
        optimizer = stack.enter_context(contextlib.closing(_optimizer(case, model)))
        saves = Saves(case, {"model": model, "optimizer": optimizer}, stack)
        for update in range(WARM_UP + updates):
            if update == WARM_UP:
                ready()
                figures = optimizer.stats
            if case.trains:
                trained.timed(model.backward)
            clock.timed(lambda: (optimizer.step(), saves.save()))
        found = _figures(figures, optimizer.stats) | saves.figures(updates)
        peak = memory_bytes("VmHWM") - before
    return [
        {
            "name": case.name,
            "updates": clock.updates[WARM_UP:],
            "backward": trained.updates[WARM_UP:],
            "digest": digest(model.parameters()),
            "peak_bytes": peak,
            **found,
        }
    ]


def _optimizer(case: Case, model: Model) -> offload.AdamW:
    tiers = [
        offload.Path(directory_of(path), rate_of(path), exclusive=case.takes_turns)
        for path in case.paths
    ]
    return offload.AdamW(
        model.parameters(),
        lr=LR,
        amsgrad=case.gradients == "storage",
        tiers=[offload.Host(case.host), *tiers],
        subgroup_bytes=case.subgroup_bytes,
    )


class Saves:
    """Saves `state` into a run in a folder on the first path, if the case saves."""

    def __init__(self, case: Case, state: Record, stack: contextlib.ExitStack) -> None:
        self._case, self._state = case, state
        self._handles: list[statehold.Save] = []
        if case.saves:
            self._run = stack.enter_context(statehold.Checkpointer(f"{case.folder}/run", keep=1))

    def save(self) -> None:
        if self._case.saves:
            handle = self._run.save(len(self._handles) + 1, self._state)
            self._handles.append(handle)
            if self._case.saves == "waits":
                handle.wait("committed")

    def figures(self, count: int) -> Record:
        """Of the last saves: seconds from the call to the commit, and bytes."""
        stats = [handle.wait("committed").stats for handle in self._handles[-count:]]
        return {
            "saves": [
                {"wall_s": each.committed_s, "written_bytes": each.written_bytes,
                 "linked_bytes": each.linked_bytes}
                for each in stats
            ]
        }  # fmt: skip


def _figures(before: offload.Stats, after: offload.Stats) -> Record:
    """What the optimizer itself says about the updates that count."""
    count = after.updates - before.updates
    moved = [
        now.read_bytes + now.written_bytes - then.read_bytes - then.written_bytes
        for now, then in zip(after.paths, before.paths, strict=True)
    ]
    return {
        "moved_bytes": [each / count for each in moved],
        "waited_s": (after.waited_s - before.waited_s) / count,
        "hidden_s": (after.hidden_s - before.hidden_s) / count,
        "compute_s": (after.compute_s - before.compute_s) / count,
        "announced_bytes": after.cache_bytes + after.buffer_bytes,
    }


class Masters:
    """torch's optimizer on float32 masters of `params`, and the casts of training in 16 bit: of
    gradients from `params`, and of weights to `weights`."""

    def __init__(self, params: list[torch.nn.Parameter], weights: list[torch.Tensor]) -> None:
        self._params, self._weights = params, weights
        self.masters = [torch.nn.Parameter(param.detach().float()) for param in params]
        for master, param in zip(self.masters, params, strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)

    @torch.no_grad()
    def update(self) -> None:
        for master, param in zip(self.masters, self._params, strict=True):
            master.grad.copy_(param.grad)  # type: ignore[union-attr, arg-type]
        self.optimizer.step()
        for weight, master in zip(self._weights, self.masters, strict=True):
            weight.copy_(master)


def run_torch_saving(
    case: Case, numel: int, updates: int, ready: Callable[[], None]
) -> list[Record]:
    """torch's optimizer with the same state in memory, all of which a save writes."""
    model, clock = Model(numel), Clock()
    model.give_gradients()
    params = list(model.parameters())
    torchs = Masters(params, params)
    state = {"model": model, "masters": torchs.masters, "optimizer": torchs.optimizer}
    with contextlib.ExitStack() as stack:
        saves = Saves(case, state, stack)
        for update in range(WARM_UP + updates):
            if update == WARM_UP:
                ready()
            clock.timed(lambda: (torchs.update(), saves.save()))
        found = saves.figures(updates)
    return [
        {
            "name": case.name,
            "updates": clock.updates[WARM_UP:],
            "digest": digest(model.parameters()),
            **found,
        }
    ]


def run_beside_torch(
    case: Case, numel: int, updates: int, ready: Callable[[], None]
) -> list[Record]:
    """State in Host, in turns with torch's optimizer on float32 masters, update by update.

    torch's update of masters is timed alone, and with the casts that training in 16 bit needs:
    gradients from it, parameters to it.
    """
    model = Model(numel)
    model.give_gradients()
    params = list(model.parameters())
    rounded = [torch.empty_like(param) for param in params]
    torchs = Masters(params, rounded)
    alone, cast, ours = Clock(), Clock(), Clock()
    with contextlib.closing(_optimizer(case, model)) as optimizer:
        for update in range(0, WARM_UP + updates, 2):
            if update == WARM_UP:
                ready()
                for clock in (alone, cast, ours):
                    clock.updates.clear()
            alone.timed(torchs.optimizer.step)
            ours.timed(optimizer.step)
            cast.timed(torchs.update)
            ours.timed(optimizer.step)
    return [
        {"name": TORCH, "updates": alone.updates, "digest": digest(rounded)},
        {"name": TORCH_CAST, "updates": cast.updates, "digest": digest(rounded)},
        {"name": case.name, "updates": ours.updates, "digest": digest(params)},
    ]


RUNNERS: dict[str, Callable[[Case, int, int, Callable[[], None]], list[Record]]] = {
    "offload": run_offload,
    "beside_torch": run_beside_torch,
    "torch_saving": run_torch_saving,
}


def main(words: list[str]) -> int:
    from bench.offload.on_device import run_on_device  # which takes its clock from here

    runners = {**RUNNERS, "on_device": run_on_device, "torch_on_device": run_on_device}
    given = json.loads(words[0])
    sequences = {name: tuple(given["case"][name]) for name in ("paths", "widths")}
    case = Case(**{**given["case"], **sequences})

    if case.ranks > 1 and case.saves:
        meeting = f"file://{case.folder}/meeting"
        dist.init_process_group("gloo", meeting, rank=case.rank, world_size=case.ranks)

    def ready() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    print(json.dumps(runners[case.kind](case, given["numel"], given["updates"], ready)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
