"""Boxes of saved chunks, and memory that wants them -> the segments that the engine reads.

Owns: the bytes that a destination needs of a chunk (the ranges that hold its box, widened to whole
pieces), their destinations, and the headers of the files, so that everything read is verified.
Invariants: restores, and the reader of dcp, read steps into tensors only through this module. A
range that fills its part of the memory without a gap is placed directly. Otherwise the engine
places the box in it.
Not here: which chunk has which box (saved), which bytes a box needs (ranges), the engine's job and
its errors (segments), the live state.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from statehold.encoding import header
from statehold.errors import ManifestError
from statehold.io.objects.parallel import apart, side_by_side
from statehold.io.segments import Reading, ReadSegments, start_read
from statehold.layout.layout import Box
from statehold.layout.plan import FROZEN_KEY, file_name, file_of
from statehold.layout.ranges import Range, ranges
from statehold.tensors.devices.placing import ChunkPlace
from statehold.tensors.dtypes import torch_box, torch_shape

if TYPE_CHECKING:
    import torch

    from statehold._core import Engine
    from statehold.format.saved import PlacedChunk, SavedStep
    from statehold.tensors.destinations import Destination

LOCATED_AT_ONCE = 8
# (name, bytes, ranges that are read) of a file -> its path.
Locate = Callable[[str, int, Sequence[tuple[int, int]]], str]
_HINT = "restore() without a step takes the newest intact one"


class ReadPlan:
    """The parts of a step to read, for `destinations` and for later ones.

    Planning reads no data, and changes nothing.
    complete: also verify everything else of the step that this rank has to verify. If several of
        the `ranks` of this job read a file, it goes through the page cache, so the device is read
        once a node. Each rank begins at another place, so that all of them are busy.
    streamed: tensors that other plans read.
    hint: of the error for a bad piece. notes: keep the headers that frozen() needs.
    segments: what is to be read of the tensors.
    """

    def __init__(
        self,
        saved: SavedStep,
        destinations: Iterable[Destination] = (),
        *,
        complete: bool = False,
        streamed: Collection[str] = (),
        rank: int = 0,
        ranks: int = 1,
        hint: str = _HINT,
        notes: bool = False,
    ) -> None:
        self._saved = saved
        self._rank = rank
        self._ranks = ranks
        self._hint = hint
        self._notes = notes
        self._kept: list[ctypes.Array[ctypes.c_char]] = []
        self.segments = ReadSegments()
        self._files: dict[str, tuple[int, int]] = {}  # name -> number, bytes
        names = {*streamed}
        for destination in destinations:
            names.add(destination.name)
            self.fill(destination)
        if complete:
            # What else the rank has to verify. If this rank holds a tensor in another layout,
            # the other ranks read the rest of it. If this rank verified here what it once wrote,
            # the device would read it twice.
            for name, chunk in saved.unread(names):
                self.verify(name, chunk)

    def place(
        self,
        name: str,
        chunk: PlacedChunk,
        box: Box,
        target: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        external: bool = False,
        shared: bool = False,
    ) -> None:
        """Read the elements `box` of a chunk of tensor `name` into `target`.

        `box` counts from the chunk's first element. `target` has its shape and the saved dtype.
        external: the engine cannot reach the memory. shared: other processes read the bytes, too.
        dtype: the saved one, if external memory has another; elements are converted as copy_()
            does.
        """
        dtype = dtype or target.dtype
        shape, item_bytes = torch_shape(dtype, chunk.box.shape), dtype.itemsize
        if box.shape == shape:
            found = [_all_of(chunk)]
        else:
            grid = self._saved.block_bytes
            found = ranges(chunk.begin, chunk.sums, shape, box, item_bytes, grid)
        place = ChunkPlace.of(target, dtype, shape, box) if external else None
        if place is not None and not place.is_aligned(chunk.begin):
            raise _unaligned(name, chunk, item_bytes)
        for part in found:
            # Other ranks want the rest of pieces that are not wanted as a whole.
            also = shared or (self._ranks > 1 and part.box_begin is None)
            begin, end = part.begin - chunk.begin, part.end - chunk.begin
            if place is not None:
                outside = place._replace(begin=begin) if begin < end else None
                self._append(name, chunk, part, external=outside, shared=also)
                continue
            address, inside = target.data_ptr(), None
            if part.box_begin is None or not target.is_contiguous():
                inside = item_bytes, shape, box.offsets, box.shape, target.stride(), begin
            else:
                address += part.box_begin
            self._append(name, chunk, part, address=address, owner=target, box=inside, shared=also)

    def start(self, engine: Engine, locate: Locate) -> Reading:
        """Begin to read.

        `locate` returns the place of a file (name, bytes, read ranges). With several files, several
        threads call it.
        """
        self._add_headers()
        segments = self.segments.in_order()
        read: dict[int, list[tuple[int, int]]] = {number: [] for number, _ in self._files.values()}
        both = zip(segments.begins, segments.ends, strict=True)
        for file, each in zip(segments.files, both, strict=True):
            read[file].append(each)
        return start_read(
            engine,
            self._located(locate, read),
            segments,
            self._saved.block_bytes,
            first_segment=len(segments) * self._rank // self._ranks,
            hint=self._hint,
        )

    def _located(
        self, locate: Locate, read: Mapping[int, Sequence[tuple[int, int]]]
    ) -> dict[str, int]:
        """Path -> bytes, of all files; far files are fetched in parallel."""
        sizes = [nbytes for _, nbytes in self._files.values()]
        calls = [
            partial(locate, name, nbytes, read[number])
            for name, (number, nbytes) in self._files.items()
        ]
        if len(calls) <= 1:  # without the way to another thread
            paths = [call() for call in calls]
        else:  # a signal does not wait for them
            paths = apart(partial(side_by_side, calls, LOCATED_AT_ONCE))
        return dict(zip(paths, sizes, strict=True))

    def fill(self, destination: Destination, dtype: torch.dtype | None = None) -> None:
        """Read what is in the box of a destination.

        dtype: the saved one, if external memory has another.
        """
        name, dtype = destination.name, dtype or destination.tensor.dtype
        for chunk in self._saved.chunks(name, destination.box, destination.among):
            inside, target = Box.whole(chunk.box.shape), destination.tensor
            if chunk.box != destination.box:  # equal ones may be empty
                common = chunk.box.intersection(destination.box)
                if common is None:
                    continue
                inside, target = common.relative_to(chunk.box), destination.part(common)
            self.place(
                name,
                chunk,
                torch_box(dtype, inside),
                target,
                dtype=dtype,
                external=destination.external,
                shared=destination.shared,
            )

    def verify(self, name: str, chunk: PlacedChunk) -> None:
        """Read a chunk of tensor `name` only to verify it."""
        self._append(name, chunk, _all_of(chunk))

    def _append(self, name: str, chunk: PlacedChunk, part: Range, **where: Any) -> None:
        known = self._files.get(chunk.file)
        if known is None:
            known = self._files[chunk.file] = len(self._files), chunk.file_bytes
        self.segments.add(known[0], part.begin, part.end, part.sums, name, **where)

    def frozen(self) -> set[str] | None:
        """After the read: the parameters that needed no gradient when they were saved, as far as
        this rank has read the files of those who saved them. None: they do not say it."""
        notes = [header.metadata_in(bytes(raw), FROZEN_KEY) for raw in self._kept]
        known = [json.loads(note) for note in notes if note is not None]
        return set().union(*known) if known else None

    def _add_headers(self) -> None:
        """Of the files that are read. A header with notes is kept: that of the own file of a rank
        whose files are read. Its other files may be of an earlier step."""
        own = {file_name(*(file_of(name) or (0, 0))[:2]) for name in self._files if self._notes}
        for entry in self._saved.files:
            where: dict[str, Any] = {}
            if entry.name in own:
                self._files.setdefault(entry.name, (len(self._files), entry.bytes))
                self._kept.append(ctypes.create_string_buffer(entry.data_begin))
                where = {"address": ctypes.addressof(self._kept[-1]), "owner": self._kept[-1]}
            if entry.name in self._files:
                number, _ = self._files[entry.name]
                self.segments.add(number, 0, entry.data_begin, entry.header_sums, "", **where)


def _all_of(chunk: PlacedChunk) -> Range:
    return Range(chunk.begin, chunk.end, chunk.sums, 0)


def _unaligned(name: str, chunk: PlacedChunk, item_bytes: int) -> ManifestError:
    return ManifestError(
        "a tensor of a step does not begin at a multiple of its element's size",
        facts={
            "tensor": name,
            "file": chunk.file,
            "expected": f"a multiple of {item_bytes} bytes",
            "got": chunk.begin,
        },
    )
