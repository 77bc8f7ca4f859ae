"""What the file of a subgroup looks like: one that a step of a checkpoint can have as it is.

It is a safetensors file. After the header come the parts of the subgroup, each from a page on, and
between them padding, as tensors of bytes. Its checksums are those that a step lists: of the header
and of every tensor, cut at each BLOCK_BYTES of the file (docs/format.md).

Invariants: the form of a subgroup follows from its parameters and its name, so every generation has
the same header. Each piece that is moved begins on a page. Padding is zero, and nobody reads it.
Not here: moving the bytes (store), which generation is whose (pipeline), the step (layout/stored).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import compress

import torch

from statehold import _core
from statehold.encoding import header
from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, metadata_of, pieces
from statehold.layout.stored import SUM_BYTES, StoredFile
from statehold.offload.subgroups import ITEM_BYTES, Part, Span, Subgroup

__all__ = ["Content", "FileForm", "are_boxes", "tensor_name"]


def tensor_name(optimizer: str, field: str, parameter: str) -> str:
    """What files call a field of a parameter."""
    return f"{optimizer}.{field}.{parameter}"


def are_boxes(shape: Sequence[int], spans: Sequence[Span]) -> bool:
    """Whether each of these spans of a parameter is one box of it, as a step wants it."""
    return all(len(list(boxes_of_run(shape, span.begin, span.end))) == 1 for span in spans)


class Content(Enum):
    """What a piece of a file holds."""

    HEADER = 0
    PART = 1
    PADDING = 2


@dataclass(frozen=True)
class Piece:
    """The bytes [begin, end) of a file, which have a checksum."""

    begin: int
    end: int
    content: Content


@dataclass(frozen=True)
class FileForm:
    """The form of the files of one subgroup. optimizer: a name that no other optimizer has.

    names, shapes: of all parameters.
    """

    subgroup: Subgroup
    optimizer: str
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]

    @property
    def data_begin(self) -> int:
        """Where the subgroup begins in the file."""
        return len(self._header)

    @property
    def nbytes(self) -> int:
        """Of a file."""
        return self.data_begin + self.subgroup.nbytes

    @cached_property
    def header(self) -> torch.Tensor:
        """The bytes before the subgroup."""
        return torch.frombuffer(bytearray(self._header), dtype=torch.uint8)

    def pieces(self, content: Content) -> list[Piece]:
        """In the order of the bytes."""
        return [piece for piece in self._pieces if piece.content is content]

    def with_fixed_sums(self, sums: bytes) -> bytes:
        """The checksums of a file from those of the pieces of its parts."""
        own, fixed = _each(sums), iter(self._fixed_sums)
        are_own = [piece.content is Content.PART for piece in self._pieces]
        return b"".join(next(own if is_own else fixed) for is_own in are_own)

    def without_fixed_sums(self, sums: bytes) -> bytes:
        """The way back."""
        are_own = [piece.content is Content.PART for piece in self._pieces]
        return b"".join(compress(_each(sums), are_own))

    def stored(self, path: str, sums: bytes) -> StoredFile:
        """A generation as a step takes it."""
        begins, at = [], self.data_begin
        for spec in self._specs:
            begins.append(at)
            at += spec.nbytes
        return StoredFile(path, self.nbytes, self.data_begin, self._specs, tuple(begins), sums)

    @cached_property
    def _specs(self) -> tuple[TensorSpec, ...]:
        """The parts, and the padding behind each, in the order of the bytes."""
        found = []
        for place, (part, end) in enumerate(self._parts()):
            found.append(self._spec(part))
            if gap := end - part.end_bytes:
                name = f"{self.optimizer}.padding.{self.subgroup.index}.{place}"
                found.append(TensorSpec(name, "U8", (gap,), gap))
        return tuple(found)

    def _parts(self) -> Iterator[tuple[Part, int]]:
        """Each part, and where the next one begins, in bytes of the subgroup."""
        parts = self.subgroup.parts
        ends = [part.begin * ITEM_BYTES for part in parts[1:]] + [self.subgroup.nbytes]
        yield from zip(parts, ends, strict=True)

    def _spec(self, part: Part) -> TensorSpec:
        span, shape = part.span, self.shapes[part.span.parameter]
        boxes = list(boxes_of_run(shape, span.begin, span.end))
        if len(boxes) != 1:  # no step takes it
            shape, boxes = (math.prod(shape),), [Box((span.begin,), (span.numel,))]
        (box,) = boxes
        name = tensor_name(self.optimizer, part.field, self.names[span.parameter])
        nbytes = ITEM_BYTES * box.numel
        return TensorSpec(
            name, "F32", box.shape, nbytes, global_shape=tuple(shape), offsets=box.offsets
        )

    @cached_property
    def _header(self) -> bytes:
        entries, at = [], 0
        for spec in self._specs:
            entries.append(header.Entry(spec.name, spec.dtype, spec.shape, at, at + spec.nbytes))
            at += spec.nbytes
        return header.encode(entries, metadata_of(self._specs, step=0, world_size=1))

    @cached_property
    def _pieces(self) -> list[Piece]:
        """All bytes of the file."""
        found, begin = list[Piece](), self.data_begin

        def add(low: int, high: int, content: Content) -> None:
            cuts = pieces(low, high - low, BLOCK_BYTES)
            found.extend(Piece(*cut, content) for cut in cuts)

        add(0, begin, Content.HEADER)
        for part, next_begin in self._parts():
            add(begin + part.begin_bytes, begin + part.end_bytes, Content.PART)
            add(begin + part.end_bytes, begin + next_begin, Content.PADDING)
        return found

    @cached_property
    def _fixed_sums(self) -> list[bytes]:
        """Of the header and of the padding."""
        fixed = [piece for piece in self._pieces if piece.content is not Content.PART]
        return [
            _core.xxh3_64(
                self._header[piece.begin : piece.end]
                if piece.content is Content.HEADER
                else bytes(piece.end - piece.begin)
            ).to_bytes(SUM_BYTES, "little")
            for piece in fixed
        ]


def _each(sums: bytes) -> Iterator[bytes]:
    return (sums[at : at + SUM_BYTES] for at in range(0, len(sums), SUM_BYTES))
