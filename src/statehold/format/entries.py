"""The common parts of manifests and records: files, chunks, checksums, labels, and the seal.

Owns: the JSON of these parts, their validation, and the seal of a document by its sha256.
Invariants: a decoded part contradicts nothing. Every range lies in its file, the chunks of a file
tile its data, sizes follow from dtypes and shapes, and every piece has a checksum. The seal is
checked first, so a flipped bit always counts as damage, and never as "a newer version".
Not here: which members a document has (manifest, record), the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple, TypeAlias

from statehold.encoding import header, values
from statehold.encoding.strictjson import CONTAINERS_MAX, INT_MAX, Checker, show
from statehold.errors import FormatVersionError, InvariantError, ManifestError, UsageError, refused
from statehold.layout.flat import run_of
from statehold.layout.layout import Box
from statehold.layout.plan import (
    BLOCK_BYTES,
    STEP_MAX,
    WORLD_MAX,
    SavePlan,
    piece_count,
    sum_places,
)
from statehold.units import GiB, KiB, MiB, format_bytes

# -- the members of documents ----------------------------------------------------------------------


DOCUMENT_BYTES_MAX = 1 * GiB

# The state may nest DEPTH_MAX containers, each at most three levels of JSON ({"$dict":[[k,v]]}).
_NEW_IN_3 = frozenset({"$complex128", "$subclass"})
_NO_TENSORS = frozenset({"$npscalar", "$torch"})
STATE_DEPTH_MAX = 3 * values.DEPTH_MAX + 8
_BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX = 4 * KiB, 16 * MiB
_OF_A_CHUNK = ("offsets", "shape", "file", "begin", "end", "sums")
_DTYPE = re.compile("|".join(header.DTYPE_BITS))
_SUMS = re.compile(r"(?:[0-9a-f]{16})*")
# In JSON. Quotes inside of a name are not written like these.
_CHANGING = re.compile(r'(?:(?<="sums":")|(?<="content":"))[0-9a-f]*(?=")')
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Chunk(NamedTuple):
    """A box of a tensor, in elements, at the bytes [begin, end) of a file.

    `file` is an index into the document's files. `sums` has 16 hex digits for each piece, in order.
    """

    box: Box
    file: int
    begin: int
    end: int
    sums: str


class TensorEntry(NamedTuple):
    """A tensor: its dtype (safetensors code), global shape and chunks, if they are known."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()


class FileEntry(NamedTuple):
    """A data file. `digest` is the sha256 of the hex sums of all its pieces, in file order."""

    name: str
    bytes: int
    data_begin: int
    header_sums: str
    digest: str


# -- writing ---------------------------------------------------------------------------------------


def record_file(
    plan: SavePlan, sums: bytes, *, index: int = 0
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """The account of a file written by `plan`, as file number `index` of its document.

    `sums` holds 8 little-endian bytes a piece, first those of the header, then those of each tensor
    in file order. The tensors come in file order, with global shapes.
    """
    text = sums_to_hex(sums)
    places = [16 * at for at in sum_places(plan.data_begin, plan.begins, plan.specs)]
    tensors = {}
    for spec, begin, (at, to) in zip(plan.specs, plan.begins, pairwise(places), strict=True):
        end, shape = begin + spec.nbytes, spec.shape
        box = Box.whole(shape) if spec.offsets is None else Box(spec.offsets, shape)
        chunk = Chunk(box, index, begin, end, text[at:to])
        whole = shape if spec.global_shape is None else spec.global_shape
        tensors[spec.name] = TensorEntry(spec.dtype, whole, (chunk,))
    if places[-1] != len(text):
        facts = {"file": plan.file_name, "expected": places[-1] // 16, "got": len(text) // 16}
        raise InvariantError("a save returned another number of checksums", facts=facts)
    return file_entry(plan, text), tensors


def file_entry(plan: SavePlan, text: str) -> FileEntry:
    """A file written by `plan`, without its tensors. text: its checksums, as hex digits."""
    header_sums = text[: 16 * piece_count(0, plan.data_begin, BLOCK_BYTES)]
    digest = sha256(text.encode("ascii"))
    return FileEntry(plan.file_name, plan.file_bytes, plan.data_begin, header_sums, digest)


def sums_to_hex(sums: bytes) -> str:
    """Checksums as the engine has them (8 little-endian bytes each) -> 16 hex digits each."""
    swapped = array("Q", sums)
    swapped.byteswap()  # reverses each group of eight, whatever the byte order of this machine
    return swapped.tobytes().hex()


def sums_to_bytes(sums: str) -> bytes:
    """Hexadecimal sums as the engine takes them: 8 little-endian bytes each."""
    values = array("Q", bytes.fromhex(sums))
    values.byteswap()
    return values.tobytes()


def chunk_document(chunk: Chunk) -> dict[str, Any]:
    return {  # of each tensor of each save, so no loop over names
        "offsets": chunk.box.offsets, "shape": chunk.box.shape, "file": chunk.file,
        "begin": chunk.begin, "end": chunk.end, "sums": chunk.sums,
    }  # fmt: skip


Decode: TypeAlias = Callable[[bytes, str], object]


class Json(str):
    """A part of a document that is JSON already."""

    __slots__ = ()


def json_of(part: Any) -> Json:
    """The JSON of a part of a document. Raises InvariantError for what JSON does not have."""
    try:
        return part if type(part) is Json else Json(_encode(part))
    except (ValueError, TypeError, RecursionError) as fault:
        raise InvariantError(f"a document cannot be encoded: {fault}") from fault


def object_of(members: Mapping[str, Any]) -> Json:
    """The JSON of an object, whose members may be JSON already."""
    return Json(f"{{{','.join([f'{_encode(key)}:{json_of(members[key])}' for key in members])}}}")


def seal(document: Mapping[str, Any], what: str) -> bytes:
    """`document` as JSON whose last member, `what`_sha256, is the sha256 of the bytes before it."""
    try:
        body = object_of(document)[:-1].encode("utf-8")
    except UnicodeEncodeError as fault:
        raise InvariantError(f"a {what} cannot be encoded: {fault}") from fault
    raw = body + b',"%s_sha256":"%s"}\n' % (what.encode(), sha256(body).encode())
    if len(raw) > DOCUMENT_BYTES_MAX:
        facts = {"expected": f"at most {format_bytes(DOCUMENT_BYTES_MAX)}", "got": len(raw)}
        hint = "keep large collections in tensors: plain values are stored as JSON"
        raise UsageError(f"the {what} of this state is too large", facts=facts, hint=hint)
    return raw


def proven(raw: bytes, decode: Decode, what: str, new: tuple[bytes, Decode] | None = None) -> bytes:
    """The bytes of a sealed document, if the reader's own code takes them: whatever the checks of
    save() have missed, no step is committed that cannot be read.

    new: a document with only what was not read before, which is enough, and the code for that. A
    reader refuses too many arrays and objects of both together, so then all is read.
    """
    are_few = len(raw) < 2 * CONTAINERS_MAX or raw.count(b"{") + raw.count(b"[") <= CONTAINERS_MAX
    unread, read = new if new and are_few else (raw, decode)
    try:
        read(unread, "")
    except (ManifestError, FormatVersionError) as fault:
        summary = f"no reader would accept the {what} of this step, so it is not committed"
        raise InvariantError(summary, facts=fault.facts) from fault
    return raw


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class TensorsForm:
    """What a document says of tensors, to be written again with other checksums and contents.

    It holds texts and numbers only: Python's collector has nothing to look at.
    members: of the document: `tensors`, and what stays as it is. is_cut: whether a box is in
    several chunks.
    """

    def __init__(
        self, members: Mapping[str, Any], files: Sequence[FileEntry], is_cut: bool = False
    ) -> None:
        self._members = {key: json_of(each) for key, each in members.items()}
        self.names, self.is_cut = frozenset(members["tensors"]), is_cut
        self.with_content, changing = list[str](), list[Mapping[str, Any]]()
        for name, each in members["tensors"].items():
            if "content" in each:  # all of them are like the checksums of one more file
                self.with_content.append(name)
                changing.append({"file": len(files), "begin": len(changing), "sums": "0" * 16})
            changing += each["chunks"]
        self._between = _CHANGING.split(self._members["tensors"])
        self._file = array("q", [each["file"] for each in changing])
        self._begin, self._end = array("q", self._file), array("q", self._file)
        at = [*(len(file.header_sums) for file in files), 0]
        for i in sorted(range(len(changing)), key=lambda i: changing[i]["begin"]):
            self._begin[i] = at[self._file[i]]
            self._end[i] = at[self._file[i]] = self._begin[i] + len(changing[i]["sums"])

    def of(self, texts: Sequence[str]) -> dict[str, Json]:
        """The members. texts: the checksums of each file, those of its header first; then the
        contents, in the order of `with_content`."""
        found = map(
            str.__getitem__, map(texts.__getitem__, self._file), map(slice, self._begin, self._end)
        )
        both = zip_longest(self._between, found, fillvalue="")
        return {**self._members, "tensors": Json("".join(chain.from_iterable(both)))}


class Again(NamedTuple):
    """What is known of a document whose form was read before. members: of TensorsForm.of(). names:
    of the tensors. unread: the part of the state that has to be read again."""

    members: Mapping[str, Any]
    names: Container[str]
    state: Json
    unread: Any
    is_cut: bool = False


# -- reading ---------------------------------------------------------------------------------------


def unseal(
    check: Checker, raw: bytes, what: str, form: str, newest: int
) -> tuple[int, dict[str, Any]]:
    """(version, document) of a sealed document of format `form`, up to version `newest`."""
    member = f"{what}_sha256"
    if len(raw) > DOCUMENT_BYTES_MAX:
        check.fail(what, f"at most {format_bytes(DOCUMENT_BYTES_MAX)}", f"{len(raw)} bytes")
    size = len(f',"{member}":""}}\n') + 64
    found = re.fullmatch(rb',"%s":"([0-9a-f]{64})"}\n' % member.encode(), raw[-size:])
    if found is None:
        check.fail(member, "the last member", f"the end {show(raw[-24:])}")
    expected = sha256(raw[:-size])
    if found[1].decode() != expected:
        check.fail(member, expected, found[1].decode())
    document = check.object(check.parse(raw, what, STATE_DEPTH_MAX), what)
    if document.get("format") != form:
        check.fail("format", form, show(document.get("format")))
    version = check.integer(document.get("version"), "version", low=1)
    if version > newest:
        expected = f"{newest} or older"
        facts = {"file": check.file, "where": "version", "expected": expected, "got": version}
        hint = "upgrade statehold to read this step"
        raise FormatVersionError("a step was written by a newer statehold", facts=facts, hint=hint)
    return version, document


def needs_version_3(state: Json) -> bool:
    """Whether a tree has nodes that versions 1 and 2 do not know. No key of a user is written like
    that, and quotes inside of texts are."""
    return any(f'"{tag}":' in state for tag in _NEW_IN_3)


def check_state(
    check: Checker,
    state: Any,
    tensors: Container[str],
    version: int,
    value_of: values.LeafReader | None,
) -> None:
    """Decode the tree once, to check that it can be decoded, in a document of `version`.

    value_of: how a restore decodes the leaves that are no tensors; None where nobody needs them.
    """

    def leaf(tag: str, payload: Any) -> Any:
        if tag in ("$tensor", "$ndarray") and payload not in tensors:
            check.fail(f"state: {tag}", "the name of a tensor in this step", show(payload))
        if tag in _NEW_IN_3 and version < 3:
            check.fail(f"state: {tag}", "a node of this version", f"one of version 3 in {version}")
        return value_of(tag, payload) if value_of and tag in _NO_TENSORS else object()

    try:
        values.decode(state, leaf)
    except ManifestError as fault:
        if "file" not in fault.facts:
            fault.facts = {"file": check.file, **fault.facts}
            fault.hint = check.hint
        raise


class EntryReader:
    """Reads the parts of one document; failures are those of `check`."""

    def __init__(self, check: Checker, document: Mapping[str, Any]) -> None:
        self.check = check
        self.block_bytes = check.integer(
            document["block_bytes"], "block_bytes", _BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX
        )
        if self.block_bytes & (self.block_bytes - 1):
            check.fail("block_bytes", "a power of two", str(self.block_bytes))
        self.world_size = check.integer(document["world_size"], "world_size", 1, WORLD_MAX)
        self.files: tuple[FileEntry, ...] = ()

    def read_files(self, value: Any, is_name: Callable[[str], bool], expected: str) -> None:
        """Set `files`; their names must satisfy `is_name`."""
        nodes = self.check.array(value, "files")
        files = []
        for i, node in enumerate(nodes):
            files.append(self._file(node, f"files[{i}]"))
            if not is_name(files[-1].name):
                self.check.fail(f"files[{i}].name", expected, show(files[-1].name))
        if len({entry.name for entry in files}) != len(files):
            self.check.fail("files", "every file once", "a name twice")
        self.files = tuple(files)

    def _file(self, node: Any, where: str) -> FileEntry:
        check = self.check
        names = ("name", "bytes", "data_begin", "header_sums", "digest")
        found = check.members(node, where, names)
        if type(found["name"]) is not str:
            check.fail(f"{where}.name", "the name of a data file", show(found["name"]))
        size = check.integer(found["bytes"], f"{where}.bytes", low=header.PAGE)
        high = min(size, header.HEADER_BYTES_MAX + header.LENGTH_BYTES)
        begin = check.integer(found["data_begin"], f"{where}.data_begin", header.PAGE, high)
        if begin % header.PAGE:
            check.fail(f"{where}.data_begin", f"a multiple of {header.PAGE}", str(begin))
        sums = self._sums(found["header_sums"], f"{where}.header_sums", 0, begin)
        digest = check.text(found["digest"], f"{where}.digest", _DIGEST, "64 hex digits")
        return FileEntry(found["name"], size, begin, sums, digest)

    def _sums(self, value: Any, where: str, begin: int, nbytes: int) -> str:
        sums = self.check.text(value, where, _SUMS, "16 lower-case hex digits a piece")
        count = piece_count(begin, nbytes, self.block_bytes)
        if len(sums) != 16 * count:
            self.check.fail(where, f"{count} checksums", f"{len(sums) / 16:g}")
        return sums

    def name(self, name: str) -> None:
        """Check that `name` can be the name of a tensor."""
        if not header.are_names([name]):
            self.check.fail("tensors", "the name of a tensor", show(name))

    def dtype_and_shape(self, found: Mapping[str, Any], where: str) -> tuple[str, tuple[int, ...]]:
        dtype = self.check.text(found["dtype"], f"{where}.dtype", _DTYPE, "a dtype of safetensors")
        shape = self.check.shape(found["shape"], f"{where}.shape")
        self._bytes_of(dtype, shape, f"{where}.shape")
        return dtype, shape

    def _bytes_of(self, dtype: str, shape: tuple[int, ...], where: str) -> int:
        nbytes = header.bytes_of(dtype, shape)
        if nbytes is None:
            expected = "a whole number of bytes below 2**60"
            self.check.fail(where, expected, f"{dtype} {show(shape)}")
        return nbytes

    def chunks(self, value: Any, where: str, dtype: str, boxes: Sequence[Box]) -> tuple[Chunk, ...]:
        """The chunks of one tensor: one for each of `boxes`, in order, no two in one file."""
        nodes = self.check.array(value, where)
        if len(nodes) != len(boxes):
            self.check.fail(where, f"{len(boxes)} here: chunks", f"{len(nodes)}")
        chunks = tuple(
            [
                self._chunk(node, f"{where}[{i}]", dtype, box)
                for i, (node, box) in enumerate(zip(nodes, boxes, strict=True))
            ]
        )
        if len({chunk.file for chunk in chunks}) != len(chunks):
            self.check.fail(where, "each chunk of a tensor in a file of its own", "a file twice")
        return chunks

    def runs(self, value: Any, where: str, dtype: str, box: Box) -> tuple[Chunk, ...]:
        """The chunks of one box: runs of its elements, one after the other, no two in one file."""
        check, boxes, at = self.check, list[Box](), 0
        for i, node in enumerate(check.array(value, where)):
            found = check.object(node, f"{where}[{i}]")
            offsets = check.shape(found.get("offsets"), f"{where}[{i}].offsets")
            shape = check.shape(found.get("shape"), f"{where}[{i}].shape")
            run = run_of(Box(offsets, shape), box) if len(offsets) == len(shape) else None
            if run is None or run[0] != at:
                expected = f"elements of {box} that follow each other, from number {at} on"
                check.fail(f"{where}[{i}]", expected, f"{show(offsets)} {show(shape)}")
            boxes.append(Box(offsets, shape))
            at = run[1]
        if at != box.numel:
            check.fail(where, f"all {box.numel} elements of {box}", f"{at} of them")
        return self.chunks(value, where, dtype, boxes)

    def _chunk(self, node: Any, where: str, dtype: str, box: Box) -> Chunk:
        check, files = self.check, self.files
        found = check.members(node, where, _OF_A_CHUNK)
        if check.shape(found["offsets"], f"{where}.offsets") != box.offsets:
            check.fail(f"{where}.offsets", show(box.offsets), show(found["offsets"]))
        if check.shape(found["shape"], f"{where}.shape") != box.shape:
            check.fail(f"{where}.shape", show(box.shape), show(found["shape"]))
        nbytes = self._bytes_of(dtype, box.shape, f"{where}.shape")
        file = check.integer(found["file"], f"{where}.file", high=len(files) - 1)
        low, high = files[file].data_begin, files[file].bytes
        begin = check.integer(found["begin"], f"{where}.begin", low, high)
        end = check.integer(found["end"], f"{where}.end", begin, high)
        if end - begin != nbytes:
            expected = f"begin + {nbytes}, the size of the tensor"
            check.fail(f"{where}.end", expected, f"begin + {end - begin}")
        sums = self._sums(found["sums"], f"{where}.sums", begin, nbytes)
        return Chunk(box, file, begin, end, sums)

    def check_tiling(self, tensors: Iterable[tuple[str, Sequence[Chunk]]]) -> None:
        """Check that in each file the chunks cover [data_begin, bytes) once, and that the digest
        matches."""
        held: list[list[tuple[int, int, str, int, str]]] = [[] for _ in self.files]
        for name, chunks in tensors:
            for i, chunk in enumerate(chunks):
                held[chunk.file].append((chunk.begin, chunk.end, name, i, chunk.sums))
        for i, (file, ranges) in enumerate(zip(self.files, held, strict=True)):
            ranges.sort()
            at = file.data_begin
            for begin, end, name, number, _ in ranges:
                if begin != at:
                    where = f"tensors.{name}.chunks[{number}].begin"
                    problem = "a hole" if begin > at else "an overlap"
                    self.check.fail(where, str(at), f"{begin}: {problem} in {file.name}")
                at = end
            if at != file.bytes:
                expected = f"{at}, the end of its tensors"
                self.check.fail(f"files[{i}].bytes", expected, f"{file.bytes}")
            sums = "".join([file.header_sums, *(each for *_, each in ranges)])
            digest = sha256(sums.encode("ascii"))
            if file.digest != digest:
                self.check.fail(f"files[{i}].digest", digest, file.digest)


# -- what a step says of itself --------------------------------------------------------------------
# Metrics, tags, and the step that its run began from: the member `about` of version 5
# (docs/format.md, "About"). An empty one is not written, so a step that says nothing of itself
# keeps the version that it would have without.


_MEMBERS = ("metrics", "tags", "parent")
_PARENT = ("run", "step", "manifest_sha256")
# JSON has no such numbers.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
NAMES_MAX = 1000
# Without surrogates, which UTF-8 cannot hold. Steps from before may have those of U+0080 to U+009F.
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
_C1 = re.compile(r"[\x80-\x9f]")  # some terminals obey them
_RUN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,4096}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
NAMED = "1 to 200 characters, none of them a control character"
_RUN_NAMED = "1 to 4096 characters, none of them a control character"


@dataclass(frozen=True, slots=True)
class Origin:
    """The step of another run that a run began from. run: its directory or URL, at that time."""

    run: str
    step: int
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class About:
    """metrics: by name. tags: words of the user, each once. parent: of the run."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    parent: Origin | None = None

    def __bool__(self) -> bool:
        return bool(self.metrics or self.tags or self.parent)

    def document(self) -> dict[str, Any]:
        """The member `about` of a manifest; empty if a step says nothing of itself."""
        if not self:
            return {}
        parent = self.parent
        about = {
            "metrics": {name: _number_document(value) for name, value in self.metrics.items()},
            "tags": list(self.tags),
            "parent": {name: getattr(parent, name) for name in _PARENT} if parent else None,
        }
        return {"about": about}


NOTHING = About()


def is_name(name: object) -> bool:
    """Whether this can be the name of a metric, or a tag."""
    return type(name) is str and _NAME.fullmatch(name) is not None and not _C1.search(name)


def check_origin(run: str) -> None:
    """Raise UsageError unless steps can say that their run began from one of the run here."""
    if _RUN.fullmatch(run) is None:
        text = "no step can record the path of the run that this run begins from"
        hint = "rename that directory; its steps are not affected"
        raise refused(text, _RUN_NAMED, ascii(run)[:300], hint)


def check_about(check: Checker, document: Mapping[str, Any]) -> About:
    """What a manifest says of its step: NOTHING without a member `about`. Fails as `check` does."""
    if "about" not in document:
        return NOTHING
    found = check.members(document["about"], "about", _MEMBERS)
    metrics = check.object(found["metrics"], "about.metrics")
    tags = check.array(found["tags"], "about.tags")
    _count(check, len(metrics), "about.metrics")
    _count(check, len(tags), "about.tags")
    for name in metrics:
        check.text(name, "about.metrics", _NAME, f"names of {NAMED}")
    for tag in tags:
        check.text(tag, "about.tags", _NAME, f"tags of {NAMED}")
    if len(set(tags)) != len(tags):
        check.fail("about.tags", "each tag once", show(tags))
    return About(
        metrics={name: _number(check, value, name) for name, value in metrics.items()},
        tags=tuple(tags),
        parent=_origin(check, found["parent"]),
    )


def _count(check: Checker, count: int, where: str) -> None:
    if count > NAMES_MAX:
        check.fail(where, f"at most {NAMES_MAX} names", f"{count}")


def _number(check: Checker, value: Any, name: str) -> float:
    if type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type(value) is not float and not (type(value) is int and abs(value) <= INT_MAX):
        check.fail(f"about.metrics.{name}", "a number", show(value))
    return float(value)


def _number_document(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _origin(check: Checker, node: Any) -> Origin | None:
    if node is None:
        return None
    found = check.members(node, "about.parent", _PARENT)
    return Origin(
        check.text(found["run"], "about.parent.run", _RUN, _RUN_NAMED),
        check.integer(found["step"], "about.parent.step", high=STEP_MAX),
        check.text(found["manifest_sha256"], "about.parent.manifest_sha256", _DIGEST,
                   "64 hex digits"),
    )  # fmt: skip
