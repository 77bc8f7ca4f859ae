"""Universal checkpoints of DeepSpeed -> a state, and back.

    DST/latest_universal                     the name of the directory below
    DST/global_stepN/mp_rank_00_model_states.pt
    DST/global_stepN/zero/optimizer_state.pt
    DST/global_stepN/zero/NAME/fp32.pt, exp_avg.pt, ...

Facts: DeepSpeed loads the parameters by name, on any number of ranks, and takes fp32 weights. It
reads `latest_universal` if a job names no directory.
Invariants: a state that an import made goes out as it came in. Of a state of torch, the master
weights are the weights of the model, converted to float32, and the optimizer has to be saved by the
names of its parameters, as a Checkpointer does.
Not here: the form of the state (deepspeed_state), archives (archives).
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from statehold.errors import CorruptionError, MissingFileError, UnsupportedValueError
from statehold.integrations.formats import archives
from statehold.integrations.formats import deepspeed_state as common
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import Streamed, assembled, converted
from statehold.integrations.formats.torch_files import plain
from statehold.integrations.formats.trees import leaves

LATEST, ZERO, OPTIMIZER = "latest_universal", "zero", "optimizer_state.pt"
# The first version of DeepSpeed whose files have all that these have.
VERSION = "0.14.0"
_PARAM, _STEP = "param", "step"
_OTHER = ("optimizer_state_dict", "fp32_flat_groups")  # partitions of the job that wrote it


# -- in ------------------------------------------------------------------------------------------


def directory_of(path: str, names: Collection[str]) -> str | None:
    """The directory with zero/: `path`, or the one that its file `latest_universal` names."""
    if ZERO in names:
        return path
    if LATEST not in names:
        return None
    with open(os.path.join(path, LATEST), encoding="utf-8") as file:
        return os.path.join(path, os.path.basename(file.read().strip()))


def read(directory: str) -> dict[str, Any]:
    """The state in a universal checkpoint."""
    zero = os.path.join(directory, ZERO)
    states = {
        name: _fields(os.path.join(zero, name))
        for name in sorted(os.listdir(zero))
        if os.path.isdir(os.path.join(zero, name))
    }
    lacking = [name for name, fields in states.items() if common.FP32 not in fields]
    files = common.model_files(directory)
    if lacking or not files:
        what = f"{lacking[0]}/fp32.pt" if lacking else "mp_rank_00_model_states.pt"
        raise MissingFileError("a universal checkpoint lacks a file", facts={"file": what})
    model = common.read(files[0])
    optimizer = common.read(os.path.join(zero, OPTIMIZER))
    shapes = model.get("param_shapes") or [dict.fromkeys(states)]
    order = [[name for name in group if name in states] for group in shapes]
    groups = optimizer.pop(common.GROUPS)
    rest = {
        key: value for key, value in model.items() if key not in (common.MODULE, "param_shapes")
    }
    rest["optimizer"] = {key: item for key, item in optimizer.items() if key not in _OTHER}
    named = common.named_groups(groups, order)
    ordered = {name: states.pop(name) for group in order for name in group} | states
    whole = {name: shape for group in shapes for name, shape in group.items() if shape is not None}
    ordered = {name: _shaped(fields, whole.get(name)) for name, fields in ordered.items()}
    return common.state_of(ordered, model[common.MODULE], named, rest)


def _fields(directory: str) -> dict[str, Any]:
    """fp32, the moments and the step of one parameter."""
    found = {}
    for name in sorted(os.listdir(directory)):
        content = common.read(os.path.join(directory, name))
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


# -- out -----------------------------------------------------------------------------------------


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write a state with "model" and "optimizer"; returns the names of what is left out."""
    model, optimizer = _part(tree, "model"), _part(tree, "optimizer")
    masters = tree.get(common.FP32, {})
    rest = dict(tree.get("deepspeed", {}))
    tag = f"global_step{int(rest.get('global_steps', 0))}"
    left_out = [
        name
        for key in tree
        if key not in ("model", "optimizer", common.FP32, "deepspeed")
        for name, _ in leaves({key: tree[key]})
    ]
    states = _named(optimizer, model)
    for name, weight in model.items():
        if "/" in name:
            raise UnsupportedValueError("a name cannot name a directory", facts={"name": name})
        if isinstance(weight, Streamed) and weight.dtype.is_floating_point:
            _write_parameter(work, f"{tag}/{ZERO}/{name}", masters.get(name, weight),
                             states.get(name, {}))  # fmt: skip
    archives.put(work, f"{tag}/{ZERO}/{OPTIMIZER}", _optimizer(optimizer, rest, left_out))
    archives.put(work, f"{tag}/mp_rank_00_model_states.pt", _model(model, rest, left_out))
    work.put(LATEST, tag.encode())
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
    for name, fields in optimizer.get(common.STATE, {}).items():
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
    archives.put(work, f"{directory}/{common.FP32}.pt", _entry(master))
    for key, value in fields.items():
        is_whole = isinstance(value, Streamed) and value.shape == master.shape
        if key == _STEP or not is_whole:
            archives.put(work, f"{directory}/{key}.pt", value)
        else:
            archives.put(work, f"{directory}/{key}.pt", _entry(value))


def _entry(tensor: Streamed) -> dict[str, Any]:
    return {_PARAM: converted(tensor, torch.float32), "cat_dim": 0}


def _optimizer(
    optimizer: Mapping[str, Any], rest: dict[str, Any], changed: list[str]
) -> dict[str, Any]:
    found = dict(rest.pop("optimizer", {}))
    found.pop("loss_scaler", None)  # an object, which the job makes by its own configuration
    groups = [
        {**group, "params": list(range(len(group["params"])))} for group in optimizer[common.GROUPS]
    ]
    found |= {common.GROUPS: groups}
    found.setdefault("ds_version", VERSION)
    return dict(plain(found, "optimizer", changed))


def _model(model: Mapping[str, Any], rest: Mapping[str, Any], changed: list[str]) -> dict[str, Any]:
    shapes = OrderedDict(
        (name, torch.Size(weight.shape))
        for name, weight in model.items()
        if isinstance(weight, Streamed)
    )
    found: dict[str, Any] = {
        common.MODULE: OrderedDict(model),
        "param_shapes": [shapes],
        "buffer_names": [],
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "global_steps": 0,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
    }
    return dict(plain({**found, **rest}, "", changed))
