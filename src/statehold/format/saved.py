"""A committed step as a reader sees it, whatever its version: tensors, tree, and places of bytes.

Owns: which records are read, when, and whether they belong together; which chunks hold a box.
Invariants: a record counts only if it is the committed one (size, sha256, step, attempt, rank). The
chunks of a box cover it, each element once. A restore into the saved layout reads this rank's
record, and the records of the ranks that wrote for it, never all records.
Not here: the disk (the caller passes `read`), the use of the bytes (read_plan), live objects.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar, overload

from statehold.encoding.strictjson import show
from statehold.errors import (
    CorruptionError,
    InvariantError,
    ManifestError,
    MissingFileError,
    StateMismatchError,
    StorageError,
)
from statehold.format.entries import DOCUMENT_BYTES_MAX, Chunk, FileEntry, TensorEntry, sha256
from statehold.format.manifest import Commit, Manifest, RecordEntry
from statehold.format.record import Record
from statehold.format.trees import Differs, members_of, merge, tensors_of
from statehold.layout.layout import AnyLayout, Box, ExplicitLayout, Layout, Ranks
from statehold.layout.share import HeldTensor

# -- a property that is computed once --------------------------------------------------------------
# functools.cached_property of Python 3.10 and 3.11 has one lock for all instances of a class. A
# thread that waits for slow storage inside would hold up all other threads, also those that read
# from elsewhere.


T = TypeVar("T")


class cached(Generic[T]):
    """A property that is computed once for each instance, without a lock.

    Two threads may both compute it. All get the same value, that of the thread that has ended
    first.

    compute: makes the value of an instance.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached[T] | T:
        if instance is None:
            return self
        value: T = vars(instance).setdefault(self._name, self._compute(instance))
        return value


# -- the step --------------------------------------------------------------------------------------


MANIFEST_NAME = "manifest.json"

# With more groups than these, values that differ between groups are not compared one by one.
# Otherwise a reader in another world would read the records of all ranks, only to refuse the
# values.
# The same holds for the copies of a tensor whose checksums are compared.
COMPARED_MAX = 64

_HasBox = TypeVar("_HasBox", Chunk, "PlacedChunk")

# (path, at most so many bytes) -> the content of a file.
Read = Callable[[str, int], bytes]


class PlacedChunk(NamedTuple):
    """A box of a tensor (global coordinates) at the bytes [begin, end) of a file of the step."""

    box: Box
    file: str
    file_bytes: int
    begin: int
    end: int
    sums: str


def open_step(read: Read, directory: str, step: int, rank: int, world_size: int) -> SavedStep:
    """The step in `directory`, for `rank` of a job of `world_size`.

    Reads the manifest. For version 2, also reads this rank's record, or the records that another
    world needs. Raises ManifestError, MissingFileError or FormatVersionError.
    """
    path = f"{directory}/{MANIFEST_NAME}"
    manifest = Manifest.decode(_read(read, path, DOCUMENT_BYTES_MAX), path)
    if manifest.step != step:
        facts = {"file": path, "expected": f"step {step}", "got": f"step {manifest.step}"}
        raise ManifestError("a manifest belongs to another step", facts=facts)
    if isinstance(manifest, Manifest):
        return _WholeStep(manifest)
    own = rank if world_size == manifest.world_size else None
    return _SharedStep(_Records(read, directory, manifest), own, narrow=own is not None)


def read_record(read: Read, directory: str, commit: Commit, rank: int) -> Record:
    """The record of `rank`, if it is the committed one. Raises as `open_step` does."""
    path = f"{directory}/{commit.records[rank].name}"
    record = Record.decode(committed_record(read, path, commit.records[rank]), path)
    for name in ("world_size", "step", "attempt"):
        _check_same(path, name, getattr(commit, name), getattr(record, name))
    _check_same(path, "rank", rank, record.rank)
    return record


def committed_record(read: Read, path: str, entry: RecordEntry) -> bytes:
    """The bytes of a record, if they are the committed ones. Raises as `open_step` does."""
    raw = _read(read, path, DOCUMENT_BYTES_MAX)
    if len(raw) != entry.bytes or sha256(raw) != entry.sha256:
        raise _record_error(
            path,
            f"{entry.bytes} bytes with sha256 {entry.sha256}",
            f"{len(raw)} bytes with sha256 {sha256(raw)}",
        )
    return raw


def _check_same(path: str, name: str, expected: object, got: object) -> None:
    if got != expected:
        raise _record_error(path, f"{name} {expected}", f"{got}")


def _read(read: Read, path: str, max_bytes: int) -> bytes:
    try:
        return read(path, max_bytes)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise MissingFileError("a file of a step is not there", facts={"file": path}) from error


class SavedStep:
    """A committed step. Not for several threads at once: records are read when first needed."""

    step: int
    world_size: int
    block_bytes: int
    attempt: str | None = None  # which save of the job it was; None for a step of one rank
    is_narrow = False  # only this rank's record is read: entries of other ranks are missing here

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The tensors that `state` refers to: their dtypes, and their global shapes, or those of
        the boxes of one rank's own."""
        raise NotImplementedError

    @property
    def state(self) -> Any:
        """The encoded tree; leaves on which ranks differ may be trees.Differs."""
        raise NotImplementedError

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The data files: all of a step of one rank, else those of the records that were read."""
        raise NotImplementedError

    def held(self, name: str) -> list[tuple[Ranks, HeldTensor]]:
        """The entries under a name, for people: the ranks, and their description."""
        raise NotImplementedError

    def chunks(self, name: str, box: Box, among: Sequence[int] | None = None) -> list[PlacedChunk]:
        """The chunks that meet `box` of a tensor: together they hold each element of it once.

        among: the ranks of this job that hold the tensor together; None: this rank has its own.
        Raises CorruptionError if the chunks do not cover the box, and StateMismatchError if ranks
        saved different tensors under this name and none of them belongs to this rank.
        """
        raise NotImplementedError

    def unread(self, asked: Container[str]) -> list[tuple[str, PlacedChunk]]:
        """(tensor, chunk) that this rank has to verify in addition to the tensors that are asked
        for, so that all ranks verify everything.

        Of a step of one rank, the chunks of every other tensor. Of a step of several ranks, those
        that this rank wrote, if it is at its place again, otherwise nothing.
        """
        return [
            (name, chunk)
            for name, chunks in self.own_chunks(asked)
            for chunk in chunks
            if chunk.begin < chunk.end
        ]

    def own_chunks(self, but: Container[str] = ()) -> Iterator[tuple[str, list[PlacedChunk]]]:
        """The chunks that this rank has written, by tensor: none if it is not at its place again,
        and all of a step of one rank. but: tensors that are left out."""
        raise NotImplementedError

    def widened(self) -> SavedStep:
        """The same step with the entries of all ranks; itself if it is not narrow."""
        return self


class _WholeStep(SavedStep):
    """A step of one rank: the manifest has everything."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.step = manifest.step
        self.world_size = manifest.world_size
        self.block_bytes = manifest.block_bytes

    @cached
    def tensors(self) -> Mapping[str, TensorEntry]:
        entries, used = self._manifest.tensors.items(), set(tensors_of(self._manifest.state))
        return {name: entry for name, entry in entries if name in used}

    @property
    def state(self) -> Any:
        return self._manifest.state

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return self._manifest.files

    def held(self, name: str) -> list[tuple[Ranks, HeldTensor]]:
        entry = self._manifest.tensors[name]
        return [(Ranks.of([0]), HeldTensor(name, entry.dtype, entry.shape, None))]

    def chunks(self, name: str, box: Box, among: Sequence[int] | None = None) -> list[PlacedChunk]:
        _, shape, chunks = self._manifest.tensors[name]
        if [each.box for each in chunks] != [box]:
            _check_inside(name, box, shape)
            chunks = _met(chunks, box)
        return _placed(self.files, chunks) if box.numel else []

    def own_chunks(self, but: Container[str] = ()) -> Iterator[tuple[str, list[PlacedChunk]]]:
        for name, entry in self._manifest.tensors.items():
            if name not in but:
                yield name, _placed(self.files, entry.chunks)


class _Records:
    """The records of a step, read when they are needed and then kept."""

    def __init__(self, read: Read, directory: str, commit: Commit) -> None:
        self.commit = commit
        self._read = read
        self._directory = directory
        self._found: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._found.values())

    def __getitem__(self, rank: int) -> Record:
        if rank not in self._found:
            self._found[rank] = self._load(rank)
        return self._found[rank]

    def path(self, rank: int) -> str:
        return f"{self._directory}/{self.commit.records[rank].name}"

    def _load(self, rank: int) -> Record:
        record = read_record(self._read, self._directory, self.commit, rank)
        others = next(iter(self), record)
        block_bytes = others.block_bytes
        _check_same(self.path(rank), "block_bytes", block_bytes, record.block_bytes)
        return record


def _record_error(path: str, expected: str, got: str) -> ManifestError:
    return ManifestError(
        "a rank's record is not the one that was committed",
        facts={"file": path, "expected": expected, "got": got},
        hint="this step is damaged; an older committed step is not affected",
    )


@dataclass(frozen=True, slots=True)
class _Version:
    """The description of a tensor by a group of ranks, in the record of `rank`."""

    held: HeldTensor
    rank: int
    ranks: Ranks


class _SharedStep(SavedStep):
    """A step of several ranks.

    own: this rank, if it is at its place again. narrow: read only its record, which has everything
        that a rank of the same job needs, whatever else the others hold.
    """

    def __init__(self, records: _Records, own: int | None, *, narrow: bool) -> None:
        self._records = records
        self._commit = records.commit
        self._own = own
        self.is_narrow = narrow
        self.step = self._commit.step
        self.world_size = self._commit.world_size
        self.attempt = self._commit.attempt
        # A step always has a record; an empty state has no groups that would need one.
        self.block_bytes = records[own or 0].block_bytes

    def widened(self) -> SavedStep:
        return _SharedStep(self._records, self._own, narrow=False) if self.is_narrow else self

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(file for record in self._records for file in record.files)

    # -- what was saved ----------------------------------------------------------------------

    @cached
    def _groups(self) -> dict[str, list[tuple[Ranks, int]]]:
        """For each name at the top of the state: groups of ranks, and the rank whose record is
        read."""
        groups: dict[str, list[tuple[Ranks, int]]] = {}
        for key, all_ranks in self._commit.state.items():
            for ranks in all_ranks:
                if self._own is not None and self._own in ranks:
                    groups.setdefault(key, []).append((ranks, self._own))
                elif not self.is_narrow:
                    groups.setdefault(key, []).append((ranks, ranks.lowest))
        return groups

    @cached
    def _looked_at(self) -> dict[str, list[tuple[Ranks, int]]]:
        """The groups whose records are read: of groups with only their own values, one."""
        return {key: self._sampled(key, groups) for key, groups in self._groups.items()}

    def _sampled(self, key: str, groups: list[tuple[Ranks, int]]) -> list[tuple[Ranks, int]]:
        if len(groups) <= COMPARED_MAX:
            return groups
        sample = next((each for each in groups if each[1] == self._own), groups[0])
        return groups if any(tensors_of(self._member(key, sample[1])[1])) else [sample]

    def _member(self, key: str, rank: int) -> tuple[Any, Any]:
        """(key node, node) of a name at the top of the state, as a record has it."""
        members = members_of(self._records[rank].state) or {}
        if key not in members:
            path = self._records.path(rank)
            raise _record_error(path, f"a state with {key!r}", f"one with {show(list(members))}")
        return members[key]

    @cached
    def state(self) -> Any:
        nodes, keys = {}, {}
        for key, groups in self._looked_at.items():
            members = [(ranks, *self._member(key, rank)) for ranks, rank in groups]
            keys[key] = members[0][1]
            trees = [(ranks, node) for ranks, _, node in members]
            if len(trees) < len(self._groups[key]) and self._own is None:
                nodes[key] = Differs((trees[0][1],), (trees[0][0],))
            else:
                nodes[key] = merge(trees, self._own or 0, self._own is not None)
        if all(key == name for name, key in keys.items()):
            return nodes
        return {"$dict": [[keys[name], node] for name, node in nodes.items()]}

    @cached
    def _versions(self) -> dict[str, list[_Version]]:
        """The entries under each name, in the records that are read."""
        found: dict[str, dict[tuple[HeldTensor, int], list[Ranks]]] = {}
        for key, groups in self._looked_at.items():
            for ranks, rank in groups:
                record = self._records[rank]
                for name in tensors_of(self._member(key, rank)[1]):
                    version = record.tensors[name], rank
                    found.setdefault(name, {}).setdefault(version, []).append(ranks)
        return {
            name: [_Version(held, rank, Ranks.union(ranks)) for (held, rank), ranks in same.items()]
            for name, same in found.items()
        }

    @cached
    def tensors(self) -> Mapping[str, TensorEntry]:
        """For a name under which ranks saved different tensors, this rank's, else the first."""
        found = {}
        for name, versions in self._versions.items():
            held = (self._own_version(versions) or versions[0]).held
            found[name] = TensorEntry(held.dtype, held.shape)
        return found

    def _own_version(self, versions: list[_Version]) -> _Version | None:
        return next((each for each in versions if each.rank == self._own), None)

    def held(self, name: str) -> list[tuple[Ranks, HeldTensor]]:
        return [(version.ranks, version.held) for version in self._versions[name]]

    # -- where it is -------------------------------------------------------------------------

    def chunks(self, name: str, box: Box, among: Sequence[int] | None = None) -> list[PlacedChunk]:
        version = self._version(name, among)
        _check_inside(name, box, version.held.shape)
        return self._chunks_of(version, box) if box.numel else []

    def _chunks_of(self, version: _Version, box: Box) -> list[PlacedChunk]:
        held = version.held
        if held.layout is None:
            return [*_met(self._written_by(version.rank, held), box)]
        chunks = [
            chunk
            for rank in self._writers(held, held.layout, box)
            for chunk in _met(self._written_by(rank, held), box)
        ]
        boxes = [chunk.box for chunk in chunks]
        _check_cover(held.name, box, boxes, isinstance(held.layout, Layout))
        return chunks

    def _version(self, name: str, among: Sequence[int] | None) -> _Version:
        """The version of a tensor to read: the only one, this rank's, or any of several equal ones.

        This rank's own is the one to read only if no other ranks saved another tensor with it.
        """
        versions = self._versions[name]
        own = self._own_version(versions)
        if own is not None and (among is None or _covers(own.held.layout, among)):
            return own
        if self.is_narrow:
            raise StateMismatchError(
                "ranks hold a tensor together, but each of them saved its own",
                facts={"tensor": name, "saved here": _described(versions[0].held)},
            )
        first, *others = versions
        if first.held.layout is None:
            alone = len(Ranks.union(each.ranks for each in versions)) == 1
        else:
            alone = all(each.held == first.held for each in others)
        same = all(_kind(each.held) == _kind(first.held) for each in others)
        if alone or (same and (self._is_shared(name, versions) or self._are_equal(versions))):
            return first
        raise _ambiguous(name, versions)

    def _is_shared(self, name: str, versions: list[_Version]) -> bool:
        return any(
            all(shared.covers(version.ranks) for version in versions)
            for shared in self._shared.get(name, ())
        )

    def _are_equal(self, versions: list[_Version]) -> bool:
        """Whether a few versions have equal checksums; reads the records of all their ranks."""
        copies = [each for version in versions for each in _copies(version)]
        if len(copies) > COMPARED_MAX:
            return False
        return len({self._content(each) for each in copies}) == 1

    def _content(self, version: _Version) -> tuple[tuple[tuple[int, ...], str], ...]:
        """What is equal for equal bytes in equal boxes: each box, and its checksums."""
        chunks = self._chunks_of(version, Box.whole(version.held.shape))
        return tuple(sorted((chunk.box.offsets + chunk.box.shape, chunk.sums) for chunk in chunks))

    @cached
    def _shared(self) -> dict[str, list[Ranks]]:
        found: dict[str, list[Ranks]] = {}
        for shared in self._commit.shared:
            for name in shared.names:
                found.setdefault(name, []).append(shared.ranks)
        return found

    def _writers(self, held: HeldTensor, layout: AnyLayout, box: Box) -> Iterable[int]:
        """The ranks that wrote the chunks that meet `box`, each once."""
        own = self._own
        if own is not None and _is_box_of(layout, held.shape, own, box):
            # For the saved layout: one box, without a search among the boxes of all ranks.
            return [layout.replicas(own)[held.writer]]
        met = layout.boxes(held.shape, within=box)
        return dict.fromkeys(ranks[held.writer] for _, ranks in met)

    def _written_by(self, rank: int, held: HeldTensor) -> list[PlacedChunk]:
        record = self._records[rank]
        other = record.tensors.get(held.name)
        if other is None or not _agrees(other, held, rank):
            got = "nothing" if other is None else _described(other)
            expected = f"{held.name}: {_described(held)}, as other ranks say"
            raise _record_error(self._records.path(rank), expected, got)
        chunks = record.chunks.get(held.name, ())
        if isinstance(held.layout, ExplicitLayout):
            boxes = set(held.layout.boxes_of(rank))
            chunks = tuple(chunk for chunk in chunks if chunk.box in boxes)
        return _placed(record.files, chunks)

    def own_chunks(self, but: Container[str] = ()) -> Iterator[tuple[str, list[PlacedChunk]]]:
        if self._own is not None:
            record = self._records[self._own]
            for name, chunks in record.chunks.items():
                if name not in but:
                    yield name, _placed(record.files, chunks)


def _is_box_of(layout: AnyLayout, shape: tuple[int, ...], rank: int, box: Box) -> TypeGuard[Layout]:
    return isinstance(layout, Layout) and rank in layout.mesh and layout.box(shape, rank) == box


def _covers(layout: AnyLayout | None, ranks: Sequence[int]) -> bool:
    """Whether all of these ranks saved a tensor together."""
    if isinstance(layout, Layout):
        return all(rank in layout.mesh for rank in ranks)
    return layout is not None


def _copies(version: _Version) -> Iterator[_Version]:
    """A version for each time that its tensor was saved: once, or by each of its ranks alone."""
    if version.held.layout is not None:
        yield version
        return
    for first, last in version.ranks.ranges:
        for rank in range(first, last + 1):
            yield _Version(version.held, rank, Ranks.of([rank]))


def _agrees(other: HeldTensor, held: HeldTensor, rank: int) -> bool:
    """Whether the record of `rank` has `other` for the tensor that another record has as `held`.

    For boxes that a planner chose, a rank needs to know only its own. Otherwise each record would
    hold the list of all boxes.
    """
    if not isinstance(held.layout, ExplicitLayout) or not isinstance(other.layout, ExplicitLayout):
        return other == held
    wrote = set(held.layout.boxes_of(rank)) <= set(other.layout.boxes_of(rank))
    return wrote and _kind(other) == _kind(held)


def _kind(held: HeldTensor) -> tuple[str, tuple[int, ...]]:
    return held.dtype, held.shape


def _described(held: HeldTensor) -> str:
    """A tensor of a record, for a message."""
    layout = "of one rank alone"
    if isinstance(held.layout, Layout):
        mesh = held.layout.mesh
        layout = f"split {list(held.layout.splits)} over {list(mesh.shape)} ranks"
    elif held.layout is not None:
        layout = f"in {len(held.layout.placed)} boxes"
    return f"{held.dtype} {show(list(held.shape))} {layout}"


def _ambiguous(name: str, versions: list[_Version]) -> StateMismatchError:
    facts = {"tensor": name}
    for version in versions[:4]:
        facts[f"ranks {version.ranks}"] = _described(version.held)
    return StateMismatchError(
        "several ranks saved different tensors under this name",
        facts=facts,
        hint="restore on as many ranks as saved it: each then takes its own. Or leave it "
        "out with skip=. If the ranks share it, save it as a DTensor or in a module under DDP",
    )


def _met(chunks: Iterable[_HasBox], box: Box) -> tuple[_HasBox, ...]:
    return tuple([chunk for chunk in chunks if chunk.box.intersection(box)])


def _placed(files: tuple[FileEntry, ...], chunks: Iterable[Chunk]) -> list[PlacedChunk]:
    return [
        PlacedChunk(
            chunk.box,
            files[chunk.file].name,
            files[chunk.file].bytes,
            chunk.begin,
            chunk.end,
            chunk.sums,
        )
        for chunk in chunks
    ]


def _check_inside(name: str, box: Box, shape: tuple[int, ...]) -> None:
    if len(box.shape) != len(shape) or any(a > b for a, b in zip(box.ends, shape, strict=True)):
        facts = {"tensor": name, "expected": f"a box in {list(shape)}", "got": str(box)}
        raise InvariantError("a reader asked for more than a tensor has", facts=facts)


def _check_cover(name: str, box: Box, boxes: list[Box], disjoint: bool) -> None:
    """Check that `boxes`, each of which meets `box`, hold every element of it once."""
    count = sum(cut.numel for each in boxes if (cut := each.intersection(box)))
    if disjoint and count == box.numel:
        return
    left = [box]
    # Boxes in order leave few parts at any time. Other orders leave as many as half of the boxes.
    for each in sorted(boxes, key=lambda each: each.offsets):
        left = [rest for part in left for rest in part.minus(each)]
    if left or count != box.numel:
        missing = ", ".join(map(str, left[:4])) if left else "nothing, but chunks overlap"
        facts = {"tensor": name, "box": str(box), "missing": missing}
        facts["got"] = f"{count} of {box.numel} elements in {len(boxes)} chunks"
        hint = "this step is damaged; an older committed step is not affected"
        raise CorruptionError("the chunks of a tensor do not cover it", facts=facts, hint=hint)
