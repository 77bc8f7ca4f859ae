"""Sharded safetensors as Hugging Face writes them -> a tree of streamed tensors, and back.

Invariants: a tied tensor is written once. The header of its file says which other names it has, in
the way of `safetensors.torch.save_model`: {other name: name}. An import ties these names again.
The format holds tensors by flat names only: what else a step has is named in a warning. Parts of
tensors, as ranks write them with torch.distributed.checkpoint or statehold, come in whole.
Not here: the header of a file (encoding/header), the destination (partial).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import add, attrgetter
from typing import Any, NamedTuple

from statehold.encoding import header
from statehold.encoding.strictjson import Checker
from statehold.errors import CorruptionError, HeaderError, UnsupportedValueError, UsageError
from statehold.integrations.formats.archives import indexed
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import MappedFile, Streamed, assembled, grouped, leaves
from statehold.tensors import dtypes
from statehold.units import GiB

SHARD_BYTES = 5 * GiB
INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_TEXT = re.compile(r"(?!.*\.index\.json).*\.(json|txt|model|jinja)")
_METADATA = {"format": "pt"}
_OFFSETS, _SHAPES = "DCP_SHARDING_INFO", "statehold.global_shapes"


# -- out -----------------------------------------------------------------------------------------


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write the tensors of a tree; returns the names of what the format cannot hold."""
    names: dict[Streamed, list[str]] = {}
    left_out = []
    found = set[str]()
    for name, value in leaves(tree):
        if isinstance(value, Streamed):
            if name in found:
                raise UnsupportedValueError(
                    "two tensors have one name in safetensors", facts={"name": name}
                )
            found.add(name)
            names.setdefault(value, []).append(name)
        else:
            left_out.append(name)
    if not names:
        hint = "export another part with --name, or all with --to torch"
        facts = {"expected": "tensors", "got": f"only {', '.join(left_out[:3]) or 'nothing'}"}
        raise UsageError("hf holds only tensors, and this has none", facts=facts, hint=hint)
    shards = list(grouped(names, attrgetter("nbytes"), SHARD_BYTES))
    files = [_shard_name(number, len(shards)) for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        _write(work, file, {tensor: names[tensor] for tensor in shard})
    if len(shards) > 1:
        _write_index(work, files, shards, names)
    return left_out


def texts_of(config: str, to: str) -> dict[str, bytes]:
    """The files that from_pretrained() reads beside weights, of a directory or one config.json."""
    if to != "hf":
        raise UsageError("a config goes with the format hf only", facts={"got": to})
    folder = config if os.path.isdir(config) else os.path.dirname(config) or "."
    names = sorted(os.listdir(folder)) if folder == config else [os.path.basename(config)]
    found = {}
    for name in names:
        path = os.path.join(folder, name)
        if _TEXT.fullmatch(name) and os.path.isfile(path):
            with open(path, "rb") as file:
                found[name] = file.read()
    if _CONFIG not in found:
        hint = "pass the directory of the model, which AutoConfig.save_pretrained() writes, too"
        raise UsageError("there is no config.json", facts={"path": config}, hint=hint)
    return found


def _shard_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write(work: PartialExport, file: str, shard: Mapping[Streamed, Sequence[str]]) -> None:
    entries, at = [], 0
    metadata = dict(_METADATA)
    placed = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)  # each aligned to its dtype
    for tensor in placed:
        name, *others = sorted(shard[tensor], key=lambda name: name not in _METADATA)
        metadata |= dict.fromkeys(others, name)
        code = _code_of(tensor, name)
        shape = dtypes.stored_shape(tensor.dtype, tensor.shape, name)
        entries.append(header.Entry(name, code, shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    raw = header.encode(entries, metadata)
    with work.file(file) as out:
        out.write(raw, 0)
        for entry, tensor in zip(entries, placed, strict=True):
            key, begin = f"{file}:{entry.name}", len(raw) + entry.begin
            out.put(key, tensor.nbytes, tensor.views(), begin, work.done)
        out.size(len(raw) + at)


def _code_of(tensor: Streamed, name: str) -> str:
    try:
        return dtypes.code_of(tensor.dtype, name)
    except UnsupportedValueError as error:
        error.summary = "safetensors cannot hold the dtype of a tensor"
        error.hint = "export with --to torch, or a part of the step without it (--name)"
        raise


def _write_index(
    work: PartialExport,
    files: Sequence[str],
    shards: Sequence[Sequence[Streamed]],
    names: Mapping[Streamed, Sequence[str]],
) -> None:
    places = {
        names[tensor][0]: file
        for file, shard in zip(files, shards, strict=True)
        for tensor in shard
    }
    total = sum(tensor.nbytes for tensor in names)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    work.put(INDEX, json.dumps(index, indent=2).encode())


# -- in ------------------------------------------------------------------------------------------


def read(path: str) -> dict[str, Streamed]:
    """The tensors by name of one file, or of a directory; parts of a tensor come in whole."""
    files, index = indexed(path, INDEX, ".safetensors") if os.path.isdir(path) else ([path], {})
    parts: defaultdict[str, list[_Shard]] = defaultdict(list)
    ties: dict[str, str] = {}
    for file in files:
        for part in _parts(file, ties):
            parts[part.name].append(part)
    found = {name: _joined(name, of_name) for name, of_name in parts.items()}
    for name, file in index.items():
        if name not in found:
            facts = {"tensor": name, "file": file}
            raise CorruptionError("a checkpoint lacks a tensor that its index has", facts=facts)
    tied = {other: found[kept] for other, kept in ties.items() if kept in found}
    return {**tied, **found}


class _Shard(NamedTuple):
    """A tensor of a file: a box of the tensor `name`, whose global shape is `shape`, if known."""

    name: str
    tensor: Streamed
    offsets: tuple[int, ...]
    shape: tuple[int, ...] | None

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(add, self.offsets, self.tensor.shape))


def _parts(path: str, ties: dict[str, str]) -> Iterator[_Shard]:
    file = MappedFile(path)
    entries, metadata, data_begin = header.decode(_head(path), file.size, path)
    ties |= {  # `format` is a word of the metadata
        other: kept for other, kept in metadata.items() if other not in {*ties, *_METADATA}
    }
    check = Checker(HeaderError, "the metadata of this file are not valid", path)
    offsets_of, shape_of = (_told(check, metadata, key) for key in (_OFFSETS, _SHAPES))
    for entry in entries:
        dtype = dtypes.dtype_of(entry.dtype, entry.name)
        shape = dtypes.torch_shape(dtype, entry.shape)
        tensor = file.streamed(dtype, shape, data_begin + entry.begin)
        offsets = offsets_of.get(entry.name, (0,) * len(shape))
        of_all = shape_of.get(entry.name)
        if any(len(each) != len(shape) for each in (offsets, of_all or shape)):
            check.fail(entry.name, f"{len(shape)} dimensions", "others")
        yield _Shard(
            entry.name,
            tensor,
            dtypes.torch_shape(dtype, offsets),
            None if of_all is None else dtypes.torch_shape(dtype, of_all),
        )


def _joined(name: str, parts: Sequence[_Shard]) -> Streamed:
    """The tensor that parts make. Raises CorruptionError unless they cover it once."""
    dtype, shape = parts[0].tensor.dtype, parts[0].shape
    if shape is None:
        shape = tuple(map(max, zip(*(part.ends for part in parts), strict=True)))
    held = sum(math.prod(part.tensor.shape) for part in parts)
    if held != math.prod(shape):
        facts = {"tensor": name, "shape": list(shape), "elements there": held}
        hint = "a shard is missing, or the directory has a shard of another checkpoint"
        raise CorruptionError("the shards do not make a tensor", facts=facts, hint=hint)
    if len(parts) == 1:
        return parts[0].tensor
    return assembled(dtype, shape, [part.tensor.chunks[0].at(part.offsets) for part in parts])


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(header.LENGTH_BYTES), "little")
        file.seek(0)
        return file.read(header.LENGTH_BYTES + min(length, header.HEADER_BYTES_MAX))


def _told(check: Checker, metadata: Mapping[str, str], key: str) -> dict[str, tuple[int, ...]]:
    """The numbers that the header of a file has for each tensor: its offsets, or its shape."""
    told = check.object(check.parse(metadata.get(key, "{}").encode(), key, 3), key)
    if key == _OFFSETS:
        told = {n: check.object(each, key).get("saved_offsets") for n, each in told.items()}
    return {name: check.shape(each, key) for name, each in told.items()}
