"""Sharded safetensors as Hugging Face writes them -> a tree of streamed tensors, and back.

Invariants: a tied tensor is written once. The header of its file says which other names it has, in
the way of `safetensors.torch.save_model`: {other name: name}. An import ties these names again.
The format holds tensors by flat names only: what else a step has is named in a warning.
Not here: the header of a file (encoding/header), the destination (partial).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statehold.encoding import header
from statehold.encoding.strictjson import Checker
from statehold.errors import CorruptionError, HeaderError, UnsupportedValueError, UsageError
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import MappedFile, Streamed, memory_of
from statehold.integrations.formats.trees import leaves
from statehold.tensors import dtypes
from statehold.units import GiB

SHARD_BYTES = 5 * GiB
INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_TEXT = re.compile(r"(?!.*\.index\.json).*\.(json|txt|model|jinja)")
_METADATA = {"format": "pt"}


# -- out -----------------------------------------------------------------------------------------


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write the tensors of a tree; returns the names of what the format cannot hold."""
    names: dict[Streamed, list[str]] = {}
    left_out = []
    for name, value in leaves(tree):
        if isinstance(value, Streamed):
            names.setdefault(value, []).append(name)
        else:
            left_out.append(name)
    if not names:
        hint = "export another part with --name, or all with --to torch"
        facts = {"expected": "tensors", "got": f"only {', '.join(left_out[:3]) or 'nothing'}"}
        raise UsageError("hf holds only tensors, and this has none", facts=facts, hint=hint)
    shards = list(_shards(names))
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


def _shards(tensors: Mapping[Streamed, Any]) -> Iterator[list[Streamed]]:
    shard: list[Streamed] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _write(work: PartialExport, file: str, shard: Mapping[Streamed, Sequence[str]]) -> None:
    entries, at = [], 0
    metadata = dict(_METADATA)
    placed = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)  # each aligned to its dtype
    for tensor in placed:
        name, *others = shard[tensor]
        metadata |= dict.fromkeys(others, name)
        code = _code_of(tensor, name)
        shape = dtypes.stored_shape(tensor.dtype, tensor.shape, name)
        entries.append(header.Entry(name, code, shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    raw = header.encode(entries, metadata)
    with work.file(file) as out:
        out.write(raw, 0)
        for entry, tensor in zip(entries, placed, strict=True):
            key = f"{file}:{entry.name}"
            if work.journal.get(key) is None:
                offset = len(raw) + entry.begin
                for part in tensor.parts():
                    out.write(memory_of(part), offset)
                    offset += part.numel()
                    work.done(part.numel())
                out.note(key)
            else:
                work.done(tensor.nbytes)
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


def read(files: Sequence[str], index: Mapping[str, str]) -> dict[str, Streamed]:
    """The tensors of safetensors files by name. index: which file has which, as far as it says."""
    found: dict[str, Streamed] = {}
    for path in files:
        for name, tensor in _tensors(path).items():
            if name in found:
                raise CorruptionError("a checkpoint has a name twice", facts={"name": name})
            found[name] = tensor
    for name, file in index.items():
        if name not in found:
            facts = {"tensor": name, "file": file}
            raise CorruptionError("a checkpoint lacks a tensor that its index has", facts=facts)
    return found


def _tensors(path: str) -> dict[str, Streamed]:
    file = MappedFile(path)
    entries, metadata, data_begin = header.decode(_head(path), file.size, path)
    if "statehold.step" in metadata and "saved_offsets" in metadata.get("DCP_SHARDING_INFO", ""):
        _check_whole(path, entries, metadata)
    found = {}
    for entry in entries:
        dtype = dtypes.dtype_of(entry.dtype, entry.name)
        shape = dtypes.torch_shape(dtype, entry.shape)
        found[entry.name] = file.streamed(dtype, shape, data_begin + entry.begin)
    ties = {other: kept for other, kept in metadata.items() if kept in found}
    return found | {other: found[kept] for other, kept in ties.items() if other not in found}


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(header.LENGTH_BYTES), "little")
        file.seek(0)
        return file.read(header.LENGTH_BYTES + min(length, header.HEADER_BYTES_MAX))


def _check_whole(path: str, entries: Sequence[header.Entry], metadata: Mapping[str, str]) -> None:
    """A file of a step may have parts of tensors: it is no checkpoint of its own."""
    check = Checker(HeaderError, "the metadata of this file are not valid", path)
    where = "statehold.global_shapes"
    shapes = check.object(check.parse(metadata.get(where, "{}").encode(), where, 2), where)
    cut = [each.name for each in entries if shapes.get(each.name) != list(each.shape)]
    if cut:
        facts = {"file": path, "expected": "whole tensors", "got": f"a part of {cut[0]}"}
        raise UnsupportedValueError("this file is a part of a step of statehold", facts=facts)
