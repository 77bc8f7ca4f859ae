"""The ranks that train one model together: FSDP2 over the rows of a mesh, tensor parallel along it.

Owns the mesh, who holds which part of the model, and who takes which sequences of a batch.
Invariants: all ranks together take every sequence of a global batch once, so the same batches are
trained on whatever the number of ranks; every parameter lies on the whole mesh, so all of them clip
together. A process that is not one of several (no WORLD_SIZE) trains alone, as if nothing of this
existed. Leaves starting the ranks to torchrun, or to job.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from model import Llama
from statehold.lowrank import LowRankLinear
from statehold.lowrank.parallel import AlongBottleneck, GroupedPairs, OnlineRMSNorm

# A rank that waits for another one this long gives up, should nothing tell it earlier.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


class Whole(ParallelStyle):
    """Every rank of the axis holds and computes the whole module."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False),)

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, mesh, None, enter, leave)


# Which matrices are cut by columns and which by rows, so that a block talks twice: after `wo` and
# after `down`. The vocabulary is cut for both embeddings, which may be one parameter.
TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention_norm": Whole(),
    "layers.*.attention.wq": ColwiseParallel(),
    "layers.*.attention.wk": ColwiseParallel(),
    "layers.*.attention.wv": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward_norm": Whole(),
    "layers.*.feed_forward.gate": ColwiseParallel(),
    "layers.*.feed_forward.up": ColwiseParallel(),
    "layers.*.feed_forward.down": RowwiseParallel(),
    "norm": Whole(),
    "output": ColwiseParallel(output_layouts=Replicate()),
}

# The same for low-rank pairs, along their bottleneck. Features are cut, from the embeddings on, and
# the head adds up what the ranks have. Pairs with one input are grouped with the norm before them.
ALONG_BOTTLENECK: dict[str, ParallelStyle] = {
    "embedding": ColwiseParallel(output_layouts=Shard(-1)),
    "layers.*.attention.wo": AlongBottleneck(),
    "layers.*.feed_forward.down": AlongBottleneck(),
    "norm": OnlineRMSNorm(),
    "output": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "attention_norm": ("attention.wq", "attention.wk", "attention.wv"),
    "feed_forward_norm": ("feed_forward.gate", "feed_forward.up"),
}


class Ranks:
    """This process among the ranks of its job; without a mesh, alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self.size = mesh.size() if mesh else 1
        self.rank = distributed.get_rank() if mesh else 0
        self.shares = mesh["dp"].size() if mesh else 1  # into which a batch is divided

    def __str__(self) -> str:
        if self._mesh is None:
            return "1 process"
        return f"{self.size} ranks (FSDP {self.shares} x TP {self._mesh['tp'].size()})"

    def shard(self, model: Llama) -> Llama:
        """Keep of the model what belongs to this rank. Equal models on all ranks are expected."""
        if self._mesh is None:
            return model
        if self._mesh["tp"].size() > 1:
            _cut(model, self._mesh["tp"])
            if model.config.tie:  # each of the two modules has cut it for itself
                model.output.weight = model.embedding.weight
        for block in model.layers:
            fully_shard(block, mesh=self._mesh["dp"])
        return fully_shard(model, mesh=self._mesh["dp"])

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's sequences of a global batch, as many as everybody else's."""
        if self._mesh is None:
            return batch
        tokens_BL, targets_BL = batch
        mine = self._mesh["dp"].get_local_rank()
        return tokens_BL.chunk(self.shares)[mine], targets_BL.chunk(self.shares)[mine]

    def mean(self, loss: float) -> float:
        """The mean over all shares of a batch, the same on all ranks."""
        if self._mesh is None:
            return loss
        total = torch.tensor(loss, dtype=torch.float64)
        distributed.all_reduce(total, group=self._mesh["dp"].get_group())
        return total.item() / self.shares


def _cut(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism: of linear layers, or along the bottleneck of pairs."""
    if not isinstance(model.layers[0].attention.wq, LowRankLinear):
        parallelize_module(model, mesh, TENSOR_PARALLEL)
        return
    for block in model.layers:
        for norm, pairs in GROUPS.items():
            parallelize_module(block, mesh, GroupedPairs(norm, pairs))
    parallelize_module(model, mesh, ALONG_BOTTLENECK)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank may hold a part; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def joined(tp: int, device: str) -> Iterator[Ranks]:
    """Join the job that WORLD_SIZE and its like describe; `tp` ranks share each matrix."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    if size % tp:
        raise ValueError(f"{size} ranks cannot be divided into groups of tp = {tp}")
    if device != "cpu":
        raise ValueError(f"this example trains on several ranks on the CPU only, not on {device}")
    _silence()
    distributed.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
        yield Ranks(mesh)
    finally:
        distributed.destroy_process_group()


def _silence() -> None:
    """Advice of torch that does not apply here, and would come from every rank."""
    # Nothing is added in place to what the model returns.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Two short sums a step, over one axis of the mesh and then the other, are not worth a third
    # communicator.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
