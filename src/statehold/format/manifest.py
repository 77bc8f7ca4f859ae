"""The manifest makes a directory a step: that of one rank holds all, one of several lists records.

A document has the lowest version that can hold it, so old readers can read it. The manifest of one
rank is version 1, or version 3 if its state has nodes that version 1 does not know, or version 4 if
it has more than one data file. The manifest of several ranks is version 2. A manifest of either
kind is version 5 if it says something about the step (about).

Owns: encoding, decoding and validating manifest.json (docs/format.md, "Manifest").
Invariants: a decoded manifest contradicts nothing. Names cannot leave the step directory, the parts
of one rank keep the promises of `entries`, and every tensor that the state refers to
exists. A damaged manifest is ManifestError, an intact one of a newer version FormatVersionError.
Not here: the disk (store), a rank's part (record), whether files match (the reader, by sums).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from statehold.encoding.strictjson import Checker, show
from statehold.encoding.values import LeafReader
from statehold.errors import ManifestError
from statehold.format.entries import (
    DOCUMENT_BYTES_MAX,
    NOTHING,
    About,
    Again,
    EntryReader,
    FileEntry,
    Json,
    TensorEntry,
    TensorsForm,
    check_about,
    check_state,
    chunk_document,
    json_of,
    needs_version_3,
    proven,
    seal,
    unseal,
)
from statehold.layout.layout import Box, Ranks
from statehold.layout.plan import STEP_MAX, WORLD_MAX, file_name, file_of

VERSION = 5
FORMAT = "statehold"
CHECKSUM = "xxh3-64"

_HEAD = ("format", "version", "step", "world_size", "created", "writer", "checksum")
_MEMBERS = (*_HEAD, "block_bytes", "files", "tensors", "state", "manifest_sha256")
_MEMBERS_OF_RANKS = (*_HEAD, "attempt", "records", "state", "shared", "manifest_sha256")
_CREATED = re.compile(r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}(\.[0-9]{1,9})?(Z|\+00:00)")
_WRITER = re.compile(r"[ -~]{1,200}")
_ATTEMPT = re.compile(r"[0-9a-f-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HINT = "this step is damaged; an older committed step is not affected"


@dataclass(frozen=True)
class Manifest:
    """The manifest of one rank: its step, except for the bytes of its tensors.

    `state` is the encoded tree (values).
    """

    step: int
    world_size: int
    created: str
    writer: str
    block_bytes: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    state: Any
    about: About = NOTHING

    @property
    def version(self) -> int:
        return self._version(json_of(self.state))

    def _version(self, state: Json) -> int:
        if self.about:
            return 5
        if any(found[2] for file in self.files if (found := file_of(file.name))):
            return 4
        return 3 if needs_version_3(state) else 1

    def encode(self, again: Again | None = None, value_of: LeafReader | None = None) -> bytes:
        """The bytes of manifest.json, sealed by their own sha256, and read again.

        again: a manifest with these files and tensors, except for their checksums, was read again
            before, so only the rest is. Then this one need not have the tensors.
        value_of: as for check_state().
        """
        decode = partial(Manifest.decode, value_of=value_of)
        if again is None:
            return proven(self.sealed(), decode, "manifest")
        document = self._document(again.members, again.state)
        new = {**document, "files": [], "tensors": {}, "state": again.unread}
        check_new = partial(_check_new, tensors=again.names, value_of=value_of)
        raw = seal(document, "manifest")
        return proven(raw, decode, "manifest", (seal(new, "manifest"), check_new))

    def sealed(self) -> bytes:
        """The same, not read again."""
        return seal(self._document(self._members(), json_of(self.state)), "manifest")

    def form(self) -> TensorsForm:
        """For the next manifest with these files and tensors."""
        return TensorsForm(self._members(), self.files)

    def _members(self) -> dict[str, Any]:
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "chunks": list(map(chunk_document, entry.chunks)),
            }
            for name, entry in self.tensors.items()
        }
        return {"tensors": tensors}

    def _document(self, members: Mapping[str, Any], state: Json) -> dict[str, Any]:
        return {
            **_head(self, self._version(state)),
            "block_bytes": self.block_bytes,
            "files": [entry._asdict() for entry in self.files],
            **members,
            "state": state,
            **self.about.document(),
        }

    @staticmethod
    def decode(raw: bytes, path: str, value_of: LeafReader | None = None) -> Manifest | Commit:
        """The manifest in `raw`, of either kind, validated in full. `path` is for messages.

        value_of: as for check_state().
        Raises ManifestError (facts file, where, expected, got), or FormatVersionError.
        """
        check = Checker(ManifestError, "a manifest is not valid", path, _HINT)
        version, document = unseal(check, raw, "manifest", FORMAT, VERSION)
        if _is_of_ranks(document, version):
            return _commit(check, document, version)
        return _manifest(check, document, version, value_of)

    @staticmethod
    def listed(raw: bytes, path: str, step: int) -> tuple[FileEntry, ...] | Commit:
        """The files that the manifest of `step` lists, or, of several ranks, the manifest, which
        lists records. The tensors and the state are not looked at, but for the seal.

        Raises as decode() does.
        """
        check = Checker(ManifestError, "a manifest is not valid", path, _HINT)
        version, document = unseal(check, raw, "manifest", FORMAT, VERSION)
        if document.get("step") != step:
            check.fail("step", f"{step}", show(document.get("step")))
        if _is_of_ranks(document, version):
            return _commit(check, document, version)
        members = check.members(document, "manifest", _members(_MEMBERS, version))
        return _entries(check, members, version).files

    @staticmethod
    def said(raw: bytes, path: str) -> About:
        """What a manifest says about its step. The rest is not looked at, but for the seal.

        Raises as decode() does.
        """
        check = Checker(ManifestError, "a manifest is not valid", path, _HINT)
        return check_about(check, unseal(check, raw, "manifest", FORMAT, VERSION)[1])

    @staticmethod
    def saved_at(raw: bytes, path: str) -> float:
        """The second in which the step was saved, as time.time() counts; the seal is checked.

        Raises as decode() does, and ValueError for a day that no calendar has.
        """
        check = Checker(ManifestError, "a manifest is not valid", path, _HINT)
        created = str(unseal(check, raw, "manifest", FORMAT, VERSION)[1].get("created"))
        return datetime.fromisoformat(f"{created[:19]}+00:00").timestamp()


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A rank's record: its size and sha256. The name follows from the rank."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that each of these ranks saved for itself with equal bytes: any of them can be
    read."""

    ranks: Ranks
    names: tuple[str, ...]


@dataclass(frozen=True)
class Commit:
    """The manifest of several ranks: their records, by rank.

    `state` has, for each name at the top of the state, groups of ranks whose records agree about
    the node and its tensors, except for the places of the bytes.
    """

    step: int
    world_size: int
    created: str
    writer: str
    attempt: str
    records: tuple[RecordEntry, ...]
    state: Mapping[str, tuple[Ranks, ...]]
    shared: tuple[Shared, ...] = ()
    about: About = NOTHING

    @property
    def version(self) -> int:
        return 5 if self.about else 2

    def encode(self) -> bytes:
        """The bytes of manifest.json, sealed by their own sha256, and read again."""
        document = {
            **_head(self, self.version),
            "attempt": self.attempt,
            "records": [
                {"name": e.name, "bytes": e.bytes, "sha256": e.sha256} for e in self.records
            ],
            "state": {key: [group.ranges for group in to] for key, to in self.state.items()},
            "shared": [{"ranks": to.ranks.ranges, "names": to.names} for to in self.shared],
            **self.about.document(),
        }
        return proven(seal(document, "manifest"), Manifest.decode, "manifest")


def record_name(rank: int, world_size: int) -> str:
    """The file name of a rank's record."""
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def groups_of(digests: Sequence[Mapping[str, str]]) -> dict[str, tuple[Ranks, ...]]:
    """Commit.state, from Record.group_digests of each rank, by rank."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(digests):
        for key, digest in of_rank.items():
            ranks.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {key: tuple(map(Ranks.of, groups.values())) for key, groups in ranks.items()}


def check_attempt(check: Checker, value: Any) -> str:
    return check.text(value, "attempt", _ATTEMPT, "1 to 64 characters 0-9, a-f and -")


def _head(document: Manifest | Commit, version: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": version,
        "step": document.step,
        "world_size": document.world_size,
        "created": document.created,
        "writer": document.writer,
        "checksum": CHECKSUM,
    }


def _members(names: tuple[str, ...], version: int) -> tuple[str, ...]:
    return (*names, "about") if version >= 5 else names


def _check_head(check: Checker, members: Mapping[str, Any]) -> dict[str, Any]:
    """The members that both kinds have, as arguments of their classes."""
    if members["checksum"] != CHECKSUM:
        check.fail("checksum", CHECKSUM, show(members["checksum"]))
    return {
        "step": check.integer(members["step"], "step", high=STEP_MAX),
        "world_size": check.integer(members["world_size"], "world_size", 1, WORLD_MAX),
        "created": check.text(members["created"], "created", _CREATED, "a UTC time, ISO 8601"),
        "writer": check.text(members["writer"], "writer", _WRITER, "1 to 200 ASCII characters"),
        "about": check_about(check, members),
    }


def _is_of_ranks(document: Mapping[str, Any], version: int) -> bool:
    return version == 2 or (version >= 5 and "records" in document)


def _entries(check: Checker, members: Mapping[str, Any], version: int) -> EntryReader:
    """A reader that has read which data files there are."""
    reader = EntryReader(check, members)
    expected = f"{file_name(0, reader.world_size)} or another rank of it"
    reader.read_files(
        members["files"], lambda name: _is_file(name, reader.world_size, version), expected
    )
    return reader


def _manifest(
    check: Checker, document: dict[str, Any], version: int, value_of: LeafReader | None
) -> Manifest:
    members = check.members(document, "manifest", _members(_MEMBERS, version))
    head, reader = _check_head(check, members), _entries(check, members, version)
    nodes = check.object(members["tensors"], "tensors")
    tensors = {name: _tensor(reader, name, node, version) for name, node in nodes.items()}
    reader.check_tiling((name, entry.chunks) for name, entry in tensors.items())
    check_state(check, members["state"], tensors, version, value_of)
    return Manifest(
        **head,
        block_bytes=reader.block_bytes,
        files=reader.files,
        tensors=tensors,
        state=members["state"],
    )


def _check_new(raw: bytes, path: str, tensors: Container[str], value_of: LeafReader | None) -> None:
    """Check a manifest, its files and `tensors` aside. Raises as decode() does."""
    check = Checker(ManifestError, "a manifest is not valid", path, _HINT)
    version, document = unseal(check, raw, "manifest", FORMAT, VERSION)
    members = check.members(document, "manifest", _members(_MEMBERS, version))
    _check_head(check, members)
    check_state(check, members["state"], tensors, version, value_of)


def _is_file(name: str, world_size: int, version: int) -> bool:
    found = file_of(name)
    if found is None or (found[2] and version < 4):
        return False
    return found[0] < world_size == found[1]


def _tensor(reader: EntryReader, name: str, node: Any, version: int) -> TensorEntry:
    where = f"tensors.{name}"
    reader.name(name)
    found = reader.check.members(node, where, ("dtype", "shape", "chunks"))
    dtype, shape = reader.dtype_and_shape(found, where)
    box = Box.whole(shape)
    if version >= 4 and box.numel:
        chunks = reader.runs(found["chunks"], f"{where}.chunks", dtype, box)
    else:
        chunks = reader.chunks(found["chunks"], f"{where}.chunks", dtype, [box])
    return TensorEntry(dtype, shape, chunks)


def _commit(check: Checker, document: dict[str, Any], version: int) -> Commit:
    members = check.members(document, "manifest", _members(_MEMBERS_OF_RANKS, version))
    head = _check_head(check, members)
    world_size = head["world_size"]
    nodes = check.array(members["records"], "records")
    if len(nodes) != world_size:
        check.fail("records", f"one for each of {world_size} ranks", f"{len(nodes)}")
    records = [_record(check, rank, node, world_size) for rank, node in enumerate(nodes)]
    groups = check.object(members["state"], "state")
    shared = check.array(members["shared"], "shared")
    return Commit(
        **head,
        attempt=check_attempt(check, members["attempt"]),
        records=tuple(records),
        state={key: _groups(check, value, key, world_size) for key, value in groups.items()},
        shared=tuple([_shared(check, node, i, world_size) for i, node in enumerate(shared)]),
    )


def _record(check: Checker, rank: int, node: Any, world_size: int) -> RecordEntry:
    where, name = f"records[{rank}]", record_name(rank, world_size)
    found = check.members(node, where, ("name", "bytes", "sha256"))
    if found["name"] != name:
        check.fail(f"{where}.name", name, show(found["name"]))
    size = check.integer(found["bytes"], f"{where}.bytes", 1, DOCUMENT_BYTES_MAX)
    digest = check.text(found["sha256"], f"{where}.sha256", _DIGEST, "64 hex digits")
    return RecordEntry(name, size, digest)


def _groups(check: Checker, value: Any, key: str, world_size: int) -> tuple[Ranks, ...]:
    where = f"state.{key}"
    nodes = check.array(value, where)
    groups = [_ranks(check, node, f"{where}[{i}]", world_size) for i, node in enumerate(nodes)]
    if not groups:
        check.fail(where, "at least one group of ranks", "none")
    ranges = sorted(each for group in groups for each in group.ranges)
    for (_, last), (first, _) in itertools.pairwise(ranges):
        if first <= last:
            check.fail(where, "every rank in one group", f"rank {first} twice")
    return tuple(groups)


def _ranks(check: Checker, value: Any, where: str, world_size: int) -> Ranks:
    """Check for ranges [first, last] that ascend and leave a rank between them."""
    ranges, low = [], 0
    for i, node in enumerate(check.array(value, where)):
        place = f"{where}[{i}]"
        if len(check.array(node, place)) != 2:
            check.fail(place, "[first, last]", show(node))
        first = check.integer(node[0], f"{place}[0]", low, world_size - 1)
        last = check.integer(node[1], f"{place}[1]", first, world_size - 1)
        ranges.append((first, last))
        low = last + 2
    if not ranges:
        check.fail(where, "at least one range of ranks", "none")
    return Ranks(tuple(ranges))


def _shared(check: Checker, node: Any, index: int, world_size: int) -> Shared:
    where = f"shared[{index}]"
    found = check.members(node, where, ("ranks", "names"))
    names = check.array(found["names"], f"{where}.names")
    if not all(type(name) is str for name in names) or len(set(names)) != len(names):
        check.fail(f"{where}.names", "names of tensors, each once", show(names))
    return Shared(_ranks(check, found["ranks"], f"{where}.ranks", world_size), tuple(names))
