"""The manifest: what a committed step holds, where each byte is and what it must hash to.

Owns: encoding, decoding and validating manifest.json (docs/format.md, "Manifest").
Holds: what `decode` returns contradicts nothing: names cannot leave the step directory, every
range lies in its file, the tensors of a file tile its data, sizes follow from dtypes and shapes,
every piece has a checksum, every tensor that the state refers to exists. A damaged manifest is
ManifestError, an intact one of a newer version FormatVersionError.
Not here: the disk (store), whether the files match (the reader, by the checksums).
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from statehold import header, values
from statehold.errors import FormatVersionError, InvariantError, ManifestError, UsageError
from statehold.plan import (
    BLOCK_BYTES,
    STEP_MAX,
    WORLD_MAX,
    SavePlan,
    file_name,
    piece_count,
)
from statehold.strictjson import Checker, show
from statehold.units import GiB, KiB, MiB, format_bytes

__all__ = [
    "MANIFEST_BYTES_MAX",
    "VERSION",
    "Chunk",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "record_file",
]

VERSION = 1
MANIFEST_BYTES_MAX = 1 * GiB
FORMAT = "statehold"
CHECKSUM = "xxh3-64"

# The state may nest DEPTH_MAX containers, each at most three levels of JSON ({"$dict":[[k,v]]}).
_DEPTH_MAX = 3 * values.DEPTH_MAX + 8
_BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX = 4 * KiB, 16 * MiB
_MEMBERS = (
    "format",
    "version",
    "step",
    "world_size",
    "created",
    "writer",
    "checksum",
    "block_bytes",
    "files",
    "tensors",
    "state",
    "manifest_sha256",
)
_SEAL = re.compile(rb',"manifest_sha256":"([0-9a-f]{64})"}\n')
_SEAL_BYTES = len(b',"manifest_sha256":""}\n') + 64
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)", re.ASCII)
_WRITER = re.compile(r"[ -~]{1,200}")
_FILE_NAME = re.compile(r"rank-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
_DTYPE = re.compile("|".join(header.DTYPE_BITS))
_SUMS = re.compile(r"(?:[0-9a-f]{16})*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HINT = "this step is damaged; an older committed step is not affected"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor (`offsets`, `shape`, in elements) at the bytes [begin, end) of a file.

    `sums` has 16 hex digits for each piece, in order.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    begin: int
    end: int
    sums: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its dtype (safetensors code), global shape and boxes. Version 1: one box."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file. `digest` is the sha256 of the hex sums of all its pieces, in file order."""

    name: str
    bytes: int
    data_begin: int
    header_sums: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but its tensors' bytes. `state` is the encoded tree (values)."""

    step: int
    world_size: int
    created: str
    writer: str
    block_bytes: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    state: Any

    def encode(self) -> bytes:
        """The bytes of manifest.json, sealed by their own sha256."""
        try:
            text = json.dumps(
                self._document(), ensure_ascii=False, allow_nan=False, separators=(",", ":")
            )
            body = text[:-1].encode("utf-8")
        except (ValueError, TypeError, RecursionError) as fault:
            raise InvariantError(f"a manifest cannot be encoded: {fault}") from fault
        if len(body) + _SEAL_BYTES > MANIFEST_BYTES_MAX:
            facts = {"expected": f"at most {format_bytes(MANIFEST_BYTES_MAX)}", "got": len(body)}
            hint = "keep large collections in tensors: plain values are stored as JSON"
            raise UsageError("the manifest of this state is too large", facts=facts, hint=hint)
        return body + b',"manifest_sha256":"%s"}\n' % _sha256(body)

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "created": self.created,
            "writer": self.writer,
            "checksum": CHECKSUM,
            "block_bytes": self.block_bytes,
            "files": [_file_document(entry) for entry in self.files],
            "tensors": {name: _tensor_document(entry) for name, entry in self.tensors.items()},
            "state": self.state,
        }

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Manifest:
        """The manifest in `raw`, validated in full. `path` is for messages.

        Raises ManifestError (facts file, where, expected, got), or FormatVersionError.
        """
        check = Checker(ManifestError, "a manifest is not valid", path, _HINT)
        _check_seal(check, raw)
        document = check.object(check.parse(raw, "manifest", _DEPTH_MAX), "manifest")
        _check_version(check, document)
        return _Reader(check, document).manifest()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode("ascii")


def _file_document(entry: FileEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "bytes": entry.bytes,
        "data_begin": entry.data_begin,
        "header_sums": entry.header_sums,
        "digest": entry.digest,
    }


def _tensor_document(entry: TensorEntry) -> dict[str, Any]:
    chunks = [
        {
            "offsets": chunk.offsets,
            "shape": chunk.shape,
            "file": chunk.file,
            "begin": chunk.begin,
            "end": chunk.end,
            "sums": chunk.sums,
        }
        for chunk in entry.chunks
    ]
    return {"dtype": entry.dtype, "shape": entry.shape, "chunks": chunks}


def _check_seal(check: Checker, raw: bytes) -> None:
    """The last member is the sha256 of all before it. Checked before anything else is believed,
    so a flipped bit is always damage, and never "a newer version"."""
    if len(raw) > MANIFEST_BYTES_MAX:
        check.fail("manifest", f"at most {format_bytes(MANIFEST_BYTES_MAX)}", f"{len(raw)} bytes")
    seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    if seal is None:
        check.fail("manifest_sha256", "the last member", f"the end {show(raw[-24:])}")
    expected = _sha256(raw[:-_SEAL_BYTES])
    if seal[1] != expected:
        check.fail("manifest_sha256", expected.decode(), seal[1].decode())


def _check_version(check: Checker, document: dict[str, Any]) -> None:
    if document.get("format") != FORMAT:
        check.fail("format", FORMAT, show(document.get("format")))
    version = check.integer(document.get("version"), "version", low=1)
    if version > VERSION:
        expected = f"{VERSION} or older"
        facts = {"file": check.file, "where": "version", "expected": expected, "got": version}
        hint = "upgrade statehold to read this step"
        raise FormatVersionError("a step was written by a newer statehold", facts=facts, hint=hint)


class _Reader:
    """Turns the JSON document into a Manifest, checking each member as it goes."""

    def __init__(self, check: Checker, document: dict[str, Any]) -> None:
        self.check = check
        self.members = check.members(document, "manifest", _MEMBERS)
        self.block_bytes = check.integer(
            document["block_bytes"], "block_bytes", _BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX
        )
        if self.block_bytes & (self.block_bytes - 1):
            check.fail("block_bytes", "a power of two", str(self.block_bytes))
        self.world_size = check.integer(document["world_size"], "world_size", 1, WORLD_MAX)

    def manifest(self) -> Manifest:
        check, members = self.check, self.members
        if members["checksum"] != CHECKSUM:
            check.fail("checksum", CHECKSUM, show(members["checksum"]))
        step = check.integer(members["step"], "step", high=STEP_MAX)
        created = check.text(members["created"], "created", _CREATED, "a UTC time, ISO 8601")
        writer = check.text(members["writer"], "writer", _WRITER, "1 to 200 ASCII characters")
        files = self._files()
        tensors = self._tensors(files)
        self._check_tiling(files, tensors)
        self._check_state(tensors)
        return Manifest(
            step=step,
            world_size=self.world_size,
            created=created,
            writer=writer,
            block_bytes=self.block_bytes,
            files=files,
            tensors=tensors,
            state=members["state"],
        )

    def _files(self) -> tuple[FileEntry, ...]:
        nodes = self.check.array(self.members["files"], "files")
        files = tuple([self._file(node, f"files[{i}]") for i, node in enumerate(nodes)])
        if len({entry.name for entry in files}) != len(files):
            self.check.fail("files", "every file once", "a name twice")
        return files

    def _file(self, node: Any, where: str) -> FileEntry:
        check = self.check
        names = ("name", "bytes", "data_begin", "header_sums", "digest")
        found = check.members(node, where, names)
        name = self._file_name(found["name"], f"{where}.name")
        size = check.integer(found["bytes"], f"{where}.bytes", low=header.PAGE)
        high = min(size, header.HEADER_BYTES_MAX + header.LENGTH_BYTES)
        begin = check.integer(found["data_begin"], f"{where}.data_begin", header.PAGE, high)
        if begin % header.PAGE:
            check.fail(f"{where}.data_begin", f"a multiple of {header.PAGE}", str(begin))
        sums = self._sums(found["header_sums"], f"{where}.header_sums", 0, begin)
        digest = check.text(found["digest"], f"{where}.digest", _DIGEST, "64 hex digits")
        return FileEntry(name, size, begin, sums, digest)

    def _file_name(self, value: Any, where: str) -> str:
        expected = f"{file_name(0, self.world_size)} or another rank of it"
        name = self.check.text(value, where, _FILE_NAME, expected)
        match = _FILE_NAME.fullmatch(name)
        if match is None or int(match[1]) >= self.world_size or int(match[2]) != self.world_size:
            self.check.fail(where, expected, show(name))
        return name

    def _sums(self, value: Any, where: str, begin: int, nbytes: int) -> str:
        sums = self.check.text(value, where, _SUMS, "16 lower-case hex digits a piece")
        count = piece_count(begin, nbytes, self.block_bytes)
        if len(sums) != 16 * count:
            self.check.fail(where, f"{count} checksums", f"{len(sums) / 16:g}")
        return sums

    def _tensors(self, files: Sequence[FileEntry]) -> dict[str, TensorEntry]:
        nodes = self.check.object(self.members["tensors"], "tensors")
        return {name: self._tensor(name, node, files) for name, node in nodes.items()}

    def _tensor(self, name: str, node: Any, files: Sequence[FileEntry]) -> TensorEntry:
        check, where = self.check, f"tensors.{name}"
        if name in ("", header.METADATA) or not values.well_formed(name):
            check.fail("tensors", "the name of a tensor", show(name))
        found = check.members(node, where, ("dtype", "shape", "chunks"))
        dtype = check.text(found["dtype"], f"{where}.dtype", _DTYPE, "a dtype of safetensors")
        shape = check.shape(found["shape"], f"{where}.shape")
        nbytes = header.bytes_of(dtype, shape)
        if nbytes is None:
            expected = "a whole number of bytes below 2**60"
            check.fail(f"{where}.shape", expected, f"{dtype} {show(shape)}")
        chunks = check.array(found["chunks"], f"{where}.chunks")
        if len(chunks) != 1:
            check.fail(f"{where}.chunks", "one chunk in version 1", f"{len(chunks)} chunks")
        chunk = self._chunk(chunks[0], f"{where}.chunks[0]", shape, nbytes, files)
        return TensorEntry(dtype, shape, (chunk,))

    def _chunk(
        self,
        node: Any,
        where: str,
        shape: tuple[int, ...],
        nbytes: int,
        files: Sequence[FileEntry],
    ) -> Chunk:
        check = self.check
        found = check.members(node, where, ("offsets", "shape", "file", "begin", "end", "sums"))
        offsets = check.shape(found["offsets"], f"{where}.offsets")
        if len(offsets) != len(shape) or any(offsets):
            check.fail(f"{where}.offsets", f"{len(shape)} zeros", show(offsets))
        if check.shape(found["shape"], f"{where}.shape") != shape:
            check.fail(f"{where}.shape", show(shape), show(found["shape"]))
        file = check.integer(found["file"], f"{where}.file", high=len(files) - 1)
        low, high = files[file].data_begin, files[file].bytes
        begin = check.integer(found["begin"], f"{where}.begin", low, high)
        end = check.integer(found["end"], f"{where}.end", begin, high)
        if end - begin != nbytes:
            expected = f"begin + {nbytes}, the size of the tensor"
            check.fail(f"{where}.end", expected, f"begin + {end - begin}")
        sums = self._sums(found["sums"], f"{where}.sums", begin, nbytes)
        return Chunk(offsets, shape, file, begin, end, sums)

    def _check_tiling(self, files: Sequence[FileEntry], tensors: dict[str, TensorEntry]) -> None:
        """In each file the chunks cover [data_begin, bytes) once, and the digest is theirs."""
        held: list[list[tuple[int, int, str, str]]] = [[] for _ in files]
        for name, entry in tensors.items():
            for chunk in entry.chunks:
                held[chunk.file].append((chunk.begin, chunk.end, name, chunk.sums))
        for i, (file, chunks) in enumerate(zip(files, held, strict=True)):
            chunks.sort()
            at = file.data_begin
            for begin, end, name, _ in chunks:
                if begin != at:
                    problem = "a hole" if begin > at else "an overlap"
                    where = f"tensors.{name}.chunks[0].begin"
                    self.check.fail(where, str(at), f"{begin}: {problem} in {file.name}")
                at = end
            if at != file.bytes:
                self.check.fail(
                    f"files[{i}].bytes", f"{at}, the end of its tensors", f"{file.bytes}"
                )
            digest = _digest(file.header_sums, (sums for *_, sums in chunks))
            if file.digest != digest:
                self.check.fail(f"files[{i}].digest", digest, file.digest)

    def _check_state(self, tensors: Container[str]) -> None:
        """Decode the tree once, only to know that it can be decoded."""

        def leaf(tag: str, payload: Any) -> Any:
            if tag in ("$tensor", "$ndarray") and payload not in tensors:
                self.check.fail(f"state: {tag}", "the name of a tensor in this step", show(payload))
            return object()

        try:
            values.decode(self.members["state"], leaf)
        except ManifestError as fault:
            if "file" not in fault.facts:
                fault.facts = {"file": self.check.file, **fault.facts}
                fault.hint = self.check.hint
            raise


def _digest(header_sums: str, sums: Iterable[str]) -> str:
    return _sha256("".join([header_sums, *sums]).encode("ascii")).decode("ascii")


def _sums_to_hex(sums: bytes) -> str:
    """8 little-endian bytes a checksum, as the engine has them -> 16 hex digits a checksum."""
    swapped = array("Q", sums)
    swapped.byteswap()  # reverses each group of eight, whatever the byte order of this machine
    return swapped.tobytes().hex()


def record_file(
    plan: SavePlan, sums: bytes, *, index: int = 0, block_bytes: int = BLOCK_BYTES
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """The manifest's account of a file written by `plan`, as file number `index`.

    `sums` holds 8 little-endian bytes a piece: those of the header, then of each tensor in file
    order. The tensors come in file order.
    """
    text = _sums_to_hex(sums)
    at = 16 * piece_count(0, plan.data_begin, block_bytes)
    header_sums = text[:at]
    tensors = {}
    for spec, begin in zip(plan.specs, plan.begins, strict=True):
        size = 16 * piece_count(begin, spec.nbytes, block_bytes)
        offsets, end = (0,) * len(spec.shape), begin + spec.nbytes
        chunk = Chunk(offsets, spec.shape, index, begin, end, text[at : at + size])
        tensors[spec.name] = TensorEntry(spec.dtype, spec.shape, (chunk,))
        at += size
    if at != len(text):
        facts = {"file": plan.file_name, "expected": at // 16, "got": len(text) // 16}
        raise InvariantError("a save returned another number of checksums", facts=facts)
    digest = _digest(text, ())
    file = FileEntry(plan.file_name, plan.file_bytes, plan.data_begin, header_sums, digest)
    return file, tensors
