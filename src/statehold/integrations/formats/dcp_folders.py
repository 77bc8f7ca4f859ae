"""Directories of torch.distributed.checkpoint -> trees of streamed tensors, and back.

Invariants: tensors of several chunks, as FSDP and other sharded trainers write them, come in whole.
Chunks that do not cover a tensor are an error. The metadata is read by a list of classes only. A
chunk and a value are read when they are used. Out
go one chunk for each tensor: a large one in a file of its own, small ones together.
The format has dicts with keys of str only, and no ties: other keys become str, an OrderedDict or a
Counter becomes a dict, tied tensors are written twice, and all are named.
Not here: archives of torch.save, which the chunks are (archives), loads into live states (dcp).
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from statehold.errors import CorruptionError, UnsupportedValueError
from statehold.integrations.formats import archives
from statehold.integrations.formats.archives import plain
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import (
    MappedFile,
    Streamed,
    StreamedChunk,
    StreamedValue,
    assembled,
    grouped,
    is_entered,
    nbytes_of,
    nested,
)
from statehold.integrations.formats.untrusted import dump_metadata, load_metadata, tensor_metadata
from statehold.layout.layout import Box

METADATA = ".metadata"
_Path = tuple[str | int, ...]


# -- in ------------------------------------------------------------------------------------------


def read(directory: str) -> Any:
    """The state in a directory, nested as it was saved."""
    path = os.path.join(directory, METADATA)
    with open(path, "rb") as file:
        metadata = load_metadata(file.read(), path)
    reader = _FolderReader(directory, metadata)
    paths = metadata.planner_data or {}
    found = {name: reader.value(name, each) for name, each in metadata.state_dict_metadata.items()}
    return nested((tuple(paths.get(n, (n,))), value) for n, value in found.items()) or found


class _FolderReader:
    def __init__(self, directory: str, metadata: Metadata) -> None:
        self._directory = directory
        self._files: dict[str, MappedFile] = {}
        self._places: defaultdict[str, list[tuple[MetadataIndex, Any]]] = defaultdict(list)
        for index, place in (metadata.storage_data or {}).items():
            self._places[index.fqn].append((index, place))

    def value(self, name: str, entry: Any) -> Any:
        """The tensor or the value of a name, which is read later."""
        places = self._places[name]
        if not isinstance(entry, TensorStorageMetadata):
            if len(places) != 1:
                raise _damaged(name, "one place of its bytes", len(places))
            return StreamedValue(partial(self._archive, name, places[0][1]))
        shape = tuple(entry.size)
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        chunks = [self._chunk(name, sizes, index, place) for index, place in places]
        chunks = list({chunk.box: chunk for chunk in chunks}.values())  # replicas of a box
        held = sum(chunk.box.numel for chunk in chunks)
        if held != math.prod(shape):
            raise _damaged(name, f"{math.prod(shape)} elements", held)
        return assembled(entry.properties.dtype, shape, chunks)

    def _chunk(
        self, name: str, sizes: Mapping[Any, Any], index: MetadataIndex, place: Any
    ) -> StreamedChunk:
        offsets = min(sizes, default=()) if index.offset is None else tuple(index.offset)
        if offsets not in sizes:
            raise _damaged(name, f"a chunk at {list(offsets)}", "none")
        box = Box(offsets, sizes[offsets])

        def look() -> tuple[torch.Tensor, MappedFile | None]:
            found = self._archive(name, place)
            if isinstance(found, Streamed) and found.shape == box.shape:
                return found.chunks[0].place
            got = list(found.shape) if isinstance(found, Streamed) else type(found).__name__
            raise _damaged(name, f"a tensor of shape {list(box.shape)}", got)

        return StreamedChunk(box, look)

    def _archive(self, name: str, place: Any) -> Any:
        if getattr(place, "transform_descriptors", None):
            facts = {"name": name, "transforms": ", ".join(place.transform_descriptors)}
            raise UnsupportedValueError("an entry of a checkpoint is transformed", facts=facts)
        path = os.path.join(self._directory, os.path.basename(place.relative_path))
        if path not in self._files:
            self._files[path] = MappedFile(path)
        return archives.read(path, place.offset, place.length, file=self._files[path])


def _damaged(name: str, expected: str, got: object) -> CorruptionError:
    facts = {"name": name, "expected": expected, "got": got}
    return CorruptionError("the files of a checkpoint do not have all of an entry", facts=facts)


# -- out -----------------------------------------------------------------------------------------


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write a tree; returns the names of what became something else."""
    changed: list[str] = []
    entries = _entries(plain(tree, "", changed), changed)
    places = _write(work, entries)
    metadata = Metadata(
        {name: _described(value) for name, (_, value) in entries.items()},
        planner_data={name: path for name, (path, _) in entries.items()},
        storage_data={_index(name, value): places[name] for name, (_, value) in entries.items()},
        storage_meta=StorageMeta(checkpoint_id=work.path),
    )
    work.put(METADATA, dump_metadata(metadata))
    return changed


def _entries(tree: Any, changed: list[str]) -> dict[str, tuple[_Path, Any]]:
    """Path and value of each entry by the name that torch's planners give it."""
    found: dict[str, tuple[_Path, Any]] = {}
    seen: set[Streamed] = set()
    for path, value in _walk((), tree, changed):
        name = ".".join(map(str, path))
        if name in found:
            raise UnsupportedValueError(
                "two entries have one name in torch.distributed.checkpoint", facts={"name": name}
            )
        if isinstance(value, Streamed) and value in seen:
            changed.append(name)
        elif isinstance(value, Streamed):
            seen.add(value)
        found[name] = path, value
    return found


def _walk(path: _Path, value: Any, changed: list[str]) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        if path and type(value) is not dict:
            changed.append(".".join(map(str, path)))
        for key, item in value.items():
            if type(key) is not str:
                changed.append(".".join(map(str, (*path, key))))
            yield from _walk((*path, str(key)), item, changed)
    elif type(value) is list and is_entered(value):
        for index, item in enumerate(value):
            yield from _walk((*path, index), item, changed)
    else:
        yield path, value


def _index(name: str, value: Any) -> MetadataIndex:
    if isinstance(value, Streamed):
        return MetadataIndex(name, torch.Size([0] * len(value.shape)), 0)
    return MetadataIndex(name)


def _described(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, Streamed):
        return BytesStorageMetadata()
    return tensor_metadata(value.dtype, value.shape, [Box.whole(value.shape)])


def _write(
    work: PartialExport, entries: Mapping[str, tuple[_Path, Any]]
) -> dict[str, _StorageInfo]:
    places: dict[str, _StorageInfo] = {}
    values = [(name, value) for name, (_, value) in entries.items()]
    groups = grouped(values, lambda each: nbytes_of({"": each[1]}), archives.SMALL_BYTES)
    for number, batch in enumerate(map(dict, groups)):
        file = f"__0_{number}.distcp"
        known = work.journal.get(f"{file}:all")
        if known is None:
            known = json.dumps(_write_batch(work, file, batch))
            work.journal.note(f"{file}:all", known)
            work.journal.flush()
        else:
            work.done(nbytes_of(batch))
        for name, (begin, end) in zip(batch, json.loads(known), strict=True):
            places[name] = _StorageInfo(file, begin, end - begin)
    return places


def _write_batch(work: PartialExport, file: str, batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    if nbytes_of(batch) > archives.SMALL_BYTES:
        [value] = batch.values()
        archives.write(work, file, value)
        return [(0, os.path.getsize(f"{work.directory}/{file}"))]
    content, places = bytearray(), []
    for value in batch.values():
        begin = len(content)
        content += archives.packed(work, value)
        places.append((begin, len(content)))
    work.put(file, bytes(content))
    return places
