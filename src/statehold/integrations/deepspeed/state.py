"""The state of a DeepSpeed engine with ZeRO, for a Checkpointer.

    model       the weights that the model computes with: whole in stages 1 and 2, runs in stage 3
    fp32        the master weights, as runs of the flattened parameters
    optimizer   the moments by parameter, and the options of the groups (moments)
    scheduler   if the engine has one
    deepspeed   counts, the scale of the loss, the shapes of the parameters (progress)
    rng         random generators

Invariants: the names do not depend on the number of ranks, and the runs are those of one flattened
tensor, so a step restores on any number of ranks. Weights, masters and moments change only in the
step() of the base optimizer, an optimizer of torch, which waits at the gate; so they are copied
lazily. Buffers are copied before save() returns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import statehold
from statehold.errors import UsageError
from statehold.integrations.comparing import check_names
from statehold.integrations.deepspeed.moments import Moments
from statehold.integrations.deepspeed.partitions import (
    Partition,
    mesh_of,
    partitions_of,
    rank_here,
    split_piece,
)
from statehold.integrations.deepspeed.progress import EngineProgress
from statehold.integrations.trained import persistent_buffers
from statehold.layout.layout import Layout
from statehold.tensors.marks import Volatile
from statehold.tensors.pieces import Piece
from statehold.tensors.rng import Rng

_KNOWN = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


def engine_state(engine: Any) -> dict[str, Any]:
    """A state for Checkpointer.save() and restore(); call it after deepspeed.initialize().

    Save it after an update. It does not hold the position in the data: put your loader into the
    state, or count batches. Add what else you save: {**engine_state(engine), "data": loader}.

    Args:
        engine: what deepspeed.initialize() returns, with ZeRO 1, 2 or 3.

    Raises:
        UsageError: the engine has no ZeRO, or a part of its state does not lie in the memory of
            data-parallel ranks alone: pipeline and tensor parallelism, experts, NVMe.
    """
    _check_supported(engine)
    zero, module = engine.optimizer, engine.module
    names = {id(each): name for name, each in module.named_parameters()}
    partitions = partitions_of(zero, names)
    state: dict[str, Any] = {
        "model": _model(engine, partitions),
        "fp32": {
            run.name: part.piece(run, partial(getattr, part, "master"))
            for part in partitions
            for run in part.runs
        },
        "optimizer": Moments(zero, partitions),
    }
    if callable(getattr(engine.lr_scheduler, "state_dict", None)):
        state["scheduler"] = engine.lr_scheduler
    if getattr(zero, "torch_autocast_gradscaler", None) is not None:
        state["scaler"] = zero.torch_autocast_gradscaler
    if engine.random_ltd_enabled():
        state["random_ltd"] = engine.random_ltd_scheduler
    return {**state, "deepspeed": EngineProgress(engine, _shapes(module)), "rng": Rng()}


def load_weights(step: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The weights of a step of engine_state(), in their shapes; for a run its newest step.

    step: "runs/x" or "runs/x@100". Stage 3 saves flattened tensors: this gives them their shapes.
    """
    found = statehold.load(step, "model")
    shapes = statehold.load(step, "deepspeed")["shapes"]
    return {name: each.view(shapes.get(name, each.shape)) for name, each in found.items()}


# -- weights ---------------------------------------------------------------------------------------


def _model(engine: Any, partitions: list[Partition]) -> Any:
    mesh = mesh_of(engine.optimizer.dp_process_group)
    whole = partial(_whole, layout=Layout(mesh))
    buffers = {name: Volatile(whole(each)) for name, each in _buffers(engine.module)}
    parameters = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() < 3:
        return {**{name: whole(each) for name, each in parameters.items()}, **buffers}
    runs = {
        run.name: part.piece(run, part.weights)
        for part in partitions
        if part.weights is not None
        for run in part.runs
    }
    frozen = {
        name: split_piece(partial(getattr, each, "ds_tensor"), each.ds_numel, mesh)
        for name, each in parameters.items()
        if name not in runs
    }
    return _Weights(engine.optimizer, {**runs, **frozen, **buffers})


def _whole(tensor: torch.Tensor, layout: Layout) -> Piece:
    return Piece(tensor, tuple(tensor.shape), layout, rank_here())


def _buffers(module: nn.Module) -> Any:
    return persistent_buffers(module).items()


class _Weights:
    """The parts of stage 3. Some parameters stay whole on every rank; they are gathered again."""

    def __init__(self, zero: Any, pieces: dict[str, Any]) -> None:
        self._zero = zero
        self._pieces = pieces

    def state_dict(self) -> dict[str, Any]:
        return self._pieces

    def state_to_fill(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """See Pieced. Raises StateMismatchError."""
        check_names("model", self._pieces, saved)
        pieces = self._pieces.items()
        return {name: each.value if isinstance(each, Volatile) else each for name, each in pieces}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stay = self._zero.persistent_parameters
        if stay:
            stay[0].partition(stay)  # drops the whole ones, which are old now; no rank waits


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    return {
        name: list(getattr(each, "ds_shape", each.shape))
        for name, each in module.named_parameters()
    }


# -- what is refused -------------------------------------------------------------------------------


def _check_supported(engine: Any) -> None:
    for reason, hint in _refusals(engine):
        raise UsageError(
            "this engine cannot be saved",
            facts={"because": reason},
            hint=hint or "engine.save_checkpoint() can save it",
        )


def _refusals(engine: Any) -> Any:
    """(why, what helps) for each thing about an engine that no state here can hold."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage not in (1, 2, 3):
        yield f"it trains with ZeRO stage {stage}", "set zero_optimization.stage to 1, 2 or 3"
        return
    if type(zero).__name__ not in _KNOWN:
        yield f"its optimizer is a {type(zero).__name__}", ""
        return
    if engine.pipeline_parallelism:
        yield "it is parallel over a pipeline", ""
    if engine.has_moe_layers:
        yield "it has experts, which ranks do not share", ""
    if mesh_of(zero.dp_process_group).ranks != tuple(range(torch.distributed.get_world_size())):
        yield "not all ranks are data-parallel", ""
    if getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
        yield "a part of its state is on NVMe", "offload to the cpu"
    if getattr(zero, "partial_offload", 1.0) < 1.0 and getattr(zero, "offload_optimizer", False):
        yield "it offloads a part of its optimizer only", "set offload_optimizer.ratio to 1"
    if engine.zero_hpz_partition_size() > 1:
        yield "ranks of a node have a second copy of the weights (hpZ)", ""
    if not isinstance(zero.optimizer, torch.optim.Optimizer):
        yield f"its base optimizer, a {type(zero.optimizer).__name__}, is not one of torch", ""
    for name, each in engine.module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield f"a module has a state of its own (get_extra_state): {name or 'the model'}", ""
