"""From a plan to the engine: starts the write of a rank's file, and makes its documents.

Owns: the order of segments, which is the same on both sides. Segment 0 of a write is the header of
the file, and segment i + 1 is the i-th tensor in file order.
Not here: who writes which box (share), places in the file (plan), the fate of the file (store).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import compress, count, repeat
from typing import Any, NamedTuple, TypeVar

from statehold import _core
from statehold._core import Engine, File, WriteJob
from statehold._version import __version__
from statehold.format.entries import (
    NOTHING,
    About,
    Again,
    FileEntry,
    Json,
    TensorEntry,
    TensorsForm,
    file_entry,
    json_of,
    object_of,
    record_file,
    sums_to_hex,
)
from statehold.format.manifest import Manifest
from statehold.format.record import Record
from statehold.io.clients import Client
from statehold.layout.plan import BLOCK_BYTES, SavePlan, sum_places
from statehold.layout.share import RankPlan, Share
from statehold.layout.stored import SUM_BYTES, StoredFile, StoredPart
from statehold.tensors.columns import CapturedTensor, Structure, Tensors, described, picked, picker
from statehold.tensors.nodes import value_of
from statehold.tensors.storable import Strided

WRITER = f"statehold {__version__}"  # as a manifest records it

# How long to wait until transfers in flight have released the file of a failed save.
FILE_CLOSES_S = 60.0

_NOTHING = StoredPart()
D = TypeVar("D", Manifest, Record)

# Of parts of a state, by their keys. Parts of parts count down to this depth: among the values of a
# framework most are the same at each save.
Path = tuple[str, ...]
PARTS_DEPTH = 3


@dataclass(frozen=True)
class Segments:
    """What the engine has to know of tensors in file order, but for where they are now."""

    begins: array[int]
    sizes: array[int]
    flags: bytes
    strided: dict[int, Strided]

    @classmethod
    def of(cls, plan: SavePlan, structure: Structure) -> Segments:
        """structure: of the tensors in file order."""
        flags = bytearray(map(_core.SEGMENT_EXTERNAL.__mul__, structure.external))
        for index in structure.eager:
            flags[index] |= _core.SEGMENT_EAGER
        strides = zip(structure.strided, structure.external, strict=True)
        return cls(
            begins=array("q", plan.begins),
            sizes=array("q", [spec.nbytes for spec in plan.specs]),
            flags=bytes(flags),
            strided={i: each for i, (each, away) in enumerate(strides) if each and not away},
        )

    @property
    def are_eager(self) -> bool:
        """Whether some of the bytes are copied before save() returns."""
        return any(flag & _core.SEGMENT_EAGER for flag in self.flags)

    @property
    def can_be_read_in_place(self) -> bool:
        """Whether all bytes lie in host memory as they do in the file, until the next update."""
        return not any(self.flags) and not self.strided


class Ordered(NamedTuple):
    """Tensors as they lie in a file."""

    tensors: Tensors
    segments: Segments


class FileOrder:
    """How tensors lie in the file of a plan; kept for the next save of the same structure."""

    def __init__(self) -> None:
        self._share: Share | None = None
        self._captured: Structure | None = None
        self._pick: Callable[[Any], Any] | None = None  # None: as they were captured
        self._cut: list[tuple[int, int, tuple[int, int]]] = []  # source, rows
        self._structure: Structure | None = None  # in file order; None: not known yet
        self._segments: Segments | None = None

    def ordered(self, plan: RankPlan, captured: Tensors) -> Ordered:
        """The tensors that this rank writes, in file order: whole boxes, or some of their rows."""
        if self._share is not plan.share or self._captured is not captured.structure:
            self._learn(plan, captured)
        found = captured
        if self._pick is not None:
            found = captured.picked(self._pick, self._structure)
            for index, source, rows in self._cut:
                part = _rows(captured[source], *rows)
                if self._structure is None:
                    found[index] = part
                else:
                    found.put(index, part)
        if self._segments is None:
            self._structure = found.structure
            self._segments = Segments.of(plan.save, found.structure)
        return Ordered(found, self._segments)

    def _learn(self, plan: RankPlan, captured: Tensors) -> None:
        parts, order = plan.share.parts, plan.save.source_index
        sources, rows = picked(parts.sources, order), picked(parts.rows, order)
        self._share, self._captured = plan.share, captured.structure
        cut = zip(count(), sources, rows, strict=False)
        self._cut = [(at, source, its) for at, source, its in cut if its is not None]
        is_as_captured = not self._cut and sources == list(range(len(captured)))
        self._pick = None if is_as_captured else picker(sources)
        self._structure = self._segments = None


def _rows(captured: CapturedTensor, begin: int, end: int) -> CapturedTensor:
    part = described(captured.spec, captured.alias[begin:end], external=captured.external)
    return part._replace(is_gated=captured.is_gated, wrapper=captured.wrapper)


def start_write(
    engine: Engine,
    plan: SavePlan,
    ordered: Ordered,
    file: File | None = None,
    expected: bytes = b"",
) -> WriteJob:
    """Begin to stage the tensors, in file order, as `plan` lays them out.

    file: if it exists already. expected: the checksums of another file, if it may have the same
    bytes. The job keeps the memory alive until it is copied.
    """
    tensors, segments = ordered
    return engine.write(
        file_bytes=plan.file_bytes,
        block_bytes=BLOCK_BYTES,
        begins=segments.begins,
        sizes=segments.sizes,
        addresses=array("Q", tensors.live.addresses),
        flags=segments.flags,
        strided=segments.strided,
        header=plan.header,
        owner=tuple(compress(tensors.live.storages, tensors.structure.on_host)),
        file=file,
        expected=expected,
        client=Client.SAVE,
    )


def give_back(file: File) -> None:
    """Close the file of a failed save, so that its space is free now and not when the last variable
    is gone. A file in memory stays mapped until its job is gone."""
    if file.mapped:
        file.close()
    else:
        file.close_alone(FILE_CLOSES_S)


def account(
    plan: SavePlan, sums: bytes, stored: Sequence[StoredFile] = ()
) -> tuple[tuple[FileEntry, ...], dict[str, TensorEntry]]:
    """The data files of a rank: the one that it writes, and those that were on storage before."""
    files, tensors = list[FileEntry](), dict[str, TensorEntry]()
    for index, (each, its) in enumerate(_files(plan, sums, stored)):
        file, found = record_file(each, its, index=index)
        files.append(file)
        for name, entry in found.items():
            if name in tensors:
                chunks = (*tensors[name].chunks, *entry.chunks)
                ordered = tuple(sorted(chunks, key=lambda chunk: chunk.box.offsets))
                entry = entry._replace(chunks=ordered)
            tensors[name] = entry
    return tuple(files), tensors


def _files(
    plan: SavePlan, sums: bytes, stored: Sequence[StoredFile]
) -> Iterator[tuple[SavePlan, bytes]]:
    """The plans of the data files of a rank, and their checksums."""
    yield plan, sums
    for part, file in enumerate(stored, 1):
        yield file.placed(plan, part), file.sums


def build_manifest(
    plan: SavePlan,
    tree: Any,
    files: tuple[FileEntry, ...],
    tensors: dict[str, TensorEntry],
    about: About = NOTHING,
) -> Manifest:
    """The commit record of a single-rank step, from its plan and account()."""
    return Manifest(
        step=plan.step,
        world_size=1,
        created=now(),
        writer=WRITER,
        block_bytes=BLOCK_BYTES,
        files=files,
        tensors=tensors,
        state=tree,
        about=about,
    )


def build_record(
    plan: RankPlan,
    tree: Any,
    files: tuple[FileEntry, ...],
    tensors: dict[str, TensorEntry],
    *,
    attempt: str,
    contents: Mapping[str, str] | None = None,
    taken: StoredPart = _NOTHING,
) -> Record:
    """The record of one of several ranks, from its plan and account()."""
    return Record(
        step=plan.save.step,
        world_size=plan.save.world_size,
        rank=plan.save.rank,
        attempt=attempt,
        block_bytes=BLOCK_BYTES,
        files=files,
        held=(*plan.share.held, *taken.held),
        chunks={name: entry.chunks for name, entry in tensors.items()},
        state=tree,
        contents=contents or {},
    )


class Sealing:
    """Encodes the documents of one save after another, if the reader's code accepts them.

    Its verdict on files and tensors follows from the plan, and from the files that were on storage
    before: record_file() refuses another number of checksums. While these stay equal, which is
    usual, their JSON is that of the save before with other checksums. The reader's code decodes
    only the rest of a document, such as the parts of the state that have another JSON than before.
    """

    def __init__(self) -> None:
        self._made_of: tuple[object, ...] | None = None  # None: no document was accepted
        self._form: TensorsForm | None = None
        # The hash of the JSON of each part. The JSON itself may take megabytes.
        self._accepted = dict[Path, int]()
        self._digests = dict[str, str]()

    def manifest(
        self, plan: RankPlan, tree: Any, sums: bytes, taken: StoredPart, about: About
    ) -> bytes:
        """The bytes of the commit record of a single-rank step; see build_manifest()."""
        build = partial(build_manifest, plan.save, tree, about=about)
        return self._encoded(build, plan, tree, sums, taken, {})[0]

    def record(
        self, plan: RankPlan, tree: Any, sums: bytes, taken: StoredPart, attempt: str,
        fingerprints: Mapping[str, int],
    ) -> tuple[bytes, dict[str, str]]:  # fmt: skip
        """The bytes of a rank's record, and its group digests; see build_record()."""
        contents = {name: f"{value:016x}" for name, value in fingerprints.items()}
        build = partial(build_record, plan, tree, attempt=attempt, contents=contents, taken=taken)
        before, form = self._accepted, self._form
        raw, record = self._encoded(build, plan, tree, sums, taken, contents)
        self._digests = {
            key: digest
            for key, digest in self._digests.items()
            if self._form is form and before.get((key,)) == self._accepted.get((key,), "")
        }
        self._digests = record.group_digests(self._digests)
        return raw, self._digests

    def _encoded(
        self, build: Callable[..., D], plan: RankPlan, tree: Any, sums: bytes, taken: StoredPart,
        contents: Mapping[str, str],
    ) -> tuple[bytes, D]:  # fmt: skip
        """What `build` makes of files and tensors, and its bytes."""
        made_of, hashes = (*_made_of(plan, sums, taken), frozenset(contents)), dict[Path, int]()
        state, form = self._state(tree, hashes), self._form
        if form is None or made_of != self._made_of:
            document = build(*account(plan.save, sums, taken.files))
            raw, form = document.encode(value_of=value_of), document.form()
        else:
            plans, its = zip(*_files(plan.save, sums, taken.files), strict=True)
            hexes = list(map(sums_to_hex, its))
            document = build(tuple(map(file_entry, plans, hexes)), {})
            hexes.append("".join(map(contents.__getitem__, form.with_content)))
            again = Again(form.of(hexes), form.names, *state, form.is_cut)
            raw = document.encode(again, value_of)
        self._made_of, self._form, self._accepted = made_of, form, hashes
        return raw, document

    def _state(self, tree: Any, hashes: dict[Path, int]) -> tuple[Json, Any]:
        """The JSON of a state, and what of it was not accepted before; `hashes` gets its parts."""
        if not _has_parts(tree):
            return json_of(tree), tree
        texts = {key: json_of(each) for key, each in tree.items()}
        return object_of(texts), self._unread(tree, (), hashes, texts)

    def _unread(
        self, node: Mapping[str, Any], path: Path, hashes: dict[Path, int],
        texts: Mapping[str, Json] = {},
    ) -> dict[str, Any]:  # fmt: skip
        unread = {}
        for key, each in node.items():
            where = (*path, key)
            hashes[where] = its = hash(texts.get(key) or json_of(each))
            if self._accepted.get(where) != its:
                is_deeper = len(where) < PARTS_DEPTH and _has_parts(each)
                unread[key] = self._unread(each, where, hashes) if is_deeper else each
        return unread


def _made_of(plan: RankPlan, sums: bytes, taken: StoredPart) -> tuple[object, ...]:
    """What the files and tensors of a document follow from, except for their checksums."""
    found: list[SavePlan | StoredFile] = [plan.save, *taken.files]
    files = [(each.specs, each.begins, each.data_begin, each.file_bytes) for each in found]
    return plan.share, files, [len(sums), *(len(each.sums) for each in taken.files)], *taken.held


def _has_parts(node: Any) -> bool:
    """Whether a node is a dict with names as keys: a reader decodes each member for itself."""
    return type(node) is dict and not any(map(str.startswith, node, repeat("$")))


def manifest_bytes(plan: SavePlan, tree: Any) -> int:
    """The bytes of the manifest of a single-rank step, before its checksums are known."""
    return len(build_manifest(plan, tree, *account(plan, _no_sums(plan))).sealed())


def record_bytes(plan: RankPlan, tree: Any, attempt: str) -> int:
    """The bytes of a rank's record, before its checksums are known; without fingerprints."""
    found = account(plan.save, _no_sums(plan.save))
    return len(build_record(plan, tree, *found, attempt=attempt).sealed())


def _no_sums(plan: SavePlan) -> bytes:
    return bytes(SUM_BYTES * sum_places(plan.data_begin, plan.begins, plan.specs)[-1])


def now() -> str:
    """The time as a manifest records it."""
    return datetime.fromtimestamp(time.time(), timezone.utc).isoformat()
