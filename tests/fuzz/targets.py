"""What is fuzzed, and what must hold for any input.

An input is a letter and the text of a document without its seal. The seal is put on here, because
whoever can write a step can write its hash:
    m  manifest of version 1      restored by a Checkpointer from a simulated disk
    c  manifest of version 2      opened by ranks of two worlds, chunks of every tensor looked up
    r  a rank's record            the same, with a manifest that vouches for it
    h  header of a data file      decoded, and compared with the stock reader

Holds for every input: it is refused with an error that the documentation names for it, or accepted;
what is accepted is what the document says, checked here by other code: bytes that were restored
are those of the chunk, and every piece of them has the checksum of the document; chunks cover what
they are said to; no name of a file leaves the directory of the step.
Anything else raises: another exception, or Wrong. Time and memory are limited by the caller.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors
import torch

from statehold import _core
from statehold.encoding import header
from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    HeaderError,
    ManifestError,
    MissingFileError,
    StateMismatchError,
    UsageError,
)
from statehold.format.entries import About, Origin
from statehold.format.manifest import Commit, Manifest, RecordEntry
from statehold.format.record import Record
from statehold.format.saved import SavedStep
from statehold.layout.layout import Box
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.records import DIRECTORY, World, example

STEP_REFUSED = (CorruptionError, FormatVersionError, StateMismatchError, MissingFileError)
FILE_NAME = re.compile(r"rank-\d{5}-of-\d{5}(-[1-9]\d*)?\.(safetensors|json)")
PIECES_MAX = 5_000


class Wrong(Exception):
    """An input was accepted that is not what it says, or was refused in a way nobody can read."""


def must(holds: bool, what: str, *facts: object) -> None:
    if not holds:
        raise Wrong(f"{what}: {', '.join(repr(fact)[:300] for fact in facts)}")


def seal(text: bytes, what: str) -> bytes:
    """`text`, which ends in "}", with the hash of what is before as its last member."""
    body = text[:-1]
    digest = hashlib.sha256(body).hexdigest().encode()
    return body + b',"%s_sha256":"%s"}\n' % (what.encode(), digest)


def unsealed(raw: bytes) -> bytes:
    return raw[: raw.rindex(b',"')] + b"}"


def readable(error: Exception) -> bool:
    """An error must help: bounded, and with the facts that say where."""
    message = str(error)
    must(len(message) < 20_000, "a message without end", len(message))
    must(message.replace("\n", "").isprintable(), "a message that cannot be printed", message)
    return True


# -- m: a step of one rank, restored ---------------------------------------------------------------


class WholeStep:
    """A step on a simulated disk, whose manifest is replaced by each input."""

    def __init__(self, run: str = "/runs/fuzz") -> None:
        self.run = run
        self.fs = SimFs(seed=1)
        self.directory = f"{self.run}/step-000000000007"
        self.ckpt = checkpointer_on(self.fs, self.run, **SMALL)
        self.ckpt.save(7, self.state(True)).wait("committed", DEADLINE_S)
        manifest = f"{self.directory}/manifest.json"
        document = json.loads(self.fs.read_file(manifest, 1 << 20))
        self.name = document["files"][0]["name"]
        self.data = self.fs.read_file(f"{self.directory}/{self.name}", 1 << 24)
        self.seed = unsealed(self.fs.read_file(manifest, 1 << 20))

    @staticmethod
    def state(filled: bool) -> dict[str, Any]:
        """Tensors of several dtypes, two of them alike but for their values, and plain values."""

        def tensor(first: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            made = torch.arange(first, first + int(np.prod(shape))).reshape(shape)
            return (made if filled else torch.full(shape, -1)).to(dtype)

        return {
            "a": tensor(1, torch.float32, 3, 5),
            "b": tensor(50, torch.float32, 3, 5),
            "c": tensor(7, torch.int64, 4),
            "small": tensor(1, torch.uint8, 3),
            "empty": tensor(0, torch.float64, 0, 2),
            "scalar": tensor(9, torch.int16),
            "values": {"epoch": 3, "odd": (1, 2.5, {4, 5}, b"raw", {1: [None, True, 2**70]})},
        }

    def check(self, text: bytes) -> bool:
        raw = seal(text, "manifest")
        self.fs.write_file(f"{self.directory}/manifest.json", raw)
        live = self.state(False)
        try:
            self.ckpt.restore(live, 7)
        except (*STEP_REFUSED, UsageError) as error:  # a dtype, or a grid, that is not for here
            return not readable(error)
        self.judge(json.loads(raw), live)
        return True

    def judge(self, document: dict[str, Any], live: dict[str, Any]) -> None:
        files = [entry["name"] for entry in document["files"]]
        must(all(FILE_NAME.fullmatch(name) for name in files), "a file elsewhere", files)
        for name, node in document["state"].items():
            if name in live and isinstance(live[name], torch.Tensor):
                self.judge_tensor(document, node["$tensor"], live[name])

    def judge_tensor(self, document: dict[str, Any], name: str, found: torch.Tensor) -> None:
        [chunk] = document["tensors"][name]["chunks"]
        begin, end, block = chunk["begin"], chunk["end"], document["block_bytes"]
        must(document["files"][chunk["file"]]["name"] == self.name, "of another file", chunk)
        wanted = self.data[begin:end]
        must(found.contiguous().numpy().tobytes() == wanted, "wrong bytes", name, chunk)
        cuts = [begin, *range((begin // block + 1) * block, end, block), end]
        sums = "".join(
            f"{_core.xxh3_64(self.data[a:b]):016x}" for a, b in itertools.pairwise(cuts) if a < b
        )
        must(sums == chunk["sums"], "bytes without their checksum", name, chunk, sums)


# -- c, r: a step of several ranks, opened ---------------------------------------------------------


SAID = About({"loss": 0.5}, ("best",), Origin("/runs/base", 7, "a" * 64))


class SharedStep:
    """The example of four ranks; each input replaces its manifest, or the record of one rank."""

    def __init__(self) -> None:
        self.world = example()
        self.commit_seed = unsealed(replace(self.world.commit, about=SAID).encode())
        self.records = [unsealed(record.encode()) for record in self.world.records]

    def check_commit(self, text: bytes) -> bool:
        raw = seal(text, "manifest")
        try:
            commit = Manifest.decode(raw, "m")
        except (ManifestError, FormatVersionError) as error:
            return not readable(error)
        must(commit.encode() == _again(commit), "encode and decode disagree")
        world = self.fresh()
        world.files[f"{DIRECTORY}/manifest.json"] = raw
        self.look(world, world.records)
        return True

    def check_record(self, text: bytes) -> bool:
        raw = seal(text, "record")
        try:
            record = Record.decode(raw, "r")
        except (ManifestError, FormatVersionError) as error:
            return not readable(error)
        must(record.encode() == Record.decode(record.encode(), "r").encode(), "not the same again")
        for file in record.files:
            must(FILE_NAME.fullmatch(file.name) is not None, "a file elsewhere", file.name)
        rank = record.rank if record.rank < 4 else 0
        world, entries = self.fresh(), list(self.world.commit.records)
        entries[rank] = RecordEntry(entries[rank].name, len(raw), hashlib.sha256(raw).hexdigest())
        world.files[f"{DIRECTORY}/{entries[rank].name}"] = raw
        commit = replace(self.world.commit, records=tuple(entries))
        world.files[f"{DIRECTORY}/manifest.json"] = commit.encode()
        self.look(world, [record if i == rank else each for i, each in enumerate(world.records)])
        return True

    def fresh(self) -> World:
        world = copy.copy(self.world)
        world.files = dict(self.world.files)
        return world

    def look(self, world: World, records: Sequence[Record]) -> None:
        """Every rank of worlds of three and four looks for all it might want."""
        for rank, size in ((0, 4), (1, 4), (3, 4), (1, 3)):
            try:
                step = world.open(rank, size)
                names, _ = list(step.tensors), step.state
            except STEP_REFUSED as error:
                readable(error)
                continue
            for name in names:
                self.look_at(world, records, step, name)

    def look_at(self, world: World, records: Sequence[Record], step: SavedStep, name: str) -> None:
        box = Box.whole(step.tensors[name].shape)
        try:
            chunks = step.chunks(name, box)
        except STEP_REFUSED as error:
            readable(error)
            return
        must(all(FILE_NAME.fullmatch(chunk.file) for chunk in chunks), "elsewhere", chunks)
        if box.numel > 1 << 16:
            return
        covered = np.zeros(box.shape, np.int8)
        for chunk in chunks:
            met = chunk.box.intersection(box)
            must(met is not None, "a chunk of something else", name, chunk)
            ranges = zip(chunk.box.offsets, chunk.box.ends, strict=True)
            covered[(..., *(slice(a, b) for a, b in ranges))] += 1
            must(chunk.end <= chunk.file_bytes, "beyond the end of a file", name, chunk)
        must(bool((covered == 1).all()), "chunks that do not cover", name, chunks)
        said = {record.tensors[name] for record in records if name in record.tensors}
        original = {record.tensors[name] for record in self.world.records if name in record.tensors}
        is_shared = all(held.layout is not None for held in original)
        if said == original and original and is_shared and _same_chunks(records, self.world, name):
            found = world.assemble(step, name, box)
            must(found.tobytes() == world.arrays[name].tobytes(), "wrong bytes", name)


def _same_chunks(records: Sequence[Record], world: World, name: str) -> bool:
    pairs = zip(records, world.records, strict=True)
    return all(a.chunks.get(name) == b.chunks.get(name) and a.files == b.files for a, b in pairs)


def _again(commit: Manifest | Commit) -> bytes:
    return Manifest.decode(commit.encode(), "m").encode()


# -- h: the header of a data file ------------------------------------------------------------------

HEADER_SEED = json.dumps(
    {
        "__metadata__": {"format": "pt", "statehold.step": "000000000007"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [24, 27]},
        "c": {"dtype": "F64", "shape": [0], "data_offsets": [27, 27]},
        "d": {"dtype": "U8", "shape": [], "data_offsets": [27, 28]},
    }
).encode()


def check_header(text: bytes) -> bool:
    data = bytes(28)
    raw = len(text).to_bytes(8, "little") + text
    try:
        entries, _, begin = header.decode(raw, len(raw) + len(data), "f")
    except HeaderError as error:
        return not readable(error)
    must(begin == len(raw), "data that begins elsewhere", begin)
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        must(entry.begin == at <= entry.end, "tensors that do not tile", entries)
        at = entry.end
    must(at == len(data), "data of nobody", entries)
    found = {name for name, _ in safetensors.deserialize(raw + data)}
    must(found == {entry.name for entry in entries}, "not what the stock reader finds", found)
    return True


# -- all of them -----------------------------------------------------------------------------------


class Targets:
    """The targets by letter, and the inputs to begin with."""

    def __init__(self) -> None:
        whole, shared = WholeStep(), SharedStep()
        self._checks: dict[int, Callable[[bytes], bool]] = {
            ord("m"): whole.check,
            ord("c"): shared.check_commit,
            ord("r"): shared.check_record,
            ord("h"): check_header,
        }
        self.seeds = [b"m" + whole.seed, b"c" + shared.commit_seed, b"h" + HEADER_SEED]
        self.seeds += [b"r" + text for text in shared.records]
        self.close = whole.ckpt.close

    def check(self, data: bytes) -> bool:
        """Whether the input was accepted. Raises what must not be."""
        check = self._checks.get(data[0]) if data else None
        return check is not None and check(data[1:])
