"""What checkpoints of DeepSpeed hold, as a state that a Checkpointer restores.

    model          the weights that the model computes with, by their names
    fp32           the master weights of the optimizer, by the same names
    optimizer      as an optimizer of torch is saved: state by "model.NAME", param_groups by names
    deepspeed      all else: counters, client state, the loss scaler

Owns: checkpoints of ZeRO, stages 1 to 3, of any number of ranks, into such a state; universal
checkpoints into such a state, and back.
Invariants: no class of DeepSpeed is needed or trusted: four classes that its files name become
plain values. Any other is an error with its name. Files of several tensor-parallel or pipeline
ranks are refused.
Not here: archives (archives).
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from statehold.errors import CorruptionError, MissingFileError, UnsupportedValueError
from statehold.integrations.formats import archives, untrusted
from statehold.integrations.formats.archives import plain
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import Streamed, assembled, converted, leaves, replaced

MODEL_STATES = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
MODULE, GROUPS, STATE, FP32 = "module", "param_groups", "state", "fp32"


class Plain:
    """An object of DeepSpeed: only its attributes."""


class LossScaler(Plain):
    """The scale of a loss."""


class DynamicLossScaler(Plain):
    """The same; it changes."""


class Fragment(Plain):
    """A part of a flat tensor."""

    start: int
    numel: int


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
CLASSES = [
    (LossScaler, f"{_SCALERS}.LossScaler"),
    (DynamicLossScaler, f"{_SCALERS}.DynamicLossScaler"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def read(path: str) -> Any:
    """A file of DeepSpeed."""
    found = archives.read(path, classes=CLASSES)
    untrusted.check_data(found, "", path, "")
    return found


def model_files(directory: str) -> list[str]:
    """The files of model states, by data-parallel rank."""
    found = []
    for name in os.listdir(directory):
        match = MODEL_STATES.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise UnsupportedValueError(
                "a checkpoint of DeepSpeed has several tensor-parallel or pipeline ranks",
                facts={"directory": directory, "file": name},
                hint="convert it with DeepSpeed's ds_to_universal, and import the result",
            )
        found.append((int(match[1] or 0), os.path.join(directory, name)))
    return [path for _, path in sorted(found)]


def state_of(
    states: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    models: Sequence[Mapping[str, Any]],
    optimizer: Mapping[str, Any],
) -> dict[str, Any]:
    """The state. states: of each parameter its fp32 and its moments, by their names. models: what
    each rank's file of model states has. optimizer: what one rank's file of the optimizer has."""
    masters = {name: fields[FP32] for name, fields in states.items()}
    moments = {
        f"model.{name}": {key: value for key, value in fields.items() if key != FP32}
        for name, fields in states.items()
        if len(fields) > 1  # SGD has no moments, and nothing has them before the first update
    }
    rest, of_optimizer = (
        {key: value for key, value in content.items() if key not in _TAKEN}
        for content in (models[0], optimizer)
    )
    return {
        "model": _weights(masters, models),
        "fp32": masters,
        "optimizer": {STATE: moments, GROUPS: [dict(group) for group in groups]},
        "deepspeed": _plain_values({**rest, "optimizer": of_optimizer}),
    }


def _weights(masters: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The weights of a model. In ZeRO-3 its file has an empty tensor for each that is cut."""
    first = models[0]
    frozen, ties = _frozen(models), first.get(_TIES) or {}
    model = {**first[MODULE], **frozen}
    for name, master in masters.items():
        weight = model.get(name)
        if weight is None or _is_empty(weight):
            model[name] = master if weight is None else converted(master, weight.dtype)
    model |= {other: model[name] for other, name in ties.items() if name in model}
    known = {*masters, *frozen, *ties, *(first.get(_BUFFERS) or ())}
    for name, weight in model.items():
        if _is_empty(weight) and name not in known:
            facts = {"name": name, "expected": "a weight, or the name that it is tied to"}
            raise CorruptionError("a checkpoint of DeepSpeed lacks a weight", facts=facts)
    return model


def _is_empty(weight: Any) -> bool:
    """Whether ZeRO-3 has cut the weight: a weight of its own may have no elements, too."""
    return isinstance(weight, Streamed) and weight.shape == (0,)


def named_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The groups of an optimizer with its parameters by name. names: those of each group, or of
    each part of the only group."""
    if len(groups) == 1:
        names = [[name for part in names for name in part]]
    if len(groups) != len(names):
        raise UnsupportedValueError(
            "a checkpoint does not say which parameters belong to which group of the optimizer",
            facts={"groups": len(groups), "parts": len(names)},
            hint="convert it with DeepSpeed's ds_to_universal, and import the result",
        )
    return [
        {**group, "params": [f"model.{name}" for name in part]}
        for group, part in zip(groups, names, strict=True)
    ]


def _plain_values(value: Any) -> Any:
    """A value without objects of DeepSpeed: their attributes instead."""
    return replaced(
        value, lambda leaf: _plain_values(vars(leaf)) if isinstance(leaf, Plain) else leaf
    )


# -- ZeRO ------------------------------------------------------------------------------------------
# Each rank has flat partitions of the fp32 weights and of the moments. In stages 1 and 2 a rank
# says where in its partition it has how much of which parameter, and the parts of a parameter
# follow each other by rank. In stage 3 each parameter is cut into equal parts, the last one padded,
# which lie in the order of `param_shapes`. The parts of a parameter have as many elements as its
# shape, or the import fails.


LATEST = "latest"
OPTIMIZER_STATES = re.compile(r"(?:\w+_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_STATES = "optimizer_state_dict"
_BASE, _SLICES = "base_optimizer_state", "param_slice_mappings"
_PARTITIONS, _FLAT = "single_partition_of_fp32_groups", "fp32_flat_groups"
_SHAPES, _FROZEN_SHAPES = "param_shapes", "frozen_param_shapes"
_FROZEN = "frozen_param_fragments"
_TIES, _BUFFERS = "shared_params", "buffer_names"
# Parts of the files that the state has in another form.
_TAKEN = {MODULE, GROUPS, _SHAPES, _FROZEN, _STATES, _BASE, _SLICES, _PARTITIONS, _FLAT}


def zero_directory(path: str, names: Collection[str]) -> str | None:
    """The directory with the files: `path`, or the one that its file `latest` names."""
    if any(map(OPTIMIZER_STATES.fullmatch, names)):
        return path
    return _named_in(path, LATEST, names)


def _named_in(path: str, latest: str, names: Collection[str]) -> str | None:
    if latest not in names:
        return None
    with open(os.path.join(path, latest), encoding="utf-8") as file:
        found = os.path.join(path, os.path.basename(file.read().strip()))
    return found if os.path.isdir(found) else None


def read_zero(directory: str) -> dict[str, Any]:
    """The state of all ranks."""
    models = [read(path) for path in model_files(directory)]
    ranks = [read(path)[_STATES] for path in _optimizer_files(directory)]
    if not models:
        raise MissingFileError("a checkpoint lacks its model states", facts={"file": directory})
    shapes = models[0][_SHAPES]
    if _FLAT in ranks[0]:
        pieces, groups = _stage_3(ranks, shapes), ranks[0][_STATES][GROUPS]
    elif _SLICES in ranks[0] and isinstance(ranks[0].get(_BASE), Mapping):
        pieces, groups = _stages_1_and_2(ranks), ranks[0][_BASE][GROUPS]
    else:
        facts = {"directory": directory, "expected": _SLICES, "there": ", ".join(ranks[0])}
        raise UnsupportedValueError(
            "a checkpoint of ZeRO does not say where its parameters lie", facts=facts,
            hint="save it with a newer DeepSpeed",
        )  # fmt: skip
    whole = {name: shape for group in shapes for name, shape in group.items()}
    states: dict[str, dict[str, Any]] = {}
    for (name, key), found in pieces.items():
        states.setdefault(name, {})[key] = _joined(f"{name}.{key}", tuple(whole[name]), found)
    order = [[name for name in group if name in states] for group in shapes]
    return state_of(states, named_groups(groups, order), models, ranks[0])


def _optimizer_files(directory: str) -> list[str]:
    found = {}
    for name in os.listdir(directory):
        match = OPTIMIZER_STATES.fullmatch(name)
        if match and not int(match[2]):
            found[int(match[1])] = os.path.join(directory, name)
    missing = sorted(set(range(max(found) + 1)) - found.keys())
    if missing:
        facts = {"file": directory, "ranks without one": ", ".join(map(str, missing))}
        raise MissingFileError("a checkpoint lacks the optimizer's state of a rank", facts=facts)
    return [found[rank] for rank in sorted(found)]


# Of each rank, flat tensors of parts of a parameter, or a value.
_Pieces = dict[tuple[str, str], list[Any]]


def _stages_1_and_2(ranks: Sequence[Mapping[str, Any]]) -> _Pieces:
    pieces: _Pieces = defaultdict(list)
    for rank in ranks:
        for group, slices in enumerate(rank[_SLICES]):
            flat = {FP32: rank[_PARTITIONS][group], **rank[_BASE]["state"].get(group, {})}
            for name, place in slices.items():
                for key, values in flat.items():
                    pieces[name, key].append(_cut(values, place.start, place.numel))
    return pieces


def _stage_3(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> _Pieces:
    pieces: _Pieces = defaultdict(list)
    for number, rank in enumerate(ranks):
        for part, of_part in enumerate(shapes):
            flat = {FP32: rank[_FLAT][part], **rank[_STATES]["state"].get(part, {})}
            at = 0
            for name, shape in of_part.items():
                size, count = _part_of(math.prod(shape), number, len(ranks))
                for key, values in flat.items():
                    pieces[name, key].append(_cut(values, at, count))
                at += size
    return pieces


def _part_of(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """The size of a part with its padding, and how many elements of this rank's are real."""
    size = -(-numel // ranks)
    return size, max(0, min(size, numel - rank * size))


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Streamed]:
    """Parameters of stage 3 that the optimizer does not have. In others the module has them."""
    found, module = {}, models[0][MODULE]
    for name, shape in (models[0].get(_FROZEN_SHAPES) or {}).items():
        if name in module and not _is_empty(module[name]):
            continue
        pieces = [
            _cut(model[_FROZEN][name], 0, _part_of(math.prod(shape), rank, len(models))[1])
            for rank, model in enumerate(models)
        ]
        found[name] = _joined(f"{name}.frozen", tuple(shape), pieces)
    return found


def _cut(values: Any, begin: int, count: int) -> Any:
    """Elements of a flat tensor; a scalar, such as the count of steps, as it is."""
    if not isinstance(values, Streamed) or values.shape == ():
        return values
    [chunk] = values.chunks
    if begin + count > values.shape[0]:
        facts = {"expected": f"at most {values.shape[0]} elements", "got": begin + count}
        raise CorruptionError("a partition of ZeRO is too small for its parameters", facts=facts)
    return assembled(values.dtype, (count,), [chunk.run(begin, begin + count, 0)])


def _joined(name: str, shape: tuple[int, ...], pieces: Sequence[Any]) -> Any:
    first = pieces[0]
    if not isinstance(first, Streamed):
        return first
    if first.shape == ():
        return replace(first)  # each parameter counts its own steps
    chunks, at = [], 0
    for piece in filter(lambda each: each.shape[0], pieces):
        chunks.append(piece.chunks[0].run(0, piece.shape[0], at))
        at += piece.shape[0]
    if at != math.prod(shape):
        facts = {"name": name, "expected": list(shape), "got": f"{at} elements"}
        raise CorruptionError("the ranks of ZeRO do not have all of a parameter", facts=facts)
    return assembled(first.dtype, shape, chunks)


# -- universal checkpoints -------------------------------------------------------------------------
# DST/latest_universal names the directory DST/global_stepN. There are mp_rank_00_model_states.pt,
# zero/optimizer_state.pt and, for each parameter, zero/NAME/fp32.pt, exp_avg.pt, ...
#
# DeepSpeed loads the parameters by name, on any number of ranks, and takes fp32 weights. It reads
# `latest_universal` if a job names no directory.
#
# A state that an import made goes out as it came in. Of a state of torch, the master weights are
# the weights of the model, converted to float32, and the optimizer has to be saved by the names of
# its parameters, as a Checkpointer does.


LATEST_UNIVERSAL, ZERO, OPTIMIZER = "latest_universal", "zero", "optimizer_state.pt"
# The first version of DeepSpeed whose files have all that these have.
VERSION = "0.14.0"
_PARAM, _STEP = "param", "step"


def universal_directory(path: str, names: Collection[str]) -> str | None:
    """The directory with zero/: `path`, or the one that its file `latest_universal` names."""
    return path if ZERO in names else _named_in(path, LATEST_UNIVERSAL, names)


def read_universal(directory: str) -> dict[str, Any]:
    """The state in a universal checkpoint."""
    zero = os.path.join(directory, ZERO)
    states = {
        name: _fields(os.path.join(zero, name))
        for name in sorted(os.listdir(zero))
        if os.path.isdir(os.path.join(zero, name))
    }
    lacking = [name for name, fields in states.items() if FP32 not in fields]
    files = model_files(directory)
    if lacking or not files:
        what = f"{lacking[0]}/fp32.pt" if lacking else "mp_rank_00_model_states.pt"
        raise MissingFileError("a universal checkpoint lacks a file", facts={"file": what})
    models = [read(file) for file in files]  # of ZeRO-3 there are several
    optimizer = read(os.path.join(zero, OPTIMIZER))
    shapes = models[0].get(_SHAPES) or [dict.fromkeys(states)]
    order = [[name for name in group if name in states] for group in shapes]
    groups = named_groups(optimizer[GROUPS], order)
    ordered = {name: states.pop(name) for group in order for name in group} | states
    whole = {name: shape for group in shapes for name, shape in group.items() if shape is not None}
    ordered = {name: _shaped(fields, whole.get(name)) for name, fields in ordered.items()}
    return state_of(ordered, groups, models, optimizer)


def _fields(directory: str) -> dict[str, Any]:
    """fp32, the moments and the step of one parameter."""
    found = {}
    for name in sorted(os.listdir(directory)):
        content = read(os.path.join(directory, name))
        if isinstance(content, Mapping):
            if _PARAM not in content:
                facts = {"file": os.path.join(directory, name), "expected": _PARAM}
                raise CorruptionError("a file of a universal checkpoint has no tensor", facts=facts)
            content = content[_PARAM]
        found[name.removesuffix(".pt")] = content
    return found


def _shaped(fields: Mapping[str, Any], shape: Sequence[int] | None) -> dict[str, Any]:
    """The fields in the shape of their parameter; of ZeRO-3 they are flat."""
    return {
        key: assembled(value.dtype, tuple(shape), value.chunks)
        if shape is not None and value.shape == (math.prod(shape),)
        else value
        for key, value in fields.items()
    }


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write a state with "model" and "optimizer"; returns the names of what is left out."""
    model, optimizer = _part(tree, "model"), _part(tree, "optimizer")
    masters = tree.get(FP32, {})
    rest = dict(tree.get("deepspeed", {}))
    tag = f"global_step{int(rest.get('global_steps', 0))}"
    taken = ("model", "optimizer", FP32, "deepspeed")
    left_out = [name for name, _ in leaves({key: tree[key] for key in tree if key not in taken})]
    states = _named(optimizer, model)
    for name, weight in model.items():
        if "/" in name:
            raise UnsupportedValueError("a name cannot name a directory", facts={"name": name})
        if isinstance(weight, Streamed) and weight.dtype.is_floating_point:
            _write_parameter(work, f"{tag}/{ZERO}/{name}", masters.get(name, weight),
                             states.get(name, {}))  # fmt: skip
    archives.put(work, f"{tag}/{ZERO}/{OPTIMIZER}", _optimizer(optimizer, rest, left_out))
    archives.put(work, f"{tag}/mp_rank_00_model_states.pt", _model(model, rest, left_out))
    work.put(LATEST_UNIVERSAL, tag.encode())
    return left_out


def _part(tree: Any, name: str) -> Mapping[str, Any]:
    found = tree.get(name) if isinstance(tree, Mapping) else None
    if not isinstance(found, Mapping):
        there = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
        raise UnsupportedValueError(
            "a universal checkpoint needs a model and its optimizer",
            facts={"expected": '"model" and "optimizer" in the state', "there": there},
            hint='save {"model": model, "optimizer": optimizer}, or export with --to hf',
        )
    return found


def _named(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each parameter by its name in the model."""
    states = {}
    for name, fields in optimizer.get(STATE, {}).items():
        short = str(name).removeprefix("model.")
        if short not in model:
            raise UnsupportedValueError(
                "an optimizer has a parameter that the model does not have",
                facts={"parameter": name, "expected": "model.NAME, with a name of the model"},
                hint="hand the optimizer itself to save(), and not its state_dict()",
            )
        states[short] = fields
    return states


def _write_parameter(
    work: PartialExport, directory: str, master: Streamed, fields: Mapping[str, Any]
) -> None:
    archives.put(work, f"{directory}/{FP32}.pt", _entry(master))
    for key, value in fields.items():
        is_whole = isinstance(value, Streamed) and value.shape == master.shape and key != _STEP
        archives.put(work, f"{directory}/{key}.pt", _entry(value) if is_whole else value)


def _entry(tensor: Streamed) -> dict[str, Any]:
    return {_PARAM: converted(tensor, torch.float32), "cat_dim": 0}


def _optimizer(
    optimizer: Mapping[str, Any], rest: dict[str, Any], changed: list[str]
) -> dict[str, Any]:
    groups = [{**group, "params": list(range(len(group["params"])))} for group in optimizer[GROUPS]]
    found = {"ds_version": VERSION, **rest.pop("optimizer", {}), GROUPS: groups}
    found.pop("loss_scaler", None)  # an object, which the job makes by its own configuration
    return dict(plain(found, "optimizer", changed))


def _model(model: Mapping[str, Any], rest: Mapping[str, Any], changed: list[str]) -> dict[str, Any]:
    shapes = OrderedDict(
        (name, torch.Size(weight.shape))
        for name, weight in model.items()
        if isinstance(weight, Streamed)
    )
    found: dict[str, Any] = {
        MODULE: OrderedDict(model),
        "param_shapes": [shapes],
        "buffer_names": [name for name in shapes if not model[name].dtype.is_floating_point],
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        **dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0),
        **dict.fromkeys(("dp_world_size", "mp_world_size"), 1),
        "ds_config": {},
        "ds_version": VERSION,
    }
    return dict(plain({**found, **rest}, "", changed))
