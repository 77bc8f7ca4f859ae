"""Bytes of device tensors, brought together in few launches: what a buffer gets of a state.

Invariants: no tensor is cloned, whatever its strides. What does not lie in a buffer as it lies in
memory is brought together in scratch on the device first, as are runs of small pieces, so that one
copy to the host takes them all. The scratch of a buffer is no larger than the buffer; it is taken
and given back on the side stream, so the allocator uses the same memory for the next one. Runs on
the stream that is current (Mover); reads no element on the host.
Not here: which pieces a buffer has (the engine), streams (mover).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from statehold.layout.flat import boxes_of_run
from statehold.tensors.devices.backends import Stream
from statehold.tensors.devices.elements import SCRATCH_BYTES_MIN, SMALL_BYTES, as_moved, flat
from statehold.tensors.devices.jobs import Copies, Piece
from statehold.tensors.devices.mover import Mover
from statehold.tensors.storable import part_of

_dtype = attrgetter("dtype")
_is_contiguous, _size = torch.Tensor.is_contiguous, torch.Tensor.size


class Gathering:
    """Copies pieces of `tensors`, which go by segment, into buffers. What lies in a buffer as it
    does on the device is copied last, by one call for all of it where the device allows that:
    each call of torch takes the interpreter lock from a program that launches kernels."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], mover: Mover) -> None:
        self._tensors = tensors
        self._mover = mover
        self._alone: list[_Alone] = []

    def enqueue(
        self, stream: Stream, parts: Sequence[tuple[torch.Tensor, Sequence[Piece]]]
    ) -> None:
        """Enqueue the copies into some buffers, on the stream, which is current."""
        self._alone = []
        for host, pieces in parts:
            self._gather(host, pieces)
        backend, call = self._mover.backend, self._mover.call
        if self._alone and call is not None and backend.copies_by_address():
            backend.copy_to_host(stream, _by_address(self._alone), call)
        else:
            for each in self._alone:
                _copy_alone(each)

    def _gather(self, host: torch.Tensor, pieces: Sequence[Piece]) -> None:
        run: list[Piece] = []  # without gaps in the buffer
        end = 0
        for piece in pieces:
            segment, offset, at, nbytes = piece
            is_alone = nbytes >= SMALL_BYTES and self._tensors[segment].is_contiguous()
            if run and (is_alone or end != at):
                self._copy_run(host, run)
                run = []
            if is_alone:
                self._alone.append(_Alone(self._tensors[segment], host, offset, at, nbytes))
            else:
                run.append(piece)
            end = at + nbytes
        if run:
            self._copy_run(host, run)

    def _copy_run(self, host: torch.Tensor, run: Sequence[Piece]) -> None:
        """Copy pieces that follow each other in the buffer."""
        segment, offset, begin, nbytes = run[0]
        first = self._tensors[segment]
        if len(run) == 1 and first.is_contiguous():
            self._alone.append(_Alone(first, host, offset, begin, nbytes))
            return
        end = run[-1][2] + run[-1][3]
        try:
            scratch = first.new_empty(end - begin, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            self._copy_apart(host, run)
            return
        tensors = [self._tensors[piece[0]] for piece in run]
        kinds = list(zip(map(_dtype, tensors), map(_is_contiguous, tensors), strict=True))
        are_alike = kinds.count(kinds[0]) == len(kinds)
        groups = [kinds] if are_alike else [list(group) for _, group in groupby(kinds)]
        at = 0
        for group in groups:
            of_group, is_contiguous = slice(at, at := at + len(group)), group[0][1]
            pieces = run[of_group]
            to = scratch[pieces[0][2] - begin : pieces[-1][2] + pieces[-1][3] - begin]
            _bring_together(tensors[of_group], pieces, to, are_contiguous=is_contiguous)
        host[begin:end].copy_(scratch, non_blocking=True)

    def _copy_apart(self, host: torch.Tensor, run: Sequence[Piece]) -> None:
        """Copy pieces with less scratch, or none. Inside the handler of the error that said so."""
        for piece in run:
            segment, offset, at, nbytes = piece
            tensor = self._tensors[segment]
            if tensor.is_contiguous() or len(run) > 1:
                self._copy_run(host, [piece])
            elif nbytes < SCRATCH_BYTES_MIN:
                raise
            else:
                half = nbytes // 2 // tensor.element_size() * tensor.element_size()
                self._copy_run(host, [(segment, offset, at, half)])
                self._copy_run(host, [(segment, offset + half, at + half, nbytes - half)])


class _Alone(NamedTuple):
    """A contiguous part of a tensor, and its place in a buffer."""

    tensor: torch.Tensor
    host: torch.Tensor
    offset: int
    at: int
    nbytes: int


def _bring_together(
    tensors: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    to: torch.Tensor,
    *,
    are_contiguous: bool,
) -> None:
    """Copy pieces that follow each other, of tensors of one dtype, into `to`: bytes of the device.
    Contiguous ones take one launch."""
    if not are_contiguous:
        for (_, offset, at, nbytes), tensor in zip(pieces, tensors, strict=True):
            bring(tensor, offset, to[at - pieces[0][2] :][:nbytes])
        return
    elements = list(tensors if as_moved(tensors[0]) is tensors[0] else map(as_moved, tensors))
    to = to.view(elements[0].dtype)
    sizes = Counter(map(_size, elements))
    are_whole = sum(count * each.numel() for each, count in sizes.items()) == to.numel()
    # Vectors, and matrices of one width, are joined as they are: a view of each takes longer than
    # all else here. Devices may take a launch for each tensor of many dimensions.
    row, *others = {each[1:] if 0 < len(each) < 3 and each.numel() else None for each in sizes}
    if not are_whole or others or row is None:
        row, elements = torch.Size(()), [each.view(-1) for each in elements]
    if not are_whole:
        size = to.itemsize
        for index, (_, offset, _, nbytes) in enumerate(pieces):
            elements[index] = elements[index][offset // size : (offset + nbytes) // size]
    torch.cat(elements, out=to.view(-1, *row))


def _by_address(alone: Sequence[_Alone]) -> Copies:
    return Copies(
        array("Q", [each.host.data_ptr() + each.at for each in alone]),
        array("Q", [each.tensor.data_ptr() + each.offset for each in alone]),
        array("Q", [each.nbytes for each in alone]),
    )


def _copy_alone(each: _Alone) -> None:
    tensor, host, offset, at, nbytes = each
    host[at : at + nbytes].copy_(flat(tensor, offset, nbytes), non_blocking=True)


def bring(tensor: torch.Tensor, offset: int, to: torch.Tensor) -> None:
    """Copy the bytes from `offset` on, in C order, into `to`: bytes on the device, contiguous and
    aligned as the elements are."""
    nbytes = to.numel()
    if tensor.is_contiguous():
        to.copy_(flat(tensor, offset, nbytes))
        return
    elements = as_moved(tensor)
    size = elements.element_size()
    begin, end = offset // size, (offset + nbytes) // size
    to, at = to.view(elements.dtype), 0
    for box in boxes_of_run(tensor.shape, begin, end):
        to[at : at + box.numel].view(box.shape).copy_(part_of(elements, box))
        at += box.numel
