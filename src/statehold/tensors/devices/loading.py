"""The device copies of one restore, on the thread that restores.

Bytes go to their places as they arrive. A run of at least SMALL_BYTES that a place takes as it is
is one copy from the buffer. All else is copied to scratch memory on the device, as few long runs of
the buffer, and from there to its places: small tensors by one call, boxes by one copy each.
Invariants: scratch is taken and used on the side stream only. A device has at most as much of it as
a buffer, for as long as the restore runs. A device that has no memory left gets less of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from statehold.tensors.devices.backends import Stream
from statehold.tensors.devices.elements import SCRATCH_BYTES_MIN, SMALL_BYTES
from statehold.tensors.devices.jobs import LentT, Piece, ReadyJob
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.placing import ChunkPlace
from statehold.tensors.devices.relay import relay
from statehold.tensors.storable import device_of, without_flags

# What lies between two runs is copied with them, up to this many bytes.
GAP_BYTES = 64 << 10
# Runs keep their alignment in scratch memory up to this one; no element is wider.
ALIGNMENT = 16


class _Part(NamedTuple):
    """Bytes of a buffer, and the place that they belong to: there they begin at byte `low` of the
    chunk."""

    at: int
    nbytes: int
    place: ChunkPlace
    low: int


class _Run(NamedTuple):
    """The bytes [begin, begin + nbytes) of a buffer, aligned, and the parts in it."""

    begin: int
    nbytes: int
    parts: list[_Part]


def load(job: ReadyJob[LentT], places: Mapping[int, ChunkPlace], mover: Mover) -> None:
    """Empty every buffer of a read into the places, by segment. What the current streams are given
    from then on comes after it."""
    loading = _Loading(places)
    relay(
        mover,
        job.next_readies,
        lambda ready: mover.move(ready, loading.scatter),
        job.release_all,
        lambda: job.ready_left,
    )
    mover.make_current_wait()


class _Loading:
    """What is enqueued for each buffer."""

    def __init__(self, places: Mapping[int, ChunkPlace]) -> None:
        self._places = places
        self._scratch: dict[torch.device, torch.Tensor] = {}

    @torch.inference_mode()  # without it, torch refuses to change inference tensors
    def scatter(
        self, stream: Stream, parts: Sequence[tuple[torch.Tensor, Sequence[Piece]]]
    ) -> None:
        """Enqueue the copies of some pieces of buffers, all to one device, whose stream is
        current."""
        for host, pieces in parts:
            self._scatter(host, pieces)

    def _scatter(self, host: torch.Tensor, pieces: Sequence[Piece]) -> None:
        together: list[_Part] = []
        for part in self._parts(pieces):
            if part.place.is_plain and part.nbytes >= SMALL_BYTES:
                _copy_alone(host, part)
            else:
                together.append(part)
        if together:
            self._copy(host, sorted(together, key=itemgetter(0)))

    def _parts(self, pieces: Sequence[Piece]) -> Iterator[_Part]:
        """What is wanted of the pieces, which are whole blocks of the grid."""
        for segment, offset, at, nbytes in pieces:
            place = self._places[segment]
            begin = place.begin + offset
            low, high = max(begin, place.low), min(begin + nbytes, place.high)
            if low < high:
                yield _Part(at + low - begin, high - low, place, low)

    def _copy(self, host: torch.Tensor, parts: Sequence[_Part]) -> None:
        """Copy parts, which are in order, by way of scratch memory."""
        runs = list(_runs(parts))
        nbytes = sum(run.nbytes for run in runs)
        try:
            scratch = self._scratch_of(parts[0].place.target, nbytes, host.numel())
        except torch.OutOfMemoryError:
            self._copy_apart(host, parts)
        else:
            _copy_runs(host, runs, scratch)

    def _copy_apart(self, host: torch.Tensor, parts: Sequence[_Part]) -> None:
        """Copy parts with less scratch, or none. Inside the handler of the error that said so."""
        for part in parts:
            at, nbytes, place, low = part
            if place.is_plain:
                _copy_alone(host, part)
            elif len(parts) > 1:
                self._copy(host, [part])
            elif nbytes < SCRATCH_BYTES_MIN:
                raise
            else:
                half = nbytes // 2 // place.dtype.itemsize * place.dtype.itemsize
                self._copy(host, [_Part(at, half, place, low)])
                self._copy(host, [_Part(at + half, nbytes - half, place, low + half)])

    def _scratch_of(self, beside: torch.Tensor, nbytes: int, bytes_max: int) -> torch.Tensor:
        """Memory on the device of a tensor. It belongs to the stream that is current there, whose
        work with it stays in order."""
        device = device_of(beside)
        if device not in self._scratch or self._scratch[device].numel() < nbytes:
            self._scratch.pop(device, None)  # before there is another one
            # Few different sizes: what an allocator has kept of one is of use for the next.
            size = max(nbytes, min(1 << (nbytes - 1).bit_length(), bytes_max))
            self._scratch[device] = without_flags(beside).new_empty(size, dtype=torch.uint8)
        return self._scratch[device]


def _copy_alone(host: torch.Tensor, part: _Part) -> None:
    own = part.place.bytes_at(part.low, part.nbytes)
    own.copy_(host.narrow(0, part.at, part.nbytes), non_blocking=True)


def _copy_runs(host: torch.Tensor, runs: Sequence[_Run], scratch: torch.Tensor) -> None:
    into: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    base = 0
    for run in runs:
        there = scratch.narrow(0, base, run.nbytes)
        there.copy_(host.narrow(0, run.begin, run.nbytes), non_blocking=True)
        base += run.nbytes
        for at, count, place, low in run.parts:
            bytes_there = there.narrow(0, at - run.begin, count)
            if place.is_plain:
                into.append(place.bytes_at(low, count))
                found.append(bytes_there)
            else:
                place.take(bytes_there, low)
    if into:
        torch._foreach_copy_(into, found)


def _runs(parts: Sequence[_Part]) -> Iterator[_Run]:
    """The runs of the buffer that hold the parts, which are in order."""
    begin = end = 0
    together: list[_Part] = []
    for part in parts:
        if together and part.at - end > GAP_BYTES:
            yield _Run(begin, _aligned(end - begin + ALIGNMENT - 1), together)
            together = []
        if not together:
            begin = end = _aligned(part.at)
        together.append(part)
        end = max(end, part.at + part.nbytes)
    yield _Run(begin, _aligned(end - begin + ALIGNMENT - 1), together)


def _aligned(nbytes: int) -> int:
    return nbytes // ALIGNMENT * ALIGNMENT
