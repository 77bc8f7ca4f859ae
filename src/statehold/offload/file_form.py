"""Where everything is in the file of a subgroup: a step of a checkpoint can have it as it is.

It is a safetensors file. At its beginning is room for a header, which a save writes (head). Then
come the parts of the subgroup, each from a page on, and between them padding.

Invariants: the form of a subgroup is the same for every generation. Each piece that is moved begins
on a page. A piece that has a checksum is cut at each BLOCK_BYTES of the file, as a step wants it
(docs/format.md). Padding is zero, and nobody reads it.
Not here: moving the bytes (store), which generation is whose (pipeline), the header (head).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from statehold.layout.plan import BLOCK_BYTES, pieces
from statehold.offload.subgroups import ITEM_BYTES, FieldPart, Subgroup

Piece = tuple[int, int]  # the bytes [begin, end) of a file


@dataclass(frozen=True)
class FileForm:
    """The form of the files of one subgroup. head_bytes: in whole pages."""

    subgroup: Subgroup
    head_bytes: int

    @property
    def data_begin(self) -> int:
        """Where the subgroup begins in the file."""
        return self.head_bytes

    @property
    def nbytes(self) -> int:
        """Of a file."""
        return self.data_begin + self.subgroup.nbytes

    @cached_property
    def head(self) -> Sequence[Piece]:
        """The pieces of the header."""
        return list(pieces(0, self.head_bytes, BLOCK_BYTES))

    @cached_property
    def parts(self) -> Sequence[Piece]:
        """The pieces of the parts, in the order of their bytes."""
        cuts = [self.cut(part.begin_bytes, part.end_bytes) for part, _ in self.layout]
        return list(chain.from_iterable(cuts))

    @cached_property
    def padding(self) -> Sequence[Piece]:
        """The pieces between them."""
        cuts = [self.cut(part.end_bytes, end) for part, end in self.layout]
        return list(chain.from_iterable(cuts))

    @property
    def layout(self) -> Iterator[tuple[FieldPart, int]]:
        """Each part, and where the next one begins, in bytes of the subgroup."""
        parts = self.subgroup.parts
        ends = [part.begin * ITEM_BYTES for part in parts[1:]] + [self.subgroup.nbytes]
        yield from zip(parts, ends, strict=True)

    def cut(self, begin: int, end: int) -> Sequence[Piece]:
        """The pieces of these bytes of the subgroup."""
        return list(pieces(self.data_begin + begin, end - begin, BLOCK_BYTES))
