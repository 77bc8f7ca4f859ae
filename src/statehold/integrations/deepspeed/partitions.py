"""How ZeRO cuts the parameters over the ranks, as runs of flat tensors.

Facts about DeepSpeed (0.19.8):
- In stages 1 and 2 the parameters of a group are views of one flat buffer, which is padded at its
  end. It is cut into equal partitions, so the cuts lie anywhere in a parameter. Each rank has a
  flat master of its partition. The order in the buffer may depend on the number of ranks.
- In stage 3 each parameter is flattened and cut into equal parts, the last one padded. That is how
  torch.chunk cuts. A rank has the parts of several parameters one after the other in a flat master.
  How many of them share one depends on the number of ranks.
- If the master weights have the dtype of the model, stage 3 has them once.

Invariants: the runs of all ranks cover each parameter once, and no padding is in a run. Every rank
lists every parameter, with an empty run where it has nothing. A run says where the memory is only
when it is asked, since DeepSpeed may move it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import AnyLayout, Box, ExplicitLayout, Layout, Mesh
from statehold.tensors.pieces import Piece


@dataclass(frozen=True)
class PartitionRun:
    """This rank's part of the flattened parameter `name`: `count` elements of a partition."""

    name: str
    numel: int
    layout: AnyLayout
    begin: int
    count: int


@dataclass(frozen=True)
class Partition:
    """A flat master of this rank, which the base optimizer updates.

    weights: gives the flat tensor of the same runs that the model computes with; None where each
        rank has the whole parameters. group: the index of the optimizer's parameter group.
    """

    master: torch.Tensor
    weights: Callable[[], torch.Tensor] | None
    group: int
    runs: tuple[PartitionRun, ...]

    def piece(self, run: PartitionRun, flat: Callable[[], torch.Tensor]) -> Piece:
        """The run in a flat tensor that is laid out as the master is."""
        return Piece(
            lambda: _run_of(flat(), run, self.master.numel()), (run.numel,), run.layout, rank_here()
        )


def partitions_of(optimizer: Any, names: dict[int, str]) -> list[Partition]:
    """The partitions of this rank. names: those of the parameters by their ids."""
    if hasattr(optimizer, "bit16_groups_flat"):
        return [_cut_anywhere(optimizer, index, names) for index in _groups(optimizer)]
    return [_cut_equally(optimizer, index, names) for index in range(len(optimizer.fp16_groups))]


def split_piece(memory: Callable[[], torch.Tensor], numel: int, mesh: Mesh) -> Piece:
    """A parameter of stage 3 by itself: `memory` gives this rank's part, with its padding."""
    layout = _split(mesh)
    count = layout.box((numel,), rank_here()).shape[0]
    return Piece(lambda: memory().view(-1)[:count], (numel,), layout, rank_here())


def name_of(parameter: Any, names: dict[int, str]) -> str:
    """The name of a parameter that the optimizer updates."""
    name = names.get(id(parameter))
    if name is None:
        raise UnsupportedValueError(
            "the optimizer of an engine updates a parameter that its module does not have",
            facts={"shape": list(getattr(parameter, "ds_shape", parameter.shape))},
            hint="initialize the engine with the parameters of its model",
        )
    return name


def mesh_of(group: Any) -> Mesh:
    """The ranks over which ZeRO cuts."""
    ranks = tuple(distributed.get_process_group_ranks(group))
    return Mesh((len(ranks),), ranks)


def rank_here() -> int:
    return distributed.get_rank()


def _groups(optimizer: Any) -> range:
    return range(len(optimizer.bit16_groups_flat))


def _run_of(flat: torch.Tensor, run: PartitionRun, numel: int) -> torch.Tensor:
    if flat.numel() != numel:
        raise UnsupportedValueError(
            "a partition of the engine is not in memory",
            facts={"parameter": run.name, "elements": numel, "in memory": flat.numel()},
            hint="call engine.reload_states() before a save or a restore",
        )
    return flat.narrow(0, run.begin, run.count)


# -- stages 1 and 2 ------------------------------------------------------------------------------


def _cut_anywhere(optimizer: Any, index: int, names: dict[int, str]) -> Partition:
    flat, master = optimizer.bit16_groups_flat[index], optimizer.single_partition_of_fp32_groups
    mesh = mesh_of(optimizer.real_dp_process_group[index])
    size = flat.numel() // len(mesh.ranks)
    runs = [
        _run(name_of(each, names), _place_in(flat, each), each.numel(), size, mesh)
        for each in optimizer.bit16_groups[index]
    ]
    return Partition(master[index], None, index, tuple(runs))


def _place_in(flat: torch.Tensor, parameter: torch.Tensor) -> int:
    """Where in the flat buffer a parameter begins."""
    at, odd = divmod(parameter.data_ptr() - flat.data_ptr(), flat.element_size())
    if odd or at < 0 or at + parameter.numel() > flat.numel():
        raise UnsupportedValueError(
            "a parameter of the engine does not lie in its flat buffer",
            facts={"shape": list(parameter.shape), "elements of the buffer": flat.numel()},
            hint="call engine.reload_states() before engine_state(engine)",
        )
    return at


def _run(name: str, at: int, numel: int, size: int, mesh: Mesh) -> PartitionRun:
    """The part of elements [at, at + numel) in this rank's partition; all have `size` elements."""
    boxes, own = [], (0, 0)
    for index in range(at // size, -(-(at + numel) // size)):
        begin, end = max(at, index * size), min(at + numel, (index + 1) * size)
        boxes.append((Box((begin - at,), (end - begin,)), mesh.ranks[index]))
        if mesh.ranks[index] == rank_here():
            own = begin - index * size, end - begin
    return PartitionRun(name, numel, ExplicitLayout(tuple(boxes)), *own)


# -- stage 3 -------------------------------------------------------------------------------------


def _cut_equally(optimizer: Any, index: int, names: dict[int, str]) -> Partition:
    layout, runs, at = _split(mesh_of(optimizer.dp_process_group)), [], 0
    for parameter in optimizer.fp16_groups[index]:
        name, numel, size = (
            name_of(parameter, names),
            parameter.ds_numel,
            parameter.partition_numel(),
        )
        if size != math.ceil(numel / len(layout.mesh.ranks)):
            raise UnsupportedValueError(
                "ZeRO-3 cuts a parameter in a way that is not known",
                facts={"parameter": name, "elements": numel, "elements of a part": size},
            )
        count = layout.box((numel,), rank_here()).shape[0]
        runs.append(PartitionRun(name, numel, layout, at, count))
        at += size
    group = optimizer.sub_group_to_group_id[index]
    master = optimizer.fp32_partitioned_groups_flat[index]
    weights = optimizer.fp16_partitioned_groups_flat
    return Partition(master, lambda: weights[index], group, tuple(runs))


def _split(mesh: Mesh) -> Layout:
    return Layout(mesh, ((0, 0),))
