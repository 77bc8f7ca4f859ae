"""Files of torch.save, read as a checkpoint: each nested name with its tensor or value.

Invariants: files are read as data alone (untrusted). Files of today's format are mapped, so only
restored entries are read. Dicts are entered, and lists that hold dicts or tensors. Names are joined
with dots, as those of a Checkpointer are. A tensor that is not plain and dense,
such as a sparse one, counts as a value.
Not here: which name belongs to which live part (stock).
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from statehold.errors import (
    CorruptionError,
    UsageError,
)
from statehold.integrations.dcp import untrusted

WAY_OUT = "leave this entry out of the state"
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # torch's magic number, pickled


def is_head(head: bytes) -> bool:
    """Whether a file with this beginning may be of torch.save."""
    return head.startswith((_ZIP, _LEGACY[:14]))


class TorchSaveReader(StorageReader):
    """Reads files of torch.save, whose names make one checkpoint together."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._content: dict[str, Any] | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _described(value) for name, value in self._loaded().items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        content = self._loaded()
        for item in plan.items:  # before anything is filled
            if item.type is LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                where = ", ".join(self._files[:2])
                untrusted.check_data(content[name], name, where, WAY_OUT)
        for item in plan.items:
            value = content[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                planner.objects[item.dest_index.fqn] = value  # type: ignore[attr-defined]
                continue
            for dim, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                value = value.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isfile(checkpoint_id)

    def _loaded(self) -> dict[str, Any]:
        if self._content is None:
            self._content = {}
            for file in self._files:
                for name, value in _leaves(_load(file), ""):
                    if name in self._content:
                        facts = {"name": name, "file": file}
                        raise CorruptionError("a checkpoint has a name twice", facts=facts)
                    self._content[name] = value
        return self._content


def _load(file: str) -> Mapping[Any, Any]:
    """The saved dict. Raises UsageError for a file that is not of torch.save, or holds no dict."""
    is_zip = is_archive(file)
    found = untrusted.load(file, file, map_location="cpu", mmap=is_zip)
    if not isinstance(found, Mapping):
        untrusted.check_data(found, "", file, "")
        facts = {"file": file, "expected": "a dict of names", "got": type(found).__name__}
        raise UsageError("a file of torch.save holds no names", facts=facts)
    return found


def is_archive(file: str) -> bool:
    """Whether a file is a zip archive, as today's format is; otherwise it is of the older
    format."""
    with open(file, "rb") as raw:
        if raw.read(len(_ZIP)) != _ZIP:
            return False
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as fault:
        facts = {"file": file, "cause": str(fault)}
        raise CorruptionError("a file of torch.save is damaged, or cut", facts=facts) from fault
    if not any(name.endswith("/data.pkl") for name in names):
        shown = ", ".join(names[:4])
        facts = {"file": file, "expected": "data.pkl, as torch.save writes it", "there": shown}
        raise UsageError("this archive is not a file of torch.save", facts=facts)
    if any(name.endswith("/constants.pkl") for name in names):
        raise untrusted.untrusted(file, "a TorchScript program")
    return True


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and value by its name."""
    members = dict(enumerate(value)) if _is_entered(value) else value
    if not isinstance(members, Mapping):
        yield path, value
        return
    for key, item in members.items():
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _is_entered(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, Mapping | torch.Tensor) or _is_entered(item) for item in value
    )


def _described(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_quantized:
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [chunk])
