"""A rank's record: its part of a step of several ranks, and the places of its bytes.

Owns: encoding, decoding and validating rank-*.json (docs/format.md, "Record").
Invariants: a decoded record contradicts nothing. It keeps the promises of `entries`. The chunks of
a tensor are those that its layout makes this rank write. Ranks exist, and appear once in a mesh.
Every tensor that the state refers to is held. Time and memory are linear in the file: meshes have a
short form, and are bounded before they are expanded.
Not here: which records make a step (manifest), the other ranks' chunks (saved), the disk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from statehold.encoding.strictjson import Checker, show
from statehold.encoding.values import LeafReader
from statehold.errors import ManifestError, UsageError
from statehold.format.entries import (
    Again,
    Chunk,
    EntryReader,
    FileEntry,
    Json,
    TensorsForm,
    check_state,
    chunk_document,
    json_of,
    needs_version_3,
    proven,
    seal,
    sha256,
    unseal,
)
from statehold.format.manifest import check_attempt
from statehold.format.trees import members_of, tensors_of
from statehold.layout.layout import AnyLayout, Box, ExplicitLayout, Layout, Mesh
from statehold.layout.plan import STEP_MAX, file_name, file_of
from statehold.layout.share import HeldTensor

VERSION = 4
FORMAT = "statehold-record"

MESH_AXES_MAX = 32
# All meshes of a record together: forty that span the largest world.
MESH_RANKS_MAX = 1 << 22

_HEAD = ("format", "version", "step", "world_size", "rank", "attempt")
_MEMBERS = (*_HEAD, "block_bytes", "files", "meshes", "tensors", "state", "record_sha256")
_CONTENT = re.compile(r"[0-9a-f]{16}")
_HINT = "this step is damaged; an older committed step is not affected"


@dataclass(frozen=True)
class Record:
    """The description of one rank's part.

    `chunks` has the tensors written here. `contents` has hashes (16 hex digits) of tensors that are
    this rank's own, to find those that all ranks have alike. `state` is this rank's encoded tree
    (values), an object.
    """

    step: int
    world_size: int
    rank: int
    attempt: str
    block_bytes: int
    files: tuple[FileEntry, ...]
    held: tuple[HeldTensor, ...]
    chunks: Mapping[str, tuple[Chunk, ...]]
    state: Any
    contents: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, HeldTensor]:
        """The held tensors, by name."""
        return {held.name: held for held in self.held}

    @property
    def version(self) -> int:
        """The lowest that can hold it: version 4 if it has a box in several chunks."""
        return _version(self._is_cut(), json_of(self.state))

    def _is_cut(self) -> bool:
        return any(
            len(self.chunks.get(held.name, ())) > 1
            for held in self.held
            if not isinstance(held.layout, ExplicitLayout)
        )

    def encode(self, again: Again | None = None, value_of: LeafReader | None = None) -> bytes:
        """The bytes of the record, sealed by their own sha256, and read again.

        again: a record with these files and tensors, except for their checksums and contents, was
            read again before, so only the rest is. Then this one need not have the chunks.
        value_of: as for check_state().
        """
        decode = partial(_decoded, value_of=value_of)
        if again is None:
            return proven(self.sealed(), decode, "record")
        document = self._document(again.members, again.state, again.is_cut)
        new = {**document, "files": [], "meshes": [], "tensors": {}, "state": again.unread}
        check_new = partial(decode, known=(again.names, self.contents))
        return proven(seal(document, "record"), decode, "record", (seal(new, "record"), check_new))

    def sealed(self) -> bytes:
        """The same, not read again."""
        return seal(self._document(self._members(), json_of(self.state), self._is_cut()), "record")

    def form(self) -> TensorsForm:
        """For the next record with these files and tensors."""
        return TensorsForm(self._members(), self.files, self._is_cut())

    def _members(self) -> dict[str, Any]:
        meshes = _MeshTable()
        tensors = {held.name: self._tensor_document(held, meshes) for held in self.held}
        return {"meshes": meshes.documents(), "tensors": tensors}

    def _document(self, members: Mapping[str, Any], state: Json, is_cut: bool) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": _version(is_cut, state),
            "step": self.step,
            "world_size": self.world_size,
            "rank": self.rank,
            "attempt": self.attempt,
            "block_bytes": self.block_bytes,
            "files": [entry._asdict() for entry in self.files],
            **members,
            "state": state,
        }

    def _tensor_document(self, held: HeldTensor, meshes: _MeshTable) -> dict[str, Any]:
        document = _held_document(held, meshes)
        if held.name in self.contents:
            document["content"] = self.contents[held.name]
        chunks = sorted(self.chunks.get(held.name, ()), key=lambda chunk: _box_order(chunk.box))
        document["chunks"] = [chunk_document(chunk) for chunk in chunks]
        return document

    def group_digests(self, known: Mapping[str, str] | None = None) -> dict[str, str]:
        """For each name at the top of the state, a digest of the node and of the tensors in it.

        Contents and chunks do not count. Ranks with equal digests make a group.
        known: those of nodes and tensors that have not changed since an earlier record.
        """
        digests = dict[str, str]()
        for key, (_, node) in (members_of(self.state) or {}).items():
            if known and key in known:
                digests[key] = known[key]
                continue
            # a new one: its numbers do not depend on the other tensors of the rank
            meshes = _MeshTable()
            held = {name: _held_document(self.tensors[name], meshes) for name in tensors_of(node)}
            digests[key] = _digest_of([node, held, meshes.documents()])
        return digests

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Record:
        """The record in `raw`, validated in full. `path` is for messages.

        Raises ManifestError (facts file, where, expected, got), or FormatVersionError.
        """
        return _decoded(raw, path)

    @staticmethod
    def listed(raw: bytes, path: str) -> tuple[FileEntry, ...]:
        """The files that a record lists. The rest is not looked at, but for the seal.

        Raises as decode() does.
        """
        return _reader(raw, path).files()


def _version(is_cut: bool, state: Json) -> int:
    return 4 if is_cut else 3 if needs_version_3(state) else 2


def _reader(raw: bytes, path: str) -> _Reader:
    check = Checker(ManifestError, "a rank's record is not valid", path, _HINT)
    version, document = unseal(check, raw, "record", FORMAT, VERSION)
    return _Reader(check, check.members(document, "record", _MEMBERS), version)


def _decoded(raw: bytes, path: str, **how: Any) -> Record:
    return _reader(raw, path).record(**how)


# -- writing ---------------------------------------------------------------------------------------


class _MeshTable:
    """The meshes of a document, each once."""

    def __init__(self) -> None:
        self._places: dict[Mesh, int] = {}

    def place(self, mesh: Mesh) -> int:
        return self._places.setdefault(mesh, len(self._places))

    def documents(self) -> list[dict[str, Any]]:
        total = sum(len(mesh.ranks) for mesh in self._places)
        axes = max((len(mesh.shape) for mesh in self._places), default=0)
        if total > MESH_RANKS_MAX or axes > MESH_AXES_MAX:
            facts = {
                "expected": f"{MESH_RANKS_MAX} ranks in all meshes, {MESH_AXES_MAX} axes in each",
                "got": f"{total} ranks in {len(self._places)} meshes, {axes} axes",
            }
            raise UsageError("the device meshes of this state are too many", facts=facts)
        return [_mesh_document(mesh) for mesh in self._places]


def _mesh_document(mesh: Mesh) -> dict[str, Any]:
    """Ranks as first + the sum of index * stride if they have this form, which is usual."""
    count, first, strides = len(mesh.ranks), mesh.ranks[0], []
    for size in mesh.shape:
        count //= size
        strides.append(mesh.ranks[count] - first if size > 1 else 0)
    if min(strides, default=0) < 0 or _affine(mesh.shape, first, strides) != mesh.ranks:
        return {"shape": mesh.shape, "ranks": mesh.ranks}
    return {"shape": mesh.shape, "ranks": {"first": first, "strides": strides}}


def _affine(shape: Sequence[int], first: int, strides: Sequence[int]) -> tuple[int, ...]:
    ranks = [first]
    for size, stride in zip(shape, strides, strict=True):
        ranks = [rank + index * stride for rank in ranks for index in range(size)]
    return tuple(ranks)


def _held_document(held: HeldTensor, meshes: _MeshTable) -> dict[str, Any]:
    layout: dict[str, Any] | None = None
    if isinstance(held.layout, Layout):
        layout = {"mesh": meshes.place(held.layout.mesh), "splits": held.layout.splits}
    elif held.layout is not None:
        boxes = sorted(held.layout.placed, key=lambda item: _box_order(item[0]))
        layout = {
            "boxes": [
                {"offsets": box.offsets, "shape": box.shape, "rank": rank} for box, rank in boxes
            ]
        }
    return {"dtype": held.dtype, "shape": held.shape, "layout": layout, "writer": held.writer}


def _box_order(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.shape


def _digest_of(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return sha256(text.encode("utf-8"))


# -- reading ---------------------------------------------------------------------------------------


class _Reader:
    """Turns the JSON document into a Record, checking each member as it goes."""

    def __init__(self, check: Checker, members: dict[str, Any], version: int) -> None:
        self.check = check
        self.members = members
        self.version = version
        self.entries = EntryReader(check, members)
        self.world_size = self.entries.world_size
        self.rank = check.integer(members["rank"], "rank", high=self.world_size - 1)
        self.meshes: list[Mesh] = []
        # Tensors with the same split share a layout, and the results that it has cached.
        self.layouts: dict[tuple[int, tuple[tuple[int, int], ...]], Layout] = {}
        self.chunks: dict[str, tuple[Chunk, ...]] = {}
        self.contents: dict[str, str] = {}

    def record(
        self,
        known: tuple[Container[str], Mapping[str, str]] | None = None,
        value_of: LeafReader | None = None,
    ) -> Record:
        """known: the names and the contents of the tensors, which the document has not."""
        check, members = self.check, self.members
        step = check.integer(members["step"], "step", high=STEP_MAX)
        attempt = check_attempt(check, members["attempt"])
        self.files()
        self._read_meshes()
        nodes = check.object(members["tensors"], "tensors")
        held = [self._tensor(name, node) for name, node in nodes.items()]
        self.entries.check_tiling(self.chunks.items())
        if members_of(members["state"]) is None:
            check.fail("state", "an object", show(members["state"]))
        names, contents = known or (nodes, {})
        for name, content in contents.items():
            self._content(name, content)
        check_state(check, members["state"], names, self.version, value_of)
        return Record(
            step=step,
            world_size=self.world_size,
            rank=self.rank,
            attempt=attempt,
            block_bytes=self.entries.block_bytes,
            files=self.entries.files,
            held=tuple(held),
            chunks=self.chunks,
            state=members["state"],
            contents=self.contents,
        )

    def files(self) -> tuple[FileEntry, ...]:
        expected = f"{file_name(self.rank, self.world_size)} or another file of the rank"
        self.entries.read_files(self.members["files"], self._is_file, expected)
        return self.entries.files

    def _is_file(self, name: str) -> bool:
        """rank-r-of-w.safetensors, or with -1, -2, ... after the w."""
        found = file_of(name)
        return found is not None and found[:2] == (self.rank, self.world_size)

    # -- meshes ------------------------------------------------------------------------------

    def _read_meshes(self) -> None:
        left = MESH_RANKS_MAX
        for i, node in enumerate(self.check.array(self.members["meshes"], "meshes")):
            mesh = self._mesh(node, f"meshes[{i}]", left)
            left -= len(mesh.ranks)
            self.meshes.append(mesh)

    def _mesh(self, node: Any, where: str, left: int) -> Mesh:
        check = self.check
        found = check.members(node, where, ("shape", "ranks"))
        shape = check.shape(found["shape"], f"{where}.shape")
        if len(shape) > MESH_AXES_MAX or 0 in shape:
            expected = f"at most {MESH_AXES_MAX} axes, none of size 0"
            check.fail(f"{where}.shape", expected, show(shape))
        count, high = math.prod(shape), min(self.world_size, left)
        if count > high:
            check.fail(f"{where}.shape", f"at most {high} ranks", show(shape))
        ranks = self._ranks(found["ranks"], f"{where}.ranks", shape)
        if len(ranks) != count or len(set(ranks)) != count:
            check.fail(f"{where}.ranks", f"{count} ranks, each once", show(ranks))
        return Mesh(shape, ranks)

    def _ranks(self, node: Any, where: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        check, last = self.check, self.world_size - 1
        if type(node) is list:
            return tuple(
                [check.integer(rank, f"{where}[{i}]", high=last) for i, rank in enumerate(node)]
            )
        found = check.members(node, where, ("first", "strides"))
        first = check.integer(found["first"], f"{where}.first", high=last)
        strides = check.shape(found["strides"], f"{where}.strides")
        if len(strides) != len(shape):
            check.fail(f"{where}.strides", f"{len(shape)} strides", show(strides))
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if first + reach > last:
            check.fail(where, f"ranks from 0 to {last}", f"rank {first + reach}")
        return _affine(shape, first, strides)

    # -- tensors -----------------------------------------------------------------------------

    def _tensor(self, name: str, node: Any) -> HeldTensor:
        check, where = self.check, f"tensors.{name}"
        self.entries.name(name)
        names = ["dtype", "shape", "layout", "writer", "chunks"]
        if "content" in check.object(node, where):
            names.append("content")
        found = check.members(node, where, names)
        dtype, shape = self.entries.dtype_and_shape(found, where)
        layout = self._layout(found["layout"], f"{where}.layout", shape)
        replicas = layout.replica_count if isinstance(layout, Layout) else 1
        writer = check.integer(found["writer"], f"{where}.writer", high=replicas - 1)
        if "content" in found:
            self.contents[name] = self._content(name, found["content"])
        held = HeldTensor(name, dtype, shape, layout, writer)
        boxes = self._written(held, present=found["chunks"] != [])
        if self._may_be_runs(layout, boxes):
            chunks = self.entries.runs(found["chunks"], f"{where}.chunks", dtype, boxes[0])
        else:
            chunks = self.entries.chunks(found["chunks"], f"{where}.chunks", dtype, boxes)
        if chunks:
            self.chunks[name] = chunks
        return held

    def _content(self, name: str, value: Any) -> str:
        where = f"tensors.{name}.content"
        return self.check.text(value, where, _CONTENT, "16 lower-case hex digits")

    def _may_be_runs(self, layout: AnyLayout | None, boxes: list[Box]) -> bool:
        """Whether the only box may be in several chunks."""
        is_free = isinstance(layout, ExplicitLayout)
        return self.version >= 4 and not is_free and bool(boxes) and boxes[0].numel > 0

    def _written(self, held: HeldTensor, present: bool) -> list[Box]:
        """The boxes that this rank writes. An empty one may be written or not."""
        if isinstance(held.layout, ExplicitLayout):
            return sorted(held.layout.boxes_of(self.rank), key=_box_order)
        if held.layout is None:
            box = Box.whole(held.shape)
        elif held.layout.replica_index(self.rank) == held.writer:
            box = held.layout.box(held.shape, self.rank)
        else:
            return []
        return [box] if box.numel or present else []

    def _layout(self, node: Any, where: str, shape: tuple[int, ...]) -> AnyLayout | None:
        if node is None:
            return None
        if "boxes" in self.check.object(node, where):
            return self._explicit(node, where, shape)
        check, found = self.check, self.check.members(node, where, ("mesh", "splits"))
        place = check.integer(found["mesh"], f"{where}.mesh", high=len(self.meshes) - 1)
        mesh = self.meshes[place]
        if self.rank not in mesh:
            check.fail(f"{where}.mesh", f"a mesh with rank {self.rank}", f"meshes[{place}]")
        splits = tuple(self._splits(found["splits"], f"{where}.splits", mesh, shape))
        if len({axis for axis, _ in splits}) != len(splits):
            check.fail(f"{where}.splits", "every mesh axis once", show(splits))
        return self.layouts.setdefault((place, splits), Layout(mesh, splits))

    def _splits(
        self, node: Any, where: str, mesh: Mesh, shape: tuple[int, ...]
    ) -> Iterator[tuple[int, int]]:
        for i, split in enumerate(self.check.array(node, where)):
            place = f"{where}[{i}]"
            if len(self.check.array(split, place)) != 2:
                self.check.fail(place, "[mesh axis, tensor dim]", show(split))
            axis = self.check.integer(split[0], f"{place}[0]", high=len(mesh.shape) - 1)
            yield axis, self.check.integer(split[1], f"{place}[1]", high=len(shape) - 1)

    def _explicit(self, node: Any, where: str, shape: tuple[int, ...]) -> ExplicitLayout:
        found = self.check.members(node, where, ("boxes",))
        nodes = self.check.array(found["boxes"], f"{where}.boxes")
        placed = [self._placed(node, f"{where}.boxes[{i}]", shape) for i, node in enumerate(nodes)]
        if len({box for box, _ in placed}) != len(placed):
            self.check.fail(f"{where}.boxes", "every box once", "a box twice")
        return ExplicitLayout(tuple(placed))

    def _placed(self, node: Any, where: str, shape: tuple[int, ...]) -> tuple[Box, int]:
        check = self.check
        found = check.members(node, where, ("offsets", "shape", "rank"))
        box = Box(
            check.shape(found["offsets"], f"{where}.offsets"),
            check.shape(found["shape"], f"{where}.shape"),
        )
        if not len(box.offsets) == len(box.shape) == len(shape):
            check.fail(where, f"{len(shape)} dimensions", str(found))
        if any(end > size for end, size in zip(box.ends, shape, strict=True)):
            check.fail(where, f"a box in {show(shape)}", str(box))
        return box, check.integer(found["rank"], f"{where}.rank", high=self.world_size - 1)
