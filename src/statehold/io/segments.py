"""Segments of files -> a read job of the engine, and the meaning of a segment number in answers.

Owns: the one call of Engine.read; the tensor of a bad piece.
Invariants: every byte of a segment is verified, whether it has a destination or not.
Not here: which segments, and the destinations of their bytes (read_plan); reading a whole step fast
(cli/checking). Does not import torch, because the commands use this module, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statehold import _core
from statehold.errors import ChecksumError, UsageError
from statehold.format.entries import sums_to_bytes
from statehold.io.clients import Client
from statehold.process.host_memory import ReadOnly
from statehold.units import format_bytes

if TYPE_CHECKING:
    from statehold._core import BoxTarget, Engine, Mismatch, ReadJob
    from statehold.tensors.devices.placing import ChunkPlace


@dataclass(frozen=True, slots=True)
class Where:
    """The destination of bytes: `address`, dense or in the layout of `box`, or `external`, which
    the engine cannot reach.

    `owner`: what keeps the memory at `address` alive. `shared`: other processes read the
    bytes, too.
    """

    address: int = 0
    owner: object = None
    box: BoxTarget | None = None
    external: ChunkPlace | None = None
    shared: bool = False

    @property
    def flags(self) -> int:
        external = _core.SEGMENT_EXTERNAL if self.external is not None else 0
        return external | (_core.SEGMENT_SHARED if self.shared else 0)


NOWHERE = Where()  # only verified


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes [begin, end) of a file, the checksums of their pieces, and their destination.

    They belong to one tensor (`name`), or to the header ("").
    """

    file: int
    begin: int
    end: int
    sums: str
    name: str
    where: Where = NOWHERE

    @property
    def order(self) -> tuple[int, int, int]:
        return self.file, self.begin, self.end


@dataclass(frozen=True, slots=True)
class Reading:
    """A read under way."""

    job: ReadJob
    segments: Sequence[Segment]
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
            if fill is not None and (places := self.external()):
                fill(self.job, places)
            self.job.wait(None)
        except _core.Mismatch as found:
            raise self._mismatch(found) from None
        finally:
            self.job.cancel()

    def external(self) -> dict[int, ChunkPlace]:
        """The destinations that the engine cannot reach, by segment."""
        places = enumerate(each.where.external for each in self.segments)
        return {index: place for index, place in places if place is not None}

    def _mismatch(self, found: Mismatch) -> ChecksumError:
        segment = self.segments[found.segment]
        return ChecksumError(
            "bytes on disk do not match their checksum",
            facts={
                "tensor": segment.name or "none: the header of the file",
                "file": self.files[segment.file],
                "bytes": f"[{found.begin}, {found.end})",
                "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
            },
            hint=self.hint,
        )


def start_read(
    engine: Engine,
    files: Mapping[str, int],
    segments: Sequence[Segment],
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
    places = [each.where for each in segments]
    job = engine.read(
        files=list(files),
        file_bytes=list(files.values()),
        block_bytes=block_bytes,
        file_index=array("q", [each.file for each in segments]),
        begins=array("q", [each.begin for each in segments]),
        sizes=array("q", [each.end - each.begin for each in segments]),
        addresses=array("Q", [where.address for where in places]),
        flags=bytes([where.flags for where in places]),
        strided={},  # if not dense, it is a box
        boxes={index: where.box for index, where in enumerate(places) if where.box is not None},
        sums=sums_to_bytes("".join([each.sums for each in segments])),
        owner=[where.owner for where in places],
        first_segment=first_segment if any(where.shared for where in places) else 0,
        client=Client.RESTORE,
    )
    return Reading(job, segments, list(files), hint)


def _check_writable(segments: Sequence[Segment]) -> None:
    """A native thread that wrote into read-only memory would end the process."""
    read_only = ReadOnly()
    for each in segments:
        tensor: Any = each.where.owner  # or memory of our own
        storage = getattr(tensor, "untyped_storage", None)
        if each.begin == each.end or storage is None or storage().resizable():
            continue  # what torch has allocated itself can be resized, and written
        nbytes = each.end - each.begin if each.where.box is None else 1
        if read_only.holds(each.where.address, nbytes):
            raise UsageError(
                "a tensor lies in memory that may not be written; nothing was read",
                facts={"tensor": each.name, "expected": "writable memory"},
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
