"""Checkpoints of DeepSpeed's ZeRO, stages 1 to 3, of any number of ranks -> a state.

Facts: each rank has flat partitions of the fp32 weights and of the moments. In stages 1 and 2 a
rank says where in its partition it has how much of which parameter, and the parts of a parameter
follow each other by rank. In stage 3 each parameter is cut into equal parts, the last one padded,
which lie in the order of `param_shapes`.
Invariants: the parts of a parameter have as many elements as its shape, or the import fails.
Not here: the form of the state (deepspeed_state), universal checkpoints (universal).
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from statehold.errors import CorruptionError, MissingFileError, UnsupportedValueError
from statehold.integrations.formats import deepspeed_state as common
from statehold.integrations.formats.streamed import Streamed, assembled

LATEST = "latest"
OPTIMIZER_STATES = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STATES = "optimizer_state_dict"
_BASE, _SLICES = "base_optimizer_state", "param_slice_mappings"
_PARTITIONS, _FLAT = "single_partition_of_fp32_groups", "fp32_flat_groups"
_SHAPES, _FROZEN_SHAPES = "param_shapes", "frozen_param_shapes"
_FROZEN = "frozen_param_fragments"
# Parts of the files that the state has in another form.
_TAKEN = {common.MODULE, _SHAPES, _FROZEN, _STATES, _BASE, _SLICES, _PARTITIONS, _FLAT}


def directory_of(path: str, names: Collection[str]) -> str | None:
    """The directory with the files: `path`, or the one that its file `latest` names."""
    if any(map(OPTIMIZER_STATES.fullmatch, names)):
        return path
    if LATEST not in names:
        return None
    with open(os.path.join(path, LATEST), encoding="utf-8") as file:
        found = os.path.join(path, os.path.basename(file.read().strip()))
    return found if os.path.isdir(found) else None


def read(directory: str) -> dict[str, Any]:
    """The state of all ranks."""
    models = [common.read(path) for path in common.model_files(directory)]
    ranks = [common.read(path)[_STATES] for path in _optimizer_files(directory)]
    if not models:
        raise MissingFileError("a checkpoint lacks its model states", facts={"file": directory})
    shapes = models[0][_SHAPES]
    if _FLAT in ranks[0]:
        pieces, groups = _stage_3(ranks, shapes), ranks[0][_STATES][common.GROUPS]
        module = {**models[0][common.MODULE], **_frozen(models)}
    elif _SLICES in ranks[0] and isinstance(ranks[0].get(_BASE), Mapping):
        pieces, groups = _stages_1_and_2(ranks), ranks[0][_BASE][common.GROUPS]
        module = models[0][common.MODULE]
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
    named = common.named_groups(groups, order)
    rest = {key: value for key, value in models[0].items() if key not in _TAKEN}
    rest["optimizer"] = {key: item for key, item in ranks[0].items() if key not in _TAKEN}
    return common.state_of(states, module, named, rest)


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
            flat = {common.FP32: rank[_PARTITIONS][group], **rank[_BASE]["state"][group]}
            for name, place in slices.items():
                for key, values in flat.items():
                    pieces[name, key].append(_cut(values, place.start, place.numel))
    return pieces


def _stage_3(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> _Pieces:
    pieces: _Pieces = defaultdict(list)
    for number, rank in enumerate(ranks):
        for part, of_part in enumerate(shapes):
            flat = {common.FP32: rank[_FLAT][part], **rank[_STATES]["state"][part]}
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
    """Parameters of stage 3 that the optimizer does not have."""
    found = {}
    for name, shape in (models[0].get(_FROZEN_SHAPES) or {}).items():
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
