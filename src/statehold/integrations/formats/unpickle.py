"""The one place that reads a pickle, and writes one: the `.metadata` of stock checkpoints.

Invariants: only the classes of stock metadata, listed below, are imported or called. Any other name
in the pickle is an error before anything of it happens.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from statehold.errors import CorruptionError, UnsupportedValueError

# What torch.load(weights_only=True) raises for a pickle that holds more than data.
UnpicklingError = pickle.UnpicklingError

_ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    # A path in the metadata is only information, so it becomes one that cannot touch the disk.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
}


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"not a layout of torch: {name!r}")
    return found


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        raise UnsupportedValueError(
            "the metadata of a checkpoint names a class that does not belong in metadata",
            facts={"name": f"{module}.{name}"},
            hint="it may run foreign code when it is unpickled; check where the file comes from",
        )


def load_metadata(raw: bytes, path: str) -> Metadata:
    """The metadata in a pickle; `path` is for messages."""
    try:
        found = _Restricted(io.BytesIO(raw)).load()
    except UnsupportedValueError as error:
        raise error.with_fact("file", path) from None
    except Exception as fault:
        facts = {"file": path, "cause": f"{type(fault).__name__}: {fault}"[:200]}
        raise CorruptionError("the metadata of a checkpoint cannot be read", facts=facts) from fault
    if not isinstance(found, Metadata):
        facts = {"file": path, "expected": "Metadata", "got": type(found).__name__}
        raise CorruptionError("the metadata of a checkpoint cannot be read", facts=facts)
    return found


def dump_metadata(metadata: Metadata) -> bytes:
    """The pickle of metadata, as stock writers write it."""
    return pickle.dumps(metadata)
