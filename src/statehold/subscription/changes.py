"""Which pieces of a tensor differ between two steps, by their checksums. Pure.

Invariants: a piece that is left out has the same bytes, at the same place of the tensor, in both
steps. Pieces are compared only if both steps cut the chunk at the same elements: the same box, and
the same distance to the grid of the file. Otherwise all pieces of the chunk count as different.
Not here: which steps are compared (preparing), the bytes (spare).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from statehold.layout.ranges import SUM_DIGITS, summed_pieces

if TYPE_CHECKING:
    from statehold.format.saved import PlacedChunk
    from statehold.layout.layout import Box


class ChangedPiece(NamedTuple):
    """The bytes [begin, end) of a file of a step, and their checksum in hexadecimal digits."""

    file: str
    begin: int
    end: int
    sum: str
    file_bytes: int


class KnownTensor(NamedTuple):
    """The chunks of a tensor in a step, by their boxes, and the grid of its checksums."""

    chunks: Mapping[Box, PlacedChunk]
    block_bytes: int

    @classmethod
    def of(cls, chunks: Sequence[PlacedChunk], block_bytes: int) -> KnownTensor:
        return cls({chunk.box: chunk for chunk in chunks}, block_bytes)


def changed_pieces(
    chunk: PlacedChunk, block_bytes: int, known: KnownTensor | None
) -> Iterator[ChangedPiece]:
    """The pieces of a chunk whose bytes differ from what is known; None: nothing is."""
    before = _comparable(chunk, block_bytes, known)
    if before == chunk.sums:
        return
    cut = summed_pieces(chunk.begin, chunk.end, chunk.sums, block_bytes)
    for index, (begin, end, digits) in enumerate(cut):
        at = index * SUM_DIGITS
        if before is None or before[at : at + SUM_DIGITS] != digits:
            yield ChangedPiece(chunk.file, begin, end, digits, chunk.file_bytes)


def _comparable(chunk: PlacedChunk, block_bytes: int, known: KnownTensor | None) -> str | None:
    """The checksums of the same pieces before; None if they were other pieces."""
    before = known.chunks.get(chunk.box) if known and known.block_bytes == block_bytes else None
    if before is None or before.end - before.begin != chunk.end - chunk.begin:
        return None
    return before.sums if (before.begin - chunk.begin) % block_bytes == 0 else None
