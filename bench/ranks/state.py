"""The state of a job of several ranks: a Llama-shaped decoder in fp32 with AdamW, in any layout.

Owns: the layouts of task.py as PyTorch makes them (fully_shard, parallelize_module), and the
content of every tensor.
Invariants: an element's content is a function of (seed, tensor, its place in the whole tensor), so
that what comes back in another layout is compared bit for bit without the saved one. An optimizer
step marks the first elements of each local tensor and counts AdamW's own `step` tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bench.state import MARK_ELEMENTS, PATTERN_ELEMENTS, SHAPES, Decoder

# Shape of the whole tensor, and where a local one begins in it.
Place = tuple[Sequence[int], Sequence[int]]


class CheapAdamW(torch.optim.AdamW):
    """AdamW with all its state, whose step costs nothing: see bench/state.py for why."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=3e-4, betas=(0.9, 0.95))
        for parameter in self._parameters():
            self.state[parameter] = {
                "step": torch.zeros((), device="cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self._parameters():
            state = self.state[parameter]
            state["step"] += 1
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                local = _local(tensor)
                local.view(-1)[:MARK_ELEMENTS].fill_(float(state["step"]))


class RankState:
    """This rank's part of a model, its optimizer and the progress of the run."""

    def __init__(self, size: str, layout: str) -> None:
        with torch.no_grad():
            self.model = _laid_out(Decoder(SHAPES[size]).to("meta").float(), layout)
        self.optimizer = CheapAdamW(self.model.parameters())
        self.progress: dict[str, Any] = {"step": 0, "epoch": 1.5}

    def application_state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, DTensors among them, under one flat name."""
        named: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            named[f"model.{name}"] = parameter.detach()
            for key, tensor in self.optimizer.state[parameter].items():
                named[f"optimizer.{name}.{key}"] = tensor
        return named

    def local_bytes(self) -> int:
        """What this rank holds."""
        return sum(_local(tensor).nbytes for tensor in self.tensors().values())

    def whole_bytes(self) -> int:
        """What the whole state has, however many ranks hold it."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def step(self) -> int:
        """One optimizer step; returns its number."""
        self.optimizer.step()
        self.progress["step"] += 1
        return int(self.progress["step"])

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """The content of `seed` before any optimizer step."""
        for name, local, place in self._entries():
            _fill(local, name, place, seed)

    @torch.no_grad()
    def wipe(self) -> None:
        """Forget everything, so that only a restore can make `difference` return None."""
        for tensor in self.tensors().values():
            _local(tensor).fill_(-1.0)
        self.progress["step"] = -1

    @torch.no_grad()
    def difference(self, seed: int, step: int) -> str | None:
        """The first thing that is not bit for bit the state of (seed, step); None when all is."""
        if self.progress["step"] != step:
            return f"progress.step: expected {step}, got {self.progress['step']}"
        for name, local, place in self._entries():
            expected = torch.empty_like(local)
            _fill(expected, name, place, seed)
            if name.endswith(".step"):
                expected += step
            elif step > 0:
                expected.view(-1)[:MARK_ELEMENTS] = float(step)
            if not torch.equal(local.view(torch.int32), expected.view(torch.int32)):
                return f"{name}: content differs from its source"
        return None

    def _entries(self) -> Iterator[tuple[str, torch.Tensor, Place]]:
        for name, tensor in self.tensors().items():
            yield name, _local(tensor), _place(tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _place(tensor: torch.Tensor) -> Place:
    if not isinstance(tensor, DTensor):
        return tensor.shape, [0] * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.shape, offsets


# -- content -------------------------------------------------------------------------------------

_patterns: list[torch.Tensor] = []


def _pattern() -> torch.Tensor:
    if not _patterns:
        generator = torch.Generator().manual_seed(1)
        _patterns.append(torch.randn(PATTERN_ELEMENTS, generator=generator, device="cpu"))
    return _patterns[0]


def _fill(local: torch.Tensor, name: str, place: Place, seed: int) -> None:
    """Give a local tensor the content of its place in the whole one."""
    if not local.ndim:
        local.zero_()
        return
    shape, offsets = place
    row_elements = shape[1] if local.ndim == 2 else 1
    at = zlib.crc32(f"{seed} {name}".encode()) + offsets[0] * row_elements
    if list(local.shape[1:]) == list(shape[1:]):
        _copy_pattern(local.view(-1), at)
        return
    rows = torch.empty(local.shape[0] * row_elements, device="cpu")
    _copy_pattern(rows, at)
    columns = slice(offsets[1], offsets[1] + local.shape[1])
    local.copy_(rows.view(-1, row_elements)[:, columns])


def _copy_pattern(target: torch.Tensor, at: int) -> None:
    """The endless repetition of the pattern, from element `at` on."""
    done, pattern = 0, _pattern()
    while done < target.numel():
        begin = (at + done) % PATTERN_ELEMENTS
        count = min(target.numel() - done, PATTERN_ELEMENTS - begin)
        target[done : done + count].copy_(pattern[begin : begin + count])
        done += count


# -- layouts -------------------------------------------------------------------------------------


def _laid_out(model: Decoder, layout: str) -> nn.Module:
    """A model without memory, in its layout, with memory."""
    kind, _, numbers = layout.partition("-")
    sizes = [int(each) for each in numbers.split("-") if each.isdecimal()]
    if kind in ("share", "shares"):
        _keep_share(model, sizes[0])
    elif kind == "columns":
        _split_columns(model, init_device_mesh("cpu", (sizes[0],)))
    elif kind == "tp":
        names = ("dp", "tp")[2 - len(sizes) :]
        mesh = init_device_mesh("cpu", tuple(reversed(sizes)), mesh_dim_names=names)
        _split_heads(model, mesh["tp"])
        if len(sizes) > 1:
            _shard(model, mesh["dp"])
    elif kind == "fsdp":
        _shard(model, init_device_mesh("cpu", (sizes[0],)))
    return model.to_empty(device="cpu")


def _shard(model: Decoder, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _split_heads(model: Decoder, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {"output": ColwiseParallel()}
    for index in range(len(model.layers)):
        for name in ("wq", "wk", "wv", "w1", "w3"):
            plan[f"layers.{index}.{name}"] = ColwiseParallel()
        for name in ("wo", "w2"):
            plan[f"layers.{index}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    _distribute_rest(model, mesh, 0)


def _split_columns(model: Decoder, mesh: DeviceMesh) -> None:
    _distribute_rest(model, mesh, 1)


def _distribute_rest(model: Decoder, mesh: DeviceMesh, dim: int) -> None:
    """What is no DTensor yet: matrices along `dim`, the others on every rank."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                continue
            placement = Shard(dim) if parameter.ndim > 1 else Replicate()
            split = distribute_tensor(parameter, mesh, [placement])
            setattr(module, name, nn.Parameter(split))


def _keep_share(model: Decoder, count: int) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            share = parameter[: -(-parameter.shape[0] // count)]
            setattr(module, name, nn.Parameter(share.clone()))
