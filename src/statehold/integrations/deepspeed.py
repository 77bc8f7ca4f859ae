"""Engines of DeepSpeed with steps of statehold (docs/integrations.md).

    state = engine_state(engine)              # after deepspeed.initialize()
    step = ckpt.restore(state) or 0           # for engine.load_checkpoint()
    ckpt.save(step, state)                    # for engine.save_checkpoint()

Invariants: a step of ZeRO restores on any number of ranks and in any stage as it is: the names do
not depend on either, and the runs are those of one flattened tensor. Weights, masters and moments
change only in the step() of the base optimizer, an optimizer of torch, which waits at the gate; so
they are copied lazily. Buffers are copied before save() returns. A state is taken between two
updates only, since a step holds no gradients.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

import statehold
from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import (
    StateMismatchError,
    StepNotFoundError,
    UnsupportedValueError,
    UsageError,
)
from statehold.integrations.trained import check_names, discard_newer, persistent_buffers
from statehold.layout.layout import AnyLayout, Box, ExplicitLayout, Layout, Mesh
from statehold.tensors.kinds.rng import Rng
from statehold.tensors.marks import Volatile
from statehold.tensors.nodes import GROUPS, PARAMS, STATE
from statehold.tensors.placements import Piece

# -- the engine ------------------------------------------------------------------------------------


_KNOWN = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


def engine_state(engine: Any) -> dict[str, Any]:
    """A state for Checkpointer.save() and restore(); call it after deepspeed.initialize().

    Save it after an update. It does not hold the position in the data: put your loader into the
    state, or count batches. Add what else you save: {**engine_state(engine), "data": loader}.

        model       the weights that the model computes with: runs in stage 3, else whole
        fp32        the master weights, as runs of the flattened parameters
        optimizer   the moments by parameter, and the options of the groups
        scheduler   if the engine has one
        deepspeed   counts, the scale of the loss, the shapes of the parameters
        rng         random generators

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
    told = statehold.load(step, "deepspeed")
    shapes, ties = told["shapes"], told.get("ties", {})
    whole = {name: each.view(shapes.get(name, each.shape)) for name, each in found.items()}
    return {**whole, **{other: whole[name] for other, name in ties.items()}}


# -- weights ---------------------------------------------------------------------------------------


def _model(engine: Any, partitions: list[Partition]) -> Any:
    mesh = mesh_of(engine.optimizer.dp_process_group)

    def whole(tensor: torch.Tensor) -> Piece:
        return Piece(tensor, tuple(tensor.shape), Layout(mesh), rank_here())

    kept = persistent_buffers(engine.module).items()
    buffers = {name: Volatile(whole(each)) for name, each in kept}
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
    return Weights(engine.optimizer, {**runs, **frozen, **buffers})


class Weights:
    """The parts of stage 3. Some parameters stay whole on every rank; they are gathered again."""

    def __init__(self, zero: Any, pieces: dict[str, Any]) -> None:
        self._zero = zero
        self._pieces = pieces
        self._moves: list[Callable[[], Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return self._pieces

    def state_to_fill(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """See Pieced. Raises StateMismatchError."""
        check_names("model", self._pieces, saved)
        self._moves = []
        pieces = self._pieces.items()
        return {name: self._to_fill(each, tuple(saved[name].shape)) for name, each in pieces}

    def _to_fill(self, piece: Any, shape: tuple[int, ...]) -> Any:
        if isinstance(piece, Volatile):
            return piece.value
        if piece.shape == shape or piece.shape != (math.prod(shape),):
            return piece
        rows, move = _in_rows(piece, shape)
        self._moves.append(move)
        return rows

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for move in self._moves:
            move()
        self._moves = []
        stay = self._zero.persistent_parameters
        if stay:
            stay[0].partition(stay)  # drops the whole ones, which are old now; no rank waits


def _in_rows(run: Piece, shape: tuple[int, ...]) -> tuple[Piece, Callable[[], Any]]:
    """Memory for all rows of a whole tensor that a run has elements of, and what moves these.

    A step of stage 1 or 2 has whole parameters. A run of elements is no box of one, its rows are.
    """
    (begin,), (count,) = run.box.offsets, run.box.shape
    row = math.prod(shape[1:])
    first, end = (begin // row, -(-(begin + count) // row)) if count else (0, 0)
    rows = Box((first, *[0] * len(shape[1:])), (end - first, *shape[1:]))
    layout = ExplicitLayout(((rows if shape else Box.whole(shape), rank_here()),))
    memory = run.tensor.new_empty(layout.box(shape, rank_here()).shape)
    part = memory.view(-1)[begin - first * row :][:count]
    return Piece(memory, shape, layout, rank_here()), lambda: run.tensor.copy_(part)


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


# -- moments ---------------------------------------------------------------------------------------
# In a step the state of the optimizer has the form of an optimizer of torch: `state` by
# "model.NAME", `param_groups` with names. A moment is a run of the flattened parameter. What is one
# number, such as `step`, is the same on all ranks. What the optimizer already has in memory is
# filled there. What it has not made yet is made for the restore, and put in once all bytes have
# arrived.


class Moments:
    """The base optimizer of a ZeRO optimizer `zero`."""

    def __init__(self, zero: Any, partitions: list[Partition]) -> None:
        self._zero = zero
        self._partitions = partitions
        self._replicated = Layout(mesh_of(zero.dp_process_group))
        self._filling: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """What a save takes. Muon updates its momentum outside step(): it is copied at once."""
        base, found = self._zero.optimizer, {}
        is_early = any(group.get("use_muon") for group in base.param_groups)
        for part in self._partitions:
            held = base.state.get(part.master, {})
            for run in part.runs:
                entries = {key: self._entry(part, run, held, key) for key in held}
                found[_key(run.name)] = Volatile(entries) if is_early else entries
        return {STATE: found, GROUPS: self._groups()}

    def state_to_fill(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """See Pieced. Raises StateMismatchError for a step of other parameters or groups."""
        states, groups = saved[STATE], saved[GROUPS]
        own = [_key(run.name) for part in self._partitions for run in part.runs]
        check_names("optimizer.state", own, states)
        if len(groups) != len(self._groups()):
            raise StateMismatchError(
                "the optimizer of the step has another number of parameter groups",
                facts={"expected": len(self._groups()), "got": len(groups)},
            )
        self._filling, content = [], {}
        for part in self._partitions:
            held = self._held_for(part, states)
            self._filling.append(held)
            for run in part.runs:
                entries = {key: self._entry(part, run, held, key) for key in held}
                content[_key(run.name)] = entries
        return {STATE: content, GROUPS: groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        base = self._zero.optimizer
        for part, held in zip(self._partitions, self._filling, strict=True):
            entries = state[STATE][_key(part.runs[0].name)]
            plain = {key: each for key, each in entries.items() if not isinstance(each, Piece)}
            base.state[part.master] = {**held, **plain}
        for group, options in zip(base.param_groups, state[GROUPS], strict=True):
            group.update({key: value for key, value in options.items() if key != PARAMS})
        self._filling = []
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._lazy_init_hp_params_optimizer_state()  # for safe_get_full_optimizer_state()

    # -- entries -------------------------------------------------------------------------------

    def _entry(self, part: Partition, run: Any, held: Mapping[str, Any], key: str) -> Any:
        """A piece of what the optimizer holds as `key` for a partition, or the plain value."""
        value = held[key]
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim == 0:
            return Piece(value, (), self._replicated, rank_here())
        if value.shape != part.master.shape:
            raise UnsupportedValueError(
                "the optimizer has a state that is neither a number nor as long as its partition",
                facts={
                    "path": f"optimizer.state.{_key(run.name)}.{key}",
                    "shape": list(value.shape),
                    "elements of the partition": part.master.numel(),
                },
            )
        return part.piece(run, partial(held.__getitem__, key))

    def _held_for(self, part: Partition, states: Mapping[str, Any]) -> dict[str, Any]:
        """What the optimizer has for a partition, and what it needs in addition."""
        first, *others = [states[_key(run.name)] for run in part.runs]
        for run, other in zip(part.runs[1:], others, strict=True):
            check_names(f"optimizer.state.{_key(run.name)}", first, other)
        now = self._zero.optimizer.state.get(part.master, {})
        return {key: self._value_for(part, now.get(key), each) for key, each in first.items()}

    def _value_for(self, part: Partition, now: Any, saved: Any) -> Any:
        if not isinstance(saved, torch.Tensor):
            return saved
        shape = () if saved.ndim == 0 else tuple(part.master.shape)
        if isinstance(now, torch.Tensor) and (tuple(now.shape), now.dtype) == (shape, saved.dtype):
            return now
        # Counts of steps lie on the host, unless the update reads them on the device.
        group = self._zero.optimizer.param_groups[part.group]
        is_far = bool(shape or group.get("capturable") or group.get("fused"))
        device = part.master.device if is_far else torch.device("cpu")
        return torch.zeros(shape, dtype=saved.dtype, device=device)

    def _groups(self) -> list[dict[str, Any]]:
        names: dict[int, list[str]] = {}
        for part in self._partitions:
            names.setdefault(part.group, []).extend(_key(run.name) for run in part.runs)
        return [
            {**{key: value for key, value in group.items() if key != PARAMS}, PARAMS: names[index]}
            for index, group in enumerate(self._zero.optimizer.param_groups)
        ]


def _key(name: str) -> str:
    return f"model.{name}"


# -- progress --------------------------------------------------------------------------------------


_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_OF_ZERO = ("overflow", "custom_loss_scaler", "external_loss_scale")


class EngineProgress:
    """What an engine counts itself, the scale of its loss, and the shapes and ties of parameters.

    shapes: those of the parameters, by name. A tied one has its other names in `ties`.
    """

    def __init__(self, engine: Any, shapes: Mapping[str, list[int]]) -> None:
        self._engine = engine
        self._shapes = dict(shapes)
        named, first = engine.module.named_parameters(remove_duplicate=False), dict[int, str]()
        firsts = {name: first.setdefault(id(each), name) for name, each in named}
        self._ties = {other: name for other, name in firsts.items() if other != name}

    def state_dict(self) -> dict[str, Any]:
        engine, zero = self._engine, self._engine.optimizer
        every, of_scaler = engine.gradient_accumulation_steps(), vars(zero.loss_scaler).items()
        if engine.micro_steps % every:
            raise UsageError(
                "a save in the middle of an accumulation would lose its gradients",
                facts={"micro steps": engine.micro_steps, "accumulation": every},
                hint="save after a step() that updates: engine.micro_steps % "
                "engine.gradient_accumulation_steps() == 0",
            )
        return {
            **{name: getattr(engine, name) for name in _COUNTS},
            "updates": engine.micro_steps // every,
            "zero": {name: _plain(getattr(zero, name, None)) for name in _OF_ZERO},
            "loss_scaler": {name: value for name, value in of_scaler if _is_plain(value)},
            "shapes": self._shapes,
            "ties": self._ties,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine, zero = self._engine, self._engine.optimizer
        for name in _COUNTS:
            setattr(engine, name, state[name])
        engine.micro_steps = state["updates"] * engine.gradient_accumulation_steps()
        for part, values in ((zero, state["zero"]), (zero.loss_scaler, state["loss_scaler"])):
            for name, value in values.items():
                if hasattr(part, name):
                    setattr(part, name, value)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    """A number that may be in a tensor; `overflow` of some paths is one."""
    return value.item() if hasattr(value, "item") else value


# -- how ZeRO cuts the parameters ------------------------------------------------------------------
# Facts about DeepSpeed (0.19.8):
# - In stages 1 and 2 the parameters of a group are views of one flat buffer, which is padded at its
#   end. It is cut into equal partitions, so the cuts lie anywhere in a parameter. Each rank has a
#   flat master of its partition. The order in the buffer may depend on the number of ranks.
# - In stage 3 each parameter is flattened and cut into equal parts, the last one padded. That is
#   how torch.chunk cuts. A rank has the parts of several parameters one after the other in a flat
#   master. How many of them share one depends on the number of ranks.
# - If the master weights have the dtype of the model, stage 3 has them once.
#
# The runs of all ranks cover each parameter once, and no padding is in a run. Every rank lists
# every parameter, with an empty run where it has nothing. A run says where the memory is only when
# it is asked, since DeepSpeed may move it.


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
        groups = range(len(optimizer.bit16_groups_flat))
        return [_cut_anywhere(optimizer, index, names) for index in groups]
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
        name, numel = name_of(parameter, names), parameter.ds_numel
        size = parameter.partition_numel()
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


# -- save_checkpoint() and load_checkpoint() -------------------------------------------------------
# The directory is a run. A checkpoint counts once it is committed on all ranks, so no file `latest`
# is needed: the newest step is the latest. What DeepSpeed itself has saved there loads as before,
# until the first step is committed.


CLIENT, TAG = "client", "tag"
_USUAL_TAG = re.compile(r"global_step([0-9]+)")


def save_into_steps(engine: Any, **options: Any) -> Any:
    """Let engine.save_checkpoint() and load_checkpoint() use steps; returns the engine.

    The number of a step is engine.global_steps. Saves return at once; the error of one is raised by
    the next. A save after the load of an older step discards the newer ones.

    Args:
        engine: what deepspeed.initialize() returns.
        options: those of the Checkpointer of each directory, such as keep=3.

    Raises:
        UsageError: engine_state() refuses the engine.
    """
    methods = _Methods(engine, options)
    engine.save_checkpoint, engine.load_checkpoint = methods.save, methods.load
    return engine


class _Methods:
    def __init__(self, engine: Any, options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._options = options
        self._state = engine_state(engine)
        self._stock_load: Callable[..., tuple[str | None, Any]] = engine.load_checkpoint
        # By directory: its run, the last save, and the step that was loaded since.
        self._open: dict[str, Checkpointer] = {}
        self._last: dict[str, Save] = {}
        self._loaded: dict[str, int] = {}

    def save(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeedEngine.save_checkpoint(), in the background."""
        if not save_latest or exclude_frozen_parameters:
            raise UsageError(
                "a step is always the latest, and holds all parameters",
                facts={"save_latest": save_latest, "exclude_frozen": exclude_frozen_parameters},
                hint="leave both arguments out",
            )
        key, step = str(save_dir), self._engine.global_steps
        ckpt = self._opened(key)
        discard_newer(ckpt, self._loaded.get(key))
        self._loaded.pop(key, None)
        name = f"global_step{step}" if tag is None else str(tag)
        state = {**self._state, CLIENT: dict(client_state or {}), TAG: name}
        self._last[key] = ckpt.save(step, state, force=True)
        return True

    def load(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeedEngine.load_checkpoint(). Without a tag: the newest intact step."""
        key = str(load_dir)
        ckpt = self._opened(key)
        if (last := self._last.pop(key, None)) is not None:  # its error is raised once
            last.wait("committed")
        if not ckpt.steps():
            return self._stock_load(
                load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                load_module_only, custom_load_fn,
            )  # fmt: skip
        client: dict[str, Any] = {}
        state = {**self._state, CLIENT: client, TAG: ""}
        skip = [] if load_optimizer_states else ["optimizer"]
        if not load_lr_scheduler_states and "scheduler" in state:
            skip.append("scheduler")
        only = ["model", "fp32", CLIENT] if load_module_only else None
        chosen = None if tag is None else self._step_of(ckpt, str(tag), load_dir)
        step = ckpt.restore(state, chosen, only=only, skip=skip or None)
        if step is not None and not load_module_only:  # of weights alone, nothing goes on
            self._loaded[key] = step
        return f"{load_dir}/{step}", client

    def _step_of(self, ckpt: Checkpointer, tag: str, directory: str) -> int:
        usual, steps = _USUAL_TAG.fullmatch(tag), ckpt.steps()
        if usual and int(usual[1]) in steps:
            return int(usual[1])
        for step in reversed(steps):
            found = {TAG: ""}
            ckpt.restore(found, step, only=[TAG])
            if found[TAG] == tag:
                return step
        raise StepNotFoundError(
            "no committed step has this tag",
            facts={"tag": tag, "run": directory, "steps": ", ".join(map(str, steps))},
        )

    def _opened(self, key: str) -> Checkpointer:
        if key not in self._open:
            self._open[key] = Checkpointer(key, **self._options)
        return self._open[key]
