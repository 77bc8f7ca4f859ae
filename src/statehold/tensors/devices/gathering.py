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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from statehold.layout.flat import boxes_of_run
from statehold.tensors.devices.backends import Stream
from statehold.tensors.devices.elements import SCRATCH_BYTES_MIN, SMALL_BYTES, as_moved, flat
from statehold.tensors.devices.jobs import Copies, Piece
from statehold.tensors.devices.mover import Mover
from statehold.tensors.storable import part_of


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
            tensor = self._tensors[segment]
            is_alone = nbytes >= SMALL_BYTES and tensor.is_contiguous()
            if run and (is_alone or end != at):
                self._copy_run(host, run)
                run = []
            if is_alone:
                self._alone.append(_Alone(tensor, host, offset, at, nbytes))
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
        packed = _Packed(scratch)
        for segment, offset, at, nbytes in run:
            packed.add(self._tensors[segment], offset, at - begin, nbytes)
        packed.end()
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


def _by_address(alone: Sequence[_Alone]) -> Copies:
    return Copies(
        array("Q", [each.host.data_ptr() + each.at for each in alone]),
        array("Q", [each.tensor.data_ptr() + each.offset for each in alone]),
        array("Q", [each.nbytes for each in alone]),
    )


def _copy_alone(each: _Alone) -> None:
    tensor, host, offset, at, nbytes = each
    host[at : at + nbytes].copy_(flat(tensor, offset, nbytes), non_blocking=True)


class _Packed:
    """Scratch that is filled from its begin to its end, neighbours of one dtype in one call."""

    def __init__(self, scratch: torch.Tensor) -> None:
        self._scratch = scratch
        self._begin = self._end = 0
        self._parts: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, offset: int, at: int, nbytes: int) -> None:
        """The next bytes."""
        if not tensor.is_contiguous():
            self.end()
            bring(tensor, offset, self._scratch[at : at + nbytes])
            self._begin = at + nbytes
            return
        part = _flat_elements(tensor, offset, nbytes)
        if self._parts and self._parts[0].dtype is not part.dtype:
            self.end()
        self._parts.append(part)
        self._end = at + nbytes

    def end(self) -> None:
        """Enqueue what was added."""
        if self._parts:
            to = self._scratch[self._begin : self._end].view(self._parts[0].dtype)
            torch.cat(self._parts, out=to)
            self._begin, self._parts = self._end, []


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


def _flat_elements(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Elements of a contiguous tensor, as they are moved."""
    whole = as_moved(tensor).view(-1)
    size = whole.element_size()
    if whole.numel() * size == nbytes:
        return whole
    return whole[offset // size : (offset + nbytes) // size]
