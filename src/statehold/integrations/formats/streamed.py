"""A tensor that is not in memory: its dtype, its shape, and its bytes part by part.

Owns: tensors that lie in files of others, whole, as views, or in boxes; the same of values.
Invariants: parts are bytes in C order, at most PART_BYTES each, and valid until the next one is
asked for. A tensor of a file takes no memory but one part: what was mapped is forgotten after each.
A chunk is verified when its bytes are used for the first time.
Two places of a tree that hold one object hold one tensor.
Not here: tensors of steps (step_writer), who writes the bytes (partial).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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


@dataclass(frozen=True, eq=False)
class StreamedValue:
    """A value that is no tensor, and is read when somebody asks for it."""

    read: Callable[[], Any]


def read_now(leaf: Any) -> Any:
    """A leaf of a tree; of a value that is not read yet, what it is."""
    return leaf.read() if isinstance(leaf, StreamedValue) else leaf


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
        verify: Callable[[], None] = lambda: None,
    ) -> Streamed:
        """A tensor from byte `begin` on; C order without `stride`, which counts elements.

        verify: called before the bytes are used for the first time.
        """
        values = self._view(dtype, shape, begin, stride)

        def look() -> _Place:
            verify()
            return values, self

        return assembled(dtype, shape, [StreamedChunk(Box.whole(shape), look)])

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

    def crc32(self, begin: int, nbytes: int) -> int:
        """The checksum of the bytes [begin, begin + nbytes), as archives have it."""
        crc = 0
        for at in range(begin, begin + nbytes, PART_BYTES):
            part = self._view(torch.uint8, [min(PART_BYTES, begin + nbytes - at)], at, None)
            crc = zlib.crc32(memory_of(part), crc)
            self.forget()
        return crc

    def forget(self) -> None:
        """Give the memory of all pages back; they are read again when they are used."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def raise_unaligned(path: str, begin: int) -> None:
    facts = {"file": path, "begins at": begin}
    raise CorruptionError("a tensor of a checkpoint is not aligned to its elements", facts=facts)


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


_Place = tuple[torch.Tensor, MappedFile | None]


class StreamedChunk:
    """A box of a tensor that lies in a file, or in memory (file: None).

    look: finds the values, and the file that they lie in, when they are used for the first time.
    The values have the shape of the box, or (raw) one more dimension with the bytes of each
    element.
    """

    def __init__(self, box: Box, look: Callable[[], _Place]) -> None:
        self.box = box
        self._look = look

    @cached_property
    def place(self) -> _Place:
        return self._look()

    @property
    def values(self) -> torch.Tensor:
        return self.place[0]

    @property
    def file(self) -> MappedFile | None:
        return self.place[1]

    @property
    def is_raw(self) -> bool:
        return self.values.dim() > len(self.box.shape)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, which are of `dtype`, in the shape of the box."""
        if not self.is_raw:
            return self.values
        return self.values.contiguous().view(dtype).squeeze(-1)

    def at(self, offsets: tuple[int, ...]) -> StreamedChunk:
        """The same values as a box at `offsets`."""
        return StreamedChunk(Box(offsets, self.box.shape), self._look)

    def run(self, begin: int, end: int, at: int) -> StreamedChunk:
        """The elements [begin, end) of a chunk of one dimension, as a chunk from `at` on."""

        def look() -> _Place:
            values, file = self.place
            return values[begin:end], file

        return StreamedChunk(Box((at,), (end - begin,)), look)


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
    chunk = StreamedChunk(Box.whole(values.shape), lambda: (values, file))
    return assembled(values.dtype, values.shape, [chunk])


def in_memory(tensor: Streamed, done: Callable[[int], None] = lambda nbytes: None) -> torch.Tensor:
    """The tensor itself."""
    memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    at = 0
    for part in tensor.parts():
        memory[at : at + part.numel()] = part
        at += part.numel()
    done(tensor.nbytes)
    return memory.view(tensor.dtype).view(tensor.shape)


def converted(tensor: Streamed, dtype: torch.dtype) -> Streamed:
    """The same values in another dtype, converted as `to()` does, part by part."""
    if tensor.dtype == dtype:
        return tensor

    def parts() -> Iterator[torch.Tensor]:
        for part in tensor.parts():
            yield part.view(tensor.dtype).to(dtype).view(torch.uint8)

    return Streamed(dtype, tensor.shape, parts)
