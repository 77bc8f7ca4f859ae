"""Between a saved step and the engine: which segments to read, where their bytes go, what failed.

Owns: the segments of a restore. For each destination, the chunks that hold its box; of each chunk
the ranges that have wanted bytes in them, widened to whole pieces; and the headers of the files,
so that all that is read of a file is verified.
Holds: segments are sorted by file and offset. A range that fills its part of the destination
without gap is placed as it is; otherwise the engine places the box in it.
Not here: which chunk has which box (saved), which bytes a box needs (ranges), the live state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statehold.errors import ChecksumError, UsageError
from statehold.planning.layout import Box
from statehold.planning.ranges import ranges
from statehold.state.landing import Landing, region
from statehold.steps.entries import sums_to_bytes
from statehold.units import format_bytes

if TYPE_CHECKING:
    import torch

    from statehold._core import BoxTarget, Engine, Mismatch, ReadJob, Strided
    from statehold.state.destinations import Destination
    from statehold.steps.saved import PlacedChunk, SavedStep

FLAG_EXTERNAL = 2
FLAG_SHARED = 4


@dataclass(frozen=True, slots=True)
class Target:
    """Where a segment's bytes go: one of `strided` and `box`, or neither for contiguous memory."""

    address: int = 0
    strided: Strided | None = None
    box: BoxTarget | None = None
    landing: torch.Tensor | None = None  # memory that the engine cannot reach
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """A run of bytes to verify and, when it has a target, to place."""

    file: int
    begin: int
    end: int
    sums: str
    name: str
    target: Target | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.file, self.begin, self.end


@dataclass(frozen=True, slots=True)
class StepRead:
    """A read under way: the native job, and what its segment numbers mean."""

    job: ReadJob
    segments: list[ReadSegment]
    files: list[str]
    landings: list[Landing]

    def external(self) -> dict[int, torch.Tensor]:
        """The memory that the engine cannot reach, by segment."""
        return {
            index: segment.target.landing
            for index, segment in enumerate(self.segments)
            if segment.target is not None and segment.target.landing is not None
        }

    def land(self) -> None:
        """Move what had to be read beside its place into it."""
        for landing in self.landings:
            landing.land()

    def mismatch(self, found: Mismatch) -> ChecksumError:
        """The error for a piece whose bytes do not match, naming the tensor it belongs to."""
        segment = self.segments[found.segment]
        name = segment.name
        hint = "restore() without a step takes the newest intact one"
        return mismatch_error(found, name, self.files[segment.file], hint)


class ReadPlan:
    """What to read of a step for some destinations. Planning reads no data, and changes nothing.

    complete: verify besides whatever else of the step is this rank's to verify. What several of the
    `ranks` of this job read goes through the page cache, where the device is read once a node;
    each rank begins at another place, so that all of them are busy.
    """

    def __init__(
        self,
        saved: SavedStep,
        destinations: Iterable[Destination],
        *,
        complete: bool,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        builder = _Builder(saved, ranks)
        for destination in destinations:
            builder.add(destination)
        if complete:
            builder.add_rest()
        self._segments = builder.finish()
        self._files = builder.files
        self._landings = builder.landings
        self._block_bytes = saved.block_bytes
        self._turn = len(self._segments) * rank // ranks

    def start(self, engine: Engine, directory: str) -> StepRead:
        """Begin to read."""
        check_blocks(self._block_bytes, engine.buffer_bytes)
        segments = self._segments
        files = [f"{directory}/{name}" for name in self._files]
        targets = [segment.target or Target() for segment in segments]
        job = engine.read(
            files=files,
            file_bytes=list(self._files.values()),
            block_bytes=self._block_bytes,
            file_index=array("q", [segment.file for segment in segments]),
            begins=array("q", [segment.begin for segment in segments]),
            sizes=array("q", [segment.end - segment.begin for segment in segments]),
            addresses=array("Q", [target.address for target in targets]),
            flags=bytes([_flags(target) for target in targets]),
            strided={i: each.strided for i, each in enumerate(targets) if each.strided},
            boxes={i: each.box for i, each in enumerate(targets) if each.box},
            sums=sums_to_bytes("".join([segment.sums for segment in segments])),
            first_segment=self._turn if any(target.shared for target in targets) else 0,
        )
        return StepRead(job, segments, files, self._landings)


def check_blocks(block_bytes: int, buffer_bytes: int) -> None:
    """A piece is verified in one buffer: the grid of the step has to divide it."""
    if buffer_bytes % block_bytes:
        raise UsageError(
            "the checksums of this step do not fit the buffers",
            facts={
                "block_bytes of the step": format_bytes(block_bytes),
                "buffer_bytes": format_bytes(buffer_bytes),
            },
            hint=f"open it with buffer_bytes={block_bytes} or a multiple",
        )


def _flags(target: Target) -> int:
    return FLAG_EXTERNAL * (target.landing is not None) | FLAG_SHARED * target.shared


def mismatch_error(found: Mismatch, name: str, file: str, hint: str) -> ChecksumError:
    """The error for a piece of a tensor whose bytes do not match."""
    return ChecksumError(
        "bytes on disk do not match their checksum",
        facts={
            "tensor": name or "none: the header of the file",
            "file": file,
            "bytes": f"[{found.begin}, {found.end})",
            "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
        },
        hint=hint,
    )


class _Builder:
    """Collects the segments of one read."""

    def __init__(self, saved: SavedStep, ranks: int) -> None:
        self._saved = saved
        self._ranks = ranks
        self._segments: list[ReadSegment] = []
        self.files: dict[str, int] = {}  # name -> bytes, in the order of their numbers
        self._places: dict[str, int] = {}
        self._asked: list[PlacedChunk] = []
        self._names: set[str] = set()
        self.landings: list[Landing] = []

    def add(self, destination: Destination) -> None:
        """Read what lies in the destination's box."""
        self._names.add(destination.name)
        chunks = self._saved.chunks(destination.name, destination.box, destination.among)
        for chunk in chunks:
            self._asked.append(chunk)
            common = chunk.box.intersection(destination.box)
            if chunk.box == destination.box:
                self._add_whole(chunk, destination)
            elif common is not None:
                self._add_box(chunk, common, destination)

    def add_rest(self) -> None:
        """Read, only to verify it, what else is this rank's to verify.

        Of a tensor that this rank has a place for, in another layout, the other ranks ask for the
        rest: to verify here what this rank once wrote would have the device read it twice.
        """
        for name, chunk in self._saved.unread(self._asked):
            if name not in self._names:
                self._append(chunk, chunk.begin, chunk.end, chunk.sums, name)

    def finish(self) -> list[ReadSegment]:
        """All segments in order, the headers among them."""
        entries = {entry.name: entry for entry in self._saved.files}
        for name, file in self._places.items():
            entry = entries[name]
            self._segments.append(ReadSegment(file, 0, entry.data_begin, entry.header_sums, ""))
        return sorted(self._segments, key=lambda segment: segment.order)

    def _add_whole(self, chunk: PlacedChunk, destination: Destination) -> None:
        target = Target(
            0 if destination.external else destination.address,
            destination.strided,
            None,
            destination.tensor if destination.external and chunk.end > chunk.begin else None,
            destination.shared,
        )
        self._append(chunk, chunk.begin, chunk.end, chunk.sums, destination.name, target)

    def _add_box(self, chunk: PlacedChunk, common: Box, destination: Destination) -> None:
        item_bytes = destination.tensor.element_size()
        wanted = common.relative_to(chunk.box)
        shape, block_bytes = chunk.box.shape, self._saved.block_bytes
        found = ranges(chunk.begin, chunk.sums, shape, wanted, item_bytes, block_bytes)
        if destination.external:
            low, high = found[0].begin - chunk.begin, found[-1].end - chunk.begin
            landing = Landing(destination, common, chunk.box, low, high)
            self.landings.append(landing)
        place = region(destination.tensor, destination.box, common)
        for each in found:
            begin, end = each.begin - chunk.begin, each.end - chunk.begin
            # Of pieces that are not wanted whole, other ranks want the rest.
            shared = destination.shared or (self._ranks > 1 and each.box_begin is None)
            if destination.external:
                target = Target(landing=landing.part(begin, end), shared=shared)
            elif each.box_begin is not None and place.is_contiguous():
                target = Target(place.data_ptr() + each.box_begin, shared=shared)
            else:
                box = (item_bytes, shape, wanted.offsets, wanted.shape, place.stride(), begin)
                target = Target(place.data_ptr(), box=box, shared=shared)
            self._append(chunk, each.begin, each.end, each.sums, destination.name, target)

    def _append(
        self,
        chunk: PlacedChunk,
        begin: int,
        end: int,
        sums: str,
        name: str,
        target: Target | None = None,
    ) -> None:
        if chunk.file not in self._places:
            self._places[chunk.file] = len(self._places)
            self.files[chunk.file] = chunk.file_bytes
        file = self._places[chunk.file]
        self._segments.append(ReadSegment(file, begin, end, sums, name, target))
