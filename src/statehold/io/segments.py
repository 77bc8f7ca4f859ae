"""Segments of files -> a read job of the engine, and the meaning of a segment number in answers.

Owns: the one call of Engine.read; the tensor of a bad piece.
Invariants: every byte of a segment is verified, whether it has a destination or not.
Not here: which segments, and the destinations of their bytes (read_plan); reading a whole step fast
(cli/checking). Does not import torch, because the commands use this module, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from statehold import _core
from statehold.errors import ChecksumError, UsageError
from statehold.format.entries import sums_to_bytes
from statehold.io.clients import Client
from statehold.process.host_memory import ReadOnly
from statehold.units import format_bytes

if TYPE_CHECKING:
    from statehold._core import BoxTarget, Engine, Mismatch, ReadJob
    from statehold.tensors.devices.placing import ChunkPlace

T = TypeVar("T")


@dataclass(slots=True)
class ReadSegments:
    """Ranges of files, the checksums of their pieces, and their destinations.

    These are columns: Python's collector would look at an object for each of thousands of tensors.

    files: their numbers. begins, ends: in the files. sums: of the pieces in a range. names: of the
        tensor that has it; "" for the header of a file. addresses: of the memory for it, dense or
        in the layout that `boxes` has; 0 for what is only verified. owners: what keeps that memory
        alive. external: the destinations that the engine cannot reach. boxes and external are by
        the places of the ranges.
    """

    files: array[int] = field(default_factory=partial(array, "q"))
    begins: array[int] = field(default_factory=partial(array, "q"))
    ends: array[int] = field(default_factory=partial(array, "q"))
    sums: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    addresses: array[int] = field(default_factory=partial(array, "Q"))
    owners: list[object] = field(default_factory=list)
    flags: bytearray = field(default_factory=bytearray)
    boxes: dict[int, BoxTarget] = field(default_factory=dict)
    external: dict[int, ChunkPlace] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.files)

    def add(
        self, file: int, begin: int, end: int, sums: str, name: str, *, address: int = 0,
        owner: object = None, box: BoxTarget | None = None, external: ChunkPlace | None = None,
        shared: bool = False,
    ) -> None:  # fmt: skip
        """One more range. shared: other processes read its bytes, too."""
        if box is not None:
            self.boxes[len(self.files)] = box
        if external is not None:
            self.external[len(self.files)] = external
        self.files.append(file)
        self.begins.append(begin)
        self.ends.append(end)
        self.sums.append(sums)
        self.names.append(name)
        self.addresses.append(address)
        self.owners.append(owner)
        flag = _core.SEGMENT_EXTERNAL if external is not None else 0
        self.flags.append(flag | _core.SEGMENT_SHARED if shared else flag)

    def in_order(self) -> ReadSegments:
        """The same in the order of files and of what is in them."""
        order = sorted(range(len(self)), key=self.ends.__getitem__)
        order.sort(key=self.begins.__getitem__)
        order.sort(key=self.files.__getitem__)

        def moved(column: Sequence[T]) -> Iterator[T]:
            return map(column.__getitem__, order)

        return ReadSegments(
            array("q", moved(self.files)),
            array("q", moved(self.begins)),
            array("q", moved(self.ends)),
            list(moved(self.sums)),
            list(moved(self.names)),
            array("Q", moved(self.addresses)),
            list(moved(self.owners)),
            bytearray(moved(self.flags)),
            {i: self.boxes[at] for i, at in enumerate(order) if at in self.boxes},
            {i: self.external[at] for i, at in enumerate(order) if at in self.external},
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """A read under way."""

    job: ReadJob
    segments: ReadSegments
    files: Sequence[str]
    hint: str  # for the error about a bad piece

    def finish(
        self, fill: Callable[[ReadJob, Mapping[int, ChunkPlace]], None] | None = None
    ) -> None:
        """Return once every byte is in place and verified. Otherwise raise ChecksumError.

        The error names the tensor. fill: moves bytes to the destinations that the engine cannot
        reach.
        """
        try:
            if fill is not None and (places := self.segments.external):
                fill(self.job, places)
            self.job.wait(None)
        except _core.Mismatch as found:
            raise self._mismatch(found) from None
        finally:
            self.job.cancel()

    def _mismatch(self, found: Mismatch) -> ChecksumError:
        name, file = self.segments.names[found.segment], self.segments.files[found.segment]
        return ChecksumError(
            "bytes on disk do not match their checksum",
            facts={
                "tensor": name or "none: the header of the file",
                "file": self.files[file],
                "bytes": f"[{found.begin}, {found.end})",
                "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
            },
            hint=self.hint,
        )


def start_read(
    engine: Engine,
    files: Mapping[str, int],
    segments: ReadSegments,
    block_bytes: int,
    *,
    first_segment: int = 0,
    hint: str = "",
) -> Reading:
    """Begin to read `segments`, in order, of `files`: path -> bytes. Segments have the files'
    numbers.

    first_segment: where to begin if other ranks read these files, too.
    """
    _check_blocks(block_bytes, engine.buffer_bytes)
    _check_writable(segments)
    flags = bytes(segments.flags)
    is_shared = any(map(_core.SEGMENT_SHARED.__and__, set(flags)))
    job = engine.read(
        files=list(files),
        file_bytes=list(files.values()),
        block_bytes=block_bytes,
        file_index=segments.files,
        begins=segments.begins,
        sizes=array("q", map(int.__sub__, segments.ends, segments.begins)),
        addresses=segments.addresses,
        flags=flags,
        strided={},  # if not dense, it is a box
        boxes=segments.boxes,
        sums=sums_to_bytes("".join(segments.sums)),
        owner=segments.owners,
        first_segment=first_segment if is_shared else 0,
        client=Client.RESTORE,
    )
    return Reading(job, segments, list(files), hint)


def _check_writable(segments: ReadSegments) -> None:
    """A native thread that wrote into read-only memory would end the process."""
    read_only = ReadOnly()
    owner: Any  # a tensor, or memory of our own
    for at, owner in enumerate(segments.owners):
        storage = getattr(owner, "untyped_storage", None)
        nbytes = segments.ends[at] - segments.begins[at]
        if not nbytes or storage is None or storage().resizable():
            continue  # what torch has allocated itself can be resized, and written
        if read_only.holds(segments.addresses[at], 1 if at in segments.boxes else nbytes):
            raise UsageError(
                "a tensor lies in memory that may not be written; nothing was read",
                facts={"tensor": segments.names[at], "expected": "writable memory"},
                hint="leave it out, or load into a copy: tensor.clone()",
            )


def _check_blocks(block_bytes: int, buffer_bytes: int) -> None:
    """A piece is verified in one buffer, so the grid of the step has to divide the buffer."""
    if buffer_bytes % block_bytes:
        raise UsageError(
            "the checksums of this step do not fit the buffers",
            facts={
                "block_bytes of the step": format_bytes(block_bytes),
                "buffer_bytes": format_bytes(buffer_bytes),
            },
            hint=f"open it with buffer_bytes={block_bytes} or a multiple",
        )
