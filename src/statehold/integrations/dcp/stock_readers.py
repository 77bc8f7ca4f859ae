"""Readers of checkpoints of torch and Hugging Face: stock DCP, safetensors, torch.save.

Owns: the kind of a path; reading its names, shapes and bytes.
Invariants: no pickle is trusted. Metadata is read by a list of classes, data with weights_only. A
missing file is an error, unlike with torch's reader, which loads zeros. For a path that is not a
checkpoint, the error says what was expected and what was found.
Not here: which name belongs to which live part (stock).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from statehold.errors import (
    CorruptionError,
    MissingFileError,
    UsageError,
    storage_error,
)
from statehold.format.saved import MANIFEST_NAME
from statehold.integrations.dcp import torch_save, untrusted
from statehold.integrations.dcp.torch_save import TorchSaveReader
from statehold.integrations.dcp.unpickle import load_metadata
from statehold.options.paths import check_path

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = "pytorch_model.bin"
_STEP = re.compile(r"step-\d{12}")
_SHOWN = 12
_EXPECTED = (
    "a file of torch.save or safetensors, or a directory with .metadata (torch.distributed."
    "checkpoint), *.safetensors, pytorch_model.bin, or the index of one of these"
)
_OURS = "restore a step of statehold with Checkpointer(RUN).restore(state), or with StorageReader"


def open_checkpoint(given: str | os.PathLike[str]) -> StorageReader:
    """The reader for a path. Raises UsageError if it is not a checkpoint."""
    path = check_path(given, "the checkpoint")
    try:
        if os.path.isdir(path):
            return _of_directory(path, sorted(os.listdir(path)))
        if not os.path.lexists(path):
            raise _no_checkpoint(path, "nothing")
        return _of_file(path)
    except OSError as error:
        raise storage_error("read a checkpoint", error.errno or 0, path) from error


def _of_file(path: str) -> StorageReader:
    with open(path, "rb") as file:
        head = file.read(16)
    size = os.path.getsize(path)
    if torch_save.is_head(head):
        return TorchSaveReader([path])
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return _HuggingFaceReader(os.path.dirname(path), [path], {})
    raise _no_checkpoint(path, f"a file of {size} bytes that begins with {head!r}")


def _of_directory(path: str, names: list[str]) -> StorageReader:
    if ".metadata" in names:
        return _StockReader(path)
    if MANIFEST_NAME in names:
        raise _no_checkpoint(path, "a step of statehold", _OURS)
    index = next((name for name in _INDICES if name in names), None)
    if index is not None:
        return _indexed(path, index)
    files = [os.path.join(path, name) for name in names if name.endswith(".safetensors")]
    if files:
        return _HuggingFaceReader(path, files, {})
    if _WHOLE in names:
        return TorchSaveReader([os.path.join(path, _WHOLE)])
    hint = None
    if any(map(_STEP.fullmatch, names)):
        hint = _OURS
    elif others := [name for name in names if name.endswith((".pt", ".pth", ".bin"))]:
        hint = f"name the file that is meant: {', '.join(others[:_SHOWN])}"
    more = ", ..." if len(names) > _SHOWN else ""
    there = f"a directory with {', '.join(names[:_SHOWN]) or 'nothing in it'}{more}"
    raise _no_checkpoint(path, there, hint)


def _indexed(path: str, index: str) -> StorageReader:
    where = os.path.join(path, index)
    try:
        with open(where, encoding="utf-8") as file:
            names = {str(key): str(value) for key, value in json.load(file)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        facts = {"file": where, "expected": 'JSON with a "weight_map"', "cause": repr(fault)[:200]}
        raise CorruptionError("the index of a checkpoint cannot be read", facts=facts) from fault
    files = sorted({os.path.join(path, os.path.basename(name)) for name in names.values()})
    for each in files:
        _check_there(each)
    if index == _INDICES[0]:
        return _HuggingFaceReader(path, files, names)
    return TorchSaveReader(files)


def _check_there(file: str) -> None:
    if not os.path.isfile(file):
        raise MissingFileError("a checkpoint lacks a file", facts={"file": file})


def _no_checkpoint(path: str, there: str, hint: str | None = None) -> UsageError:
    facts = {"path": path, "expected": _EXPECTED, "there": there}
    return UsageError("this is not a checkpoint of torch or Hugging Face", facts=facts, hint=hint)


class _StockReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = os.path.join(self.path, ".metadata")
        with open(path, "rb") as file:
            return load_metadata(file.read(), path)


class _Listed(FileSystem):
    """A file system that shows only some files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._files


class _HuggingFaceReader(HuggingFaceStorageReader):
    def __init__(self, directory: str, files: list[str], names: Mapping[str, str]) -> None:
        super().__init__(directory)
        self.fs = _Listed(files)
        self._names = names

    def read_metadata(self) -> Metadata:
        for file in self.fs.ls(self.path):
            _check_there(file)
        try:
            found: Metadata = super().read_metadata()
        except Exception as fault:
            facts = {"files": ", ".join(self.fs.ls(self.path)[:4]), "cause": str(fault)[:200]}
            raise CorruptionError("a safetensors file cannot be read", facts=facts) from fault
        for name, file in self._names.items():
            if name not in found.state_dict_metadata:
                facts = {"tensor": name, "file": file}
                raise CorruptionError("a checkpoint lacks a tensor that its index has", facts=facts)
        for name, entry in found.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if held != math.prod(entry.size):
                facts = {"tensor": name, "shape": str([*entry.size]), "elements there": str(held)}
                hint = "a shard is missing, or the directory has a shard of another checkpoint"
                raise CorruptionError("the shards do not make a tensor", facts=facts, hint=hint)
        return found


class Planner(DefaultLoadPlanner):
    """Takes flat names, and keeps values; reads them without trusting their pickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        name = read_item.dest_index.fqn
        self.objects[name] = untrusted.load(value, f"the value of {name}", map_location="cpu")
        untrusted.check_data(self.objects[name], name, "the checkpoint", torch_save.WAY_OUT)
