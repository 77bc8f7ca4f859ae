"""Boxes of chunks -> the tensors that a planner shows, read and verified by the engine.

Owns: what is read straight into its place, and what goes through memory of its own.
Holds: nothing is reported as read before its checksum was right; a box costs the pieces that hold
it, not its chunk; memory beside the targets is at most WAVE_BYTES and one item.
Not here: which chunk has what (saved), what is asked for (the planner).

Straight: host tensors of the saved dtype. Others (on a device, or of another dtype, which torch's
readers convert as well) are read into host memory first, in waves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from statehold import _core
from statehold.dcp.machine import Machine
from statehold.planning.layout import Box
from statehold.planning.ranges import ranges
from statehold.reads import FLAG_SHARED, check_blocks, mismatch_error
from statehold.state.tensors import is_external, is_view_of_other_values, overlaps_itself
from statehold.steps.entries import sums_to_bytes
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import BoxTarget, Fs
    from statehold.steps.entries import FileEntry
    from statehold.steps.saved import PlacedChunk, SavedStep

WAVE_BYTES = 256 * MiB
_HINT = "load an older checkpoint; the state that was being loaded is incomplete"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`box` of a chunk, counted from the chunk's first element, goes to `target`.

    `shape` is that of the chunk, in elements of `dtype`; `shared`: other processes want it, too.
    """

    name: str
    chunk: PlacedChunk
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    target: torch.Tensor
    shared: bool = False

    @property
    def is_straight(self) -> bool:
        target = self.target
        return (
            target.dtype == self.dtype
            and not is_external(target)
            and not is_view_of_other_values(target)
            and not overlaps_itself(target)
        )

    @property
    def extra_bytes(self) -> int:
        return 0 if self.is_straight else self.box.numel * self.dtype.itemsize


def read(machine: Machine, directory: str, saved: SavedStep, wanted: Iterable[Wanted]) -> None:
    """Fill every target. Raises ChecksumError, with the tensor, for bytes that are not right."""
    with machine.storage() as fs:
        for wave in _waves(wanted):
            _read_wave(machine, fs, directory, saved, wave)


def _waves(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    wave: list[Wanted] = []
    extra = 0
    for each in wanted:
        if wave and extra + each.extra_bytes > WAVE_BYTES:
            yield wave
            wave, extra = [], 0
        wave.append(each)
        extra += each.extra_bytes
    if wave:
        yield wave


def _read_wave(
    machine: Machine, fs: Fs, directory: str, saved: SavedStep, wave: Sequence[Wanted]
) -> None:
    straight = [each.target if each.is_straight else _host_memory(each) for each in wave]
    job = _Job(directory, saved.block_bytes)
    for each, target in zip(wave, straight, strict=True):
        job.add(each, target)
    job.add_headers(saved.files)
    job.run(machine, fs)
    for each, target in zip(wave, straight, strict=True):
        if target is not each.target:
            each.target.copy_(target)
    # Memory was written behind autograd's back: tell whoever saved these for a backward.
    torch.autograd.graph.increment_version(
        [each.target for each in wave if not each.target.is_inference()]
    )


def _host_memory(wanted: Wanted) -> torch.Tensor:
    return torch.empty(wanted.box.shape, dtype=wanted.dtype)


@dataclass(frozen=True, slots=True)
class _Segment:
    file: int
    begin: int
    nbytes: int
    sums: str
    name: str
    address: int = 0
    box: BoxTarget | None = None  # without one, the bytes are only verified
    flags: int = 0


@dataclass(slots=True)
class _Job:
    """One job of the engine, being put together."""

    directory: str
    block_bytes: int
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # number, bytes
    segments: list[_Segment] = field(default_factory=list)

    def add(self, wanted: Wanted, target: torch.Tensor) -> None:
        chunk, item_bytes = wanted.chunk, wanted.dtype.itemsize
        number, _ = self.files.setdefault(chunk.file, (len(self.files), chunk.file_bytes))
        for part in ranges(
            chunk.begin, chunk.sums, wanted.shape, wanted.box, item_bytes, self.block_bytes
        ):
            skip = part.begin - chunk.begin
            box = (item_bytes, wanted.shape, *_of(wanted.box), target.stride(), skip)
            flags = FLAG_SHARED if wanted.shared else 0
            self.segments.append(
                _Segment(
                    number,
                    part.begin,
                    part.end - part.begin,
                    part.sums,
                    wanted.name,
                    target.data_ptr(),
                    box,
                    flags,
                )
            )

    def add_headers(self, files: Iterable[FileEntry]) -> None:
        """Those of the files that are read, so that all that is read of a file is verified."""
        for entry in files:
            if entry.name in self.files:
                number, _ = self.files[entry.name]
                self.segments.append(_Segment(number, 0, entry.data_begin, entry.header_sums, ""))

    def run(self, machine: Machine, fs: Fs) -> None:
        segments = sorted(self.segments, key=lambda each: (each.file, each.begin, each.nbytes))
        files = [f"{self.directory}/{name}" for name in self.files]
        with machine.engine(fs, sum(each.nbytes for each in segments)) as engine:
            check_blocks(self.block_bytes, engine.buffer_bytes)
            job = engine.read(
                files=files,
                file_bytes=[nbytes for _, nbytes in self.files.values()],
                block_bytes=self.block_bytes,
                file_index=array("q", [each.file for each in segments]),
                begins=array("q", [each.begin for each in segments]),
                sizes=array("q", [each.nbytes for each in segments]),
                addresses=array("Q", [each.address for each in segments]),
                flags=bytes([each.flags for each in segments]),
                strided={},
                sums=sums_to_bytes("".join([each.sums for each in segments])),
                boxes={i: each.box for i, each in enumerate(segments) if each.box is not None},
            )
            try:
                job.wait(None)
            except _core.Mismatch as found:
                segment = segments[found.segment]
                file = files[segment.file]
                raise mismatch_error(found, segment.name, file, _HINT) from None
            finally:
                job.cancel()


def _of(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.shape
