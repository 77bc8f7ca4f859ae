"""A tensor that is not in memory: its dtype, its shape, and its bytes part by part.

Owns: tensors that lie in files of others, whole, as views, or in boxes.
Invariants: parts are bytes in C order, at most PART_BYTES each, and valid until the next one is
asked for. A tensor of a file takes no memory but one part: what was mapped is forgotten after each.
Two places of a tree that hold one object hold one tensor.
Not here: tensors of steps (step_writer), who writes the bytes (partial).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from statehold.errors import CorruptionError, MissingFileError, storage_error
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.units import MiB

PART_BYTES = 16 * MiB


@dataclass(frozen=True, eq=False)
class Streamed:
    """A tensor and the way to its bytes.

    parts: called once for each pass over the bytes; yields flat tensors of uint8.
    chunks: where a tensor of others lies.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]
    chunks: Sequence[StreamedChunk] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def memory_of(part: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor of uint8, while it lives."""
    return memoryview((ctypes.c_char * part.numel()).from_address(part.data_ptr())).cast("B")


def runs(dtype: torch.dtype, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements [begin, end) of each part."""
    end, size = math.prod(shape), PART_BYTES // dtype.itemsize
    for begin in range(0, end, size):
        yield begin, min(end, begin + size)


class MappedFile:
    """The bytes [begin, end) of a file of others, mapped privately. Nobody may cut the file."""

    def __init__(self, path: str, nbytes: int | None = None) -> None:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if nbytes is not None and size < nbytes:
                    facts = {"file": path, "expected": f"{nbytes} bytes", "got": f"{size} bytes"}
                    raise CorruptionError("a file of a checkpoint is cut", facts=facts)
                self._map = (
                    mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else None
                )
        except FileNotFoundError as error:
            raise MissingFileError("a checkpoint lacks a file", facts={"file": path}) from error
        except OSError as error:
            raise storage_error("read a checkpoint", error.errno or 0, path) from error
        self.path, self.size = path, size

    def streamed(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        begin: int,
        stride: Sequence[int] | None = None,
    ) -> Streamed:
        """A tensor from byte `begin` on; C order without `stride`, which counts elements."""
        values = self._view(dtype, shape, begin, stride)
        return assembled(dtype, shape, [StreamedChunk(Box.whole(shape), values, self)])

    def _view(
        self, dtype: torch.dtype, shape: Sequence[int], begin: int, stride: Sequence[int] | None
    ) -> torch.Tensor:
        steps = _dense(shape) if stride is None else stride
        if not math.prod(shape) or self._map is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        nbytes = (last + 1) * dtype.itemsize
        if begin < 0 or begin + nbytes > self.size:
            got = f"a tensor at [{begin}, {begin + nbytes})"
            facts = {"file": self.path, "expected": f"at most {self.size} bytes", "got": got}
            raise CorruptionError("a tensor of a checkpoint lies outside its file", facts=facts)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin)
        if begin % dtype.itemsize:  # no processor promises to read that as elements
            strides = [step * dtype.itemsize for step in steps]
            return flat.as_strided((*shape, dtype.itemsize), (*strides, 1))
        return flat.view(dtype).as_strided(tuple(shape), tuple(steps))

    def forget(self) -> None:
        """Give the memory of all pages back; they are read again when they are used."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def raise_unaligned(path: str, begin: int) -> None:
    facts = {"file": path, "begins at": begin}
    raise CorruptionError("a tensor of a checkpoint is not aligned to its elements", facts=facts)


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


@dataclass(frozen=True)
class StreamedChunk:
    """A box of a tensor that lies in a file, or in memory (file: None).

    `values` has its shape, or (raw) one more dimension with the bytes of each element.
    """

    box: Box
    values: torch.Tensor
    file: MappedFile | None = None

    @property
    def is_raw(self) -> bool:
        return self.values.dim() > len(self.box.shape)


def assembled(
    dtype: torch.dtype, shape: Sequence[int], chunks: Sequence[StreamedChunk]
) -> Streamed:
    """A tensor of boxes, which cover it. `shape` may differ from that of the boxes if it has as
    many elements in C order: `chunks` of one dimension are runs."""
    ordered = sorted(chunks, key=lambda chunk: chunk.box.offsets)
    inner = (math.prod(shape),) if _are_runs(ordered, shape) else tuple(shape)

    def parts() -> Iterator[torch.Tensor]:
        memory = torch.empty(
            min(PART_BYTES, math.prod(shape) * dtype.itemsize), dtype=torch.uint8, device="cpu"
        )
        for begin, end in runs(dtype, shape):
            part = memory[: (end - begin) * dtype.itemsize]
            _fill(part.view(dtype), inner, begin, end, ordered)
            yield part

    return Streamed(dtype, tuple(shape), parts, ordered)


def _are_runs(chunks: Sequence[StreamedChunk], shape: Sequence[int]) -> bool:
    return bool(chunks) and len(chunks[0].box.shape) == 1 != len(shape)


def _fill(
    memory: torch.Tensor,
    shape: tuple[int, ...],
    begin: int,
    end: int,
    chunks: Sequence[StreamedChunk],
) -> None:
    at, used = 0, set[MappedFile]()
    for box in boxes_of_run(shape, begin, end):
        target = memory[at : at + box.numel].view(box.shape)
        at += box.numel
        for chunk in chunks:
            common = box if not box.shape else chunk.box.intersection(box)
            if common is not None:
                inner = part_of(target, common.relative_to(box))
                inner = inner.unsqueeze(-1).view(torch.uint8) if chunk.is_raw else inner
                inner.copy_(part_of(chunk.values, common.relative_to(chunk.box)))
                used |= {chunk.file} if chunk.file else set()
    for file in used:
        file.forget()


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor, as a view."""
    return tensor[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))]


def whole(values: torch.Tensor, file: MappedFile | None = None) -> Streamed:
    """A tensor in one piece, in a file or in memory."""
    return assembled(
        values.dtype, values.shape, [StreamedChunk(Box.whole(values.shape), values, file)]
    )


def converted(tensor: Streamed, dtype: torch.dtype) -> Streamed:
    """The same values in another dtype, converted as `to()` does, part by part."""
    if tensor.dtype == dtype:
        return tensor

    def parts() -> Iterator[torch.Tensor]:
        for part in tensor.parts():
            yield part.view(tensor.dtype).to(dtype).view(torch.uint8)

    return Streamed(dtype, tensor.shape, parts)
