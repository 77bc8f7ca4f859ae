"""Files of torch.save: in and out in bounded memory, one for a whole step or a shard of many.

Owns: where the bytes of each tensor lie in an archive, and its checksums (CRC-32); directories of
shards with an index, as Hugging Face writes them.
Invariants: no pickle is trusted: torch reads it with weights_only, and reads no data. A record is
verified before its bytes are used for the first time. What is written is an archive as torch.save
writes it, with all checksums.
Not here: which file holds what (one module for each format).
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from statehold.errors import (
    CorruptionError,
    MissingFileError,
    StateholdError,
    UnsupportedValueError,
    UsageError,
)
from statehold.integrations.formats import untrusted
from statehold.integrations.formats.partial import PartialExport
from statehold.integrations.formats.streamed import (
    PART_BYTES,
    MappedFile,
    Streamed,
    in_memory,
    leaves,
    nbytes_of,
    replaced,
    whole,
)
from statehold.process.host_memory import available
from statehold.process.worker import apart
from statehold.units import MiB

# -- in ------------------------------------------------------------------------------------------
# A file of the format before torch 1.6 is read as a whole, and has to fit into the memory that is
# available.


def is_head(head: bytes) -> bool:
    """Whether a file with this beginning may be of torch.save."""
    return head.startswith((_ZIP, _LEGACY))


class _Slice(io.RawIOBase):
    """The bytes [begin, begin + size) of a file, as a file."""

    def __init__(self, path: str, begin: int, size: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._begin, self._size, self._at = begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, memory: Any) -> int:
        size = max(0, min(len(memory), self._size - self._at))
        count = os.preadv(self._fd, [memoryview(memory)[:size]], self._begin + self._at)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def read(
    path: str,
    begin: int = 0,
    nbytes: int | None = None,
    *,
    classes: Sequence[Any] = (),
    file: MappedFile | None = None,
) -> Any:
    """What torch.save wrote to a file, or to a part of it.

    classes: what torch.load may make in addition to data. file: the file, if it is mapped already.
    """
    size = os.path.getsize(path) - begin if nbytes is None else nbytes
    is_part = begin > 0 or nbytes is not None
    if not is_part:
        with open(path, "rb") as raw:
            if raw.read(len(_ZIP)) != _ZIP:
                return _old(path, size)
    mapped = MappedFile(path) if file is None else file
    try:
        with contextlib.closing(_Slice(path, begin, size)) as part:
            records = _records(path, part, mapped, begin)
            part.seek(0)
            stream = io.BufferedReader(part)
            found = untrusted.load(stream, path, classes=classes, map_location="meta")
    except StateholdError:
        raise
    except Exception as fault:
        raise untrusted.refused(path, fault) from fault
    return replaced(found, _Placing(mapped, records))


def _old(path: str, size: int) -> Any:
    room = available()
    if size > room.nbytes:
        facts = {"file": path, "expected": f"at most {room.nbytes} bytes ({room.limit})",
                 "got": size}  # fmt: skip
        raise UnsupportedValueError(
            "a file of torch.save has the format before torch 1.6, which is read as a whole",
            facts=facts,
            hint="load it with torch where there is memory for it, and save it again",
        )
    found = untrusted.load(path, path, map_location="cpu")
    known: dict[Any, Streamed] = {}

    def streamed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
            return leaf
        flags = leaf.is_conj(), leaf.is_neg()
        place = leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride(), flags
        return known.setdefault(place, whole(leaf.detach()))

    return replaced(found, streamed)


class _Record:
    """The bytes [begin, begin + nbytes) of a file, and their checksum."""

    def __init__(self, file: MappedFile, begin: int, info: zipfile.ZipInfo) -> None:
        self.begin = begin
        self._file, self._info = file, info
        self._is_verified = False

    def verify(self) -> None:
        info = self._info
        if not self._is_verified and self._file.crc32(self.begin, info.file_size) != info.CRC:
            facts = {"file": self._file.path, "cause": f"bad CRC-32 of {info.filename!r}"}
            raise _damaged(facts)
        self._is_verified = True


def _records(path: str, part: _Slice, file: MappedFile, begin: int) -> dict[int, _Record]:
    """The records with the bytes of tensors, by their places; all others are verified."""
    found = {}
    try:
        with zipfile.ZipFile(part) as archive:
            _check_kind(path, archive.namelist())
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    facts = {"file": path, "record": info.filename}
                    raise CorruptionError("a record of torch.save is compressed", facts=facts)
                at = _data_begin(part, info)
                if "/data/" in info.filename:
                    found[at] = _Record(file, begin + at, info)
                elif archive.read(info) != b"little" and info.filename.endswith("/byteorder"):
                    raise UnsupportedValueError(
                        "a file of torch.save comes from a big-endian machine", facts={"file": path}
                    )
    except (zipfile.BadZipFile, EOFError, struct.error) as fault:
        raise _damaged({"file": path, "cause": str(fault)}) from fault
    return found


def _damaged(facts: dict[str, Any]) -> CorruptionError:
    return CorruptionError("a file of torch.save is damaged, or cut", facts=facts)


def _check_kind(path: str, names: Sequence[str]) -> None:
    """Raise if an archive is not one that torch.save writes."""
    if not any(name.endswith("/data.pkl") for name in names):
        shown = ", ".join(names[:4])
        facts = {"file": path, "expected": "data.pkl, as torch.save writes it", "there": shown}
        raise UsageError("this archive is not a file of torch.save", facts=facts)
    if any(name.endswith("/constants.pkl") for name in names):
        raise untrusted.untrusted(path, "a TorchScript program")


def _data_begin(file: Any, info: zipfile.ZipInfo) -> int:
    """Where the data of a record begin in its archive."""
    file.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(info.header_offset + 30 + name + extra)


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_quantized


class _Placing:
    """Tensors without memory -> streamed ones, by the place of their storage in the file."""

    def __init__(self, file: MappedFile, records: dict[int, _Record]) -> None:
        self._file, self._records = file, records
        self._known: dict[Any, Streamed] = {}

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
            return leaf
        record = self._records.get(getattr(leaf.untyped_storage(), "_checkpoint_offset", -1))
        if record is None:
            facts = {"file": self._file.path, "shape": list(leaf.shape)}
            raise UnsupportedValueError("a tensor of a file has no bytes in it", facts=facts)
        flags = leaf.is_conj(), leaf.is_neg()
        at = record.begin + int(leaf.storage_offset()) * leaf.dtype.itemsize
        place = at, leaf.dtype, tuple(leaf.shape), leaf.stride(), flags
        if place not in self._known:
            self._known[place] = self._streamed(leaf, at, record)
        return self._known[place]

    def _streamed(self, leaf: torch.Tensor, at: int, record: _Record) -> Streamed:
        found = self._file.streamed(leaf.dtype, leaf.shape, at, leaf.stride(), record.verify)
        if not leaf.is_conj() and not leaf.is_neg():
            return found
        [chunk] = found.chunks
        values = chunk.elements(leaf.dtype)
        values = values.conj() if leaf.is_conj() else values
        return whole(values._neg_view() if leaf.is_neg() else values, self._file)


# -- out -----------------------------------------------------------------------------------------


def write(work: PartialExport, name: str, tree: Any) -> None:
    """Write a tree as the file `name` of the destination."""
    path = work.place(name)
    if work.journal.get(name) is None:
        _skeleton(path, tree)
    with work.file(name) as out:
        out.note(name)
        out.sync()
        sums = {}
        for tensor, place in _places(path, tree).items():
            key, views = f"{name}:{place}", tensor.views()
            found = out.put(key, tensor.nbytes, views, place, work.done, _Crc())
            sums[place] = int(found, 16)
        for data, place in _patches(path, sums):
            out.write(data, place)


def packed(work: PartialExport, tree: Any) -> bytes:
    """A small tree as an archive in memory."""
    file = io.BytesIO()
    torch.save(_with_tensors(tree, lambda tensor: in_memory(tensor, work.done)), file)
    return file.getvalue()


def put(work: PartialExport, name: str, tree: Any) -> None:
    """Write a tree as the file `name`, in memory first if it is small."""
    if nbytes_of({"": tree}) > SMALL_BYTES:
        write(work, name, tree)
    elif work.journal.get(name) is None:
        work.put(name, packed(work, tree))
    else:
        work.done(nbytes_of({"": tree}))


def _skeleton(path: str, tree: Any) -> None:
    """The archive without the bytes of its tensors."""

    def fake(tensor: Streamed) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def save() -> None:
        with FakeTensorMode():
            faked = _with_tensors(tree, fake)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch_save(faked, path)

    apart(save)  # what torch keeps of both belongs to the thread


def _with_tensors(tree: Any, make: Callable[[Streamed], torch.Tensor]) -> Any:
    """The same tree with tensors of torch; ties stay ties."""
    made = cache(make)
    return replaced(tree, lambda leaf: made(leaf) if isinstance(leaf, Streamed) else leaf)


def torch_save(value: Any, path: str) -> None:
    """torch.save(), with the OSError of a storage that takes no more bytes for the file."""
    try:
        torch.save(value, path)
    except RuntimeError:  # from a writer that does not say what the storage has refused
        with open(path, "ab") as file:
            file.write(bytes(MiB))
            file.flush()
            os.fsync(file.fileno())
        raise


def _places(path: str, tree: Any) -> dict[Streamed, int]:
    """Where the bytes of each tensor begin in its archive."""
    found = untrusted.load(path, path, map_location="meta")
    return {  # by position: 1 and "1" are keys of one name
        tensor: int(meta.untyped_storage()._checkpoint_offset)
        for (_, tensor), (_, meta) in zip(leaves(tree), leaves(found), strict=True)
        if isinstance(tensor, Streamed)
    }


class _Crc:
    """The checksum of a record."""

    def __init__(self) -> None:
        self._crc = 0

    def add(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)

    def end(self) -> str:
        return f"{self._crc:08x}"


def _patches(path: str, sums: dict[int, int]) -> Iterator[tuple[bytes, int]]:
    """The checksums of the records whose data begins at each place, and where they belong."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        at = archive.start_dir
        for info in archive.infolist():
            begin = _data_begin(file, info)
            file.seek(at)
            entry = file.read(46)
            if entry[:4] != _CENTRAL:
                raise CorruptionError("an archive has no directory", facts={"file": path})
            if begin in sums:
                crc = struct.pack("<I", sums[begin])
                yield crc, at + _CRC_AT
                file.seek(begin + info.file_size)
                if file.read(4) == _DESCRIPTOR:
                    yield crc, begin + info.file_size + 4
            at += 46 + sum(struct.unpack("<HHH", entry[_SIZES_AT : _SIZES_AT + 6]))


# -- whole steps, and shards of pytorch_model.bin --------------------------------------------------
# What is written can be read with torch.load(weights_only=True). Values that this refuses become
# the nearest ones that it takes, and are named: NumPy scalars become numbers, a deque becomes a
# list, a frozenset a set. The same holds for keys of dicts and members of sets.


WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def export(tree: Any, work: PartialExport) -> list[str]:
    """Write a tree as one file; returns the names of what became something else."""
    changed: list[str] = []
    write(work, os.path.basename(work.path), plain(tree, "", changed))
    return changed


def plain(tree: Any, path: str, changed: list[str]) -> Any:
    """The same tree of values that torch.load(weights_only=True) takes."""
    kind: Any = type(tree)
    if kind in (deque, frozenset) or kind.__module__ == "numpy":
        changed.append(path)
        nearest: Any = {deque: list, frozenset: set}.get(kind, lambda scalar: scalar.item())
        return plain(nearest(tree), path, changed)
    if isinstance(tree, Mapping):
        at = {key: _below(path, key) for key in tree}
        return kind({_hashed(k, at[k], changed): plain(v, at[k], changed) for k, v in tree.items()})
    if kind is set:
        return {_hashed(item, path, changed) for item in tree}
    if kind in (list, tuple):
        return kind(plain(item, _below(path, i), changed) for i, item in enumerate(tree))
    return _NoBytes() if tree == b"" and kind is bytes else tree


def _hashed(item: Any, path: str, changed: list[str]) -> Any:
    """A key of a dict, or a member of a set."""
    found: list[str] = []
    made = plain(item, path, found)
    try:
        hash(made)
    except TypeError:
        text = "torch.load takes no frozenset in a key or a set: export a part without it"
        raise UnsupportedValueError(text, facts={"path": path}) from None
    changed += [path] if found else []
    return made


class _NoBytes(bytes):
    """b"" in the way of other bytes: torch.load(weights_only=True) refuses the usual pickle."""

    def __reduce__(self) -> Any:
        return codecs.encode, ("", "latin1")


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def read_shards(path: str) -> dict[str, Any]:
    """The tensors of pytorch_model.bin in a directory, or of its shards."""
    found: dict[str, Any] = {}
    has_index = os.path.exists(os.path.join(path, INDEX))
    files = indexed(path, INDEX, ".bin")[0] if has_index else [os.path.join(path, WHOLE)]
    for file in files:
        shard = read(file)
        if not isinstance(shard, Mapping):
            facts = {"file": file, "expected": "a dict of names", "got": type(shard).__name__}
            raise UsageError("a file of torch.save holds no names", facts=facts)
        for name, value in shard.items():
            if name in found:
                raise CorruptionError("a checkpoint has a name twice", facts={"name": name})
            found[name] = value
    return found


# -- shards with an index --------------------------------------------------------------------------
# A file that the index names is there, and no name of the index leads out of the directory.


def indexed(directory: str, index_name: str, suffix: str) -> tuple[list[str], dict[str, str]]:
    """The files of a directory, and its index: which name is in which file, if it has one."""
    path = os.path.join(directory, index_name)
    if not os.path.exists(path):
        names = sorted(name for name in os.listdir(directory) if name.endswith(suffix))
        whole = [name for name in names if name == f"model{suffix}"]  # others are other forms of it
        return [os.path.join(directory, name) for name in whole or names], {}
    try:
        with open(path, encoding="utf-8") as file:
            index = {str(key): str(name) for key, name in json.load(file)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        facts = {"file": path, "expected": 'JSON with a "weight_map"', "cause": repr(fault)[:200]}
        raise CorruptionError("the index of a checkpoint cannot be read", facts=facts) from fault
    files = sorted({os.path.join(directory, os.path.basename(name)) for name in index.values()})
    for each in files:
        if not os.path.isfile(each):
            raise MissingFileError("a checkpoint lacks a file", facts={"file": each})
    return files, index


SMALL_BYTES = PART_BYTES
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # torch's magic number, pickled
_CENTRAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_CRC_AT = 16  # in an entry of the central directory
_SIZES_AT = 28  # of the name, the extra field and the comment
