"""What checkpoints of DeepSpeed hold, as a state that a Checkpointer restores.

    model          the weights that the model computes with, by their names
    fp32           the master weights of the optimizer, by the same names
    optimizer      as an optimizer of torch is saved: state by "model.NAME", param_groups by names
    deepspeed      all else: counters, client state, the loss scaler

Invariants: no class of DeepSpeed is needed or trusted: four classes that its files name become
plain values. Any other is an error with its name. Files of several tensor-parallel or pipeline
ranks are refused.
Not here: where the tensors lie (zero, universal).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from statehold.errors import UnsupportedValueError
from statehold.integrations.formats import archives, untrusted
from statehold.integrations.formats.streamed import Streamed, converted

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
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
    module: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    rest: Mapping[str, Any],
) -> dict[str, Any]:
    """The state. states: of each parameter its fp32 and its moments, by their names."""
    model = dict(module)
    for name, fields in states.items():
        weight = module.get(name)
        if isinstance(weight, Streamed) and weight.nbytes == 0 and fields[FP32].nbytes:
            model[name] = converted(fields[FP32], weight.dtype)  # ZeRO-3 keeps no copy of it
        elif weight is None:
            model[name] = fields[FP32]
    moments = {
        f"model.{name}": {key: value for key, value in fields.items() if key != FP32}
        for name, fields in states.items()
    }
    return {
        "model": model,
        "fp32": {name: fields[FP32] for name, fields in states.items()},
        "optimizer": {STATE: moments, GROUPS: [dict(group) for group in groups]},
        "deepspeed": {key: plain(value) for key, value in rest.items()},
    }


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


def plain(value: Any) -> Any:
    """A value without objects of DeepSpeed: their attributes instead."""
    if isinstance(value, Plain):
        return {key: plain(item) for key, item in vars(value).items()}
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({key: plain(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value
