"""The bytes of a tensor of a step, verified, a bounded part at a time.

Owns: reading a range of a chunk by its pieces; assembling a box of a tensor from its chunks.
Invariants: no byte is returned before its checksum was verified. Memory is PART_BYTES for each
tensor, or, if a chunk is wider, the range between the first and the last element of a row.
Not here: numbers (numbers), the speed of the device (checking).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statehold.cli.checking import ScannedSpan, scan_bytes
from statehold.cli.numbers import bits_of, numpy
from statehold.encoding.header import DTYPE_BITS
from statehold.errors import ChecksumError, CorruptionError
from statehold.layout.layout import Box
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold.cli.numbers import Array
    from statehold.format.saved import PlacedChunk, SavedStep

PART_BYTES = 8 * MiB


class Content:
    """Reads tensors of one step in `directory`."""

    def __init__(self, saved: SavedStep, directory: str) -> None:
        self.saved = saved
        self._directory = directory

    def chunks(self, name: str) -> list[PlacedChunk]:
        """All of a tensor, in the order of the step."""
        return self.saved.chunks(name, Box.whole(self.saved.tensors[name].shape))

    def range(self, name: str, chunk: PlacedChunk, begin: int, end: int) -> bytearray:
        """The bytes [begin, end) of the file that holds the chunk. Raises CorruptionError."""
        block = self.saved.block_bytes
        low = max(chunk.begin, begin // block * block)
        high = min(chunk.end, -(-end // block) * block)
        path = f"{self._directory}/{chunk.file}"
        whole = ScannedSpan(
            path, chunk.file_bytes, chunk.begin, chunk.end, chunk.sums, block, name, 0
        )
        data = bytearray()
        for piece, bad in scan_bytes(whole.part(low, high)):
            if bad is not None:
                facts = {"tensor": name, "file": path, "bytes": f"[{bad.begin}, {bad.end})"}
                if bad.got is None:
                    raise CorruptionError("bytes of a step cannot be read: " + bad.why, facts=facts)
                facts["xxh3-64"] = f"expected {bad.expected}, got {bad.got}"
                hint = "statehold verify lists all damage"
                raise ChecksumError(
                    "bytes on disk do not match their checksum", facts=facts, hint=hint
                )
            data += piece
        return data[begin - low : end - low]

    def chunk_parts(self, name: str, chunk: PlacedChunk) -> Iterator[bytearray]:
        """All bytes of a chunk, whole elements at a time."""
        for begin in range(chunk.begin, chunk.end, PART_BYTES):
            yield self.range(name, chunk, begin, min(begin + PART_BYTES, chunk.end))

    def box(self, name: str, box: Box) -> Array:
        """The elements of a box, as bits."""
        np = numpy()
        dtype = self.saved.tensors[name].dtype
        item = DTYPE_BITS[dtype] // 8
        found: Array = np.empty(box.shape, f"<u{item}")
        for chunk in self.saved.chunks(name, box):
            common = chunk.box.intersection(box)
            if common is None:
                continue
            steps = [math.prod(chunk.box.shape[dim + 1 :]) for dim in range(len(box.shape))]
            wanted = common.relative_to(chunk.box)
            first = sum(low * step for low, step in zip(wanted.offsets, steps, strict=True))
            last = sum((end - 1) * step for end, step in zip(wanted.ends, steps, strict=True))
            begin = chunk.begin + first * item
            raw = self.range(name, chunk, begin, chunk.begin + (last + 1) * item)
            bits = bits_of(dtype, raw)
            strides = tuple(step * item for step in steps)
            view = np.lib.stride_tricks.as_strided(bits, common.shape, strides, writeable=False)
            target = common.relative_to(box)
            place = tuple(slice(a, b) for a, b in zip(target.offsets, target.ends, strict=True))
            found[place] = view
        return found


def parts_of(box: Box, item_bytes: int) -> Iterator[Box]:
    """Boxes of at most PART_BYTES that make up `box`, cut in its outermost dims."""
    if box.numel * item_bytes <= PART_BYTES:
        if box.numel:
            yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    inner = math.prod(box.shape[dim + 1 :]) * item_bytes
    rows = max(1, PART_BYTES // inner)
    for row in range(0, box.shape[dim], rows):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[dim] += row
        shape[dim] = min(rows, box.shape[dim] - row)
        yield from parts_of(Box(tuple(offsets), tuple(shape)), item_bytes)
