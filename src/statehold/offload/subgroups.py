"""Cuts the state of all parameters into subgroups: the units of placement, transfer and update.

A parameter has fields, such as its two moments: float32 arrays with as many elements as it has. A
**span** is a range of the elements of one parameter. A **subgroup** is a list of spans. Its bytes
lie together, in memory as on storage: field after field, and in a field span after span.

Invariants:
- Every element of every parameter is in one span. All its fields are in the same subgroup, and a
  subgroup has at most one span of a parameter.
- A cut inside a parameter is at a multiple of CUT elements. torch's vector kernel handles the last
  elements of a tensor otherwise than the rest, and such a cut does not change which these are.
- A cut is also at a whole row, unless rows are so long that this would leave subgroups half empty.
  Then it is at a whole row of the rows, and so on, and a span ends where such a row of rows ends.
- Each part begins on a page, so it is written straight from memory. A subgroup has whole pages.
Pure: no tensor, no storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from statehold.errors import refused
from statehold.units import format_bytes

CUT = 64
ITEM_BYTES = 4
PAGE_BYTES = 4096
PAGE_ITEMS = PAGE_BYTES // ITEM_BYTES
# Rows decide where to cut if a subgroup holds at least so many of their multiples.
ROW_CUTS_MIN = 2


@dataclass(frozen=True, slots=True)
class Extent:
    """A parameter, as far as its cuts need it: its shape and fields."""

    shape: tuple[int, ...]
    fields: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> list[int]:
        """The elements of a row, of a row of that, and so on; 1 for a vector."""
        return [math.prod(self.shape[dim:]) for dim in range(1, max(2, len(self.shape)))]


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [begin, end) of a parameter, which is given by its index."""

    parameter: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class FieldPart:
    """One field of one span: the elements [begin, begin + span.numel) of the subgroup."""

    field: str
    span: Span
    begin: int

    @property
    def begin_bytes(self) -> int:
        return self.begin * ITEM_BYTES

    @property
    def end_bytes(self) -> int:
        return (self.begin + self.span.numel) * ITEM_BYTES


@dataclass(frozen=True)
class Subgroup:
    """`index` counts all subgroups of an optimizer."""

    index: int
    spans: tuple[Span, ...]
    fields: tuple[tuple[str, ...], ...]  # by span

    @cached_property
    def parts(self) -> tuple[FieldPart, ...]:
        """In the order of their bytes."""
        names = dict.fromkeys(name for fields in self.fields for name in fields)
        found, begin = [], 0
        for name in names:
            for span, fields in zip(self.spans, self.fields, strict=True):
                if name in fields:
                    found.append(FieldPart(name, span, begin))
                    begin += _aligned(span.numel)
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all parts, in whole pages."""
        items = sum(_aligned(part.span.numel) for part in self.parts)
        return -(-items * ITEM_BYTES // PAGE_BYTES) * PAGE_BYTES

    def parts_in(self, begin_bytes: int, end_bytes: int) -> list[FieldPart]:
        """The parts with bytes in this range of the subgroup."""
        begin, end = begin_bytes // ITEM_BYTES, -(-end_bytes // ITEM_BYTES)
        return [
            part for part in self.parts if part.begin < end and part.begin + part.span.numel > begin
        ]


def cut(
    parameters: Sequence[Extent], subgroup_bytes: int, order: Iterable[int] | None = None
) -> list[Subgroup]:
    """Subgroups of at most `subgroup_bytes`, filled in this order of the parameters."""
    least = max((_bytes(CUT, each) for each in parameters), default=0)
    if subgroup_bytes < least:
        text = "subgroup_bytes is too small: a subgroup holds at least a page of each field"
        raise refused(text, f"at least {format_bytes(least)}", format_bytes(subgroup_bytes))
    found: list[list[Span]] = []
    left = 0
    for index in range(len(parameters)) if order is None else order:
        extent = parameters[index]
        unit, block = _unit(extent, subgroup_bytes)
        begin = 0
        while begin < extent.numel:
            span = _next(Span(index, begin, _end_of(begin, extent, block)), extent, unit, left)
            if span is None:
                found.append([])
                left = subgroup_bytes
                continue
            found[-1].append(span)
            left -= _bytes(span.numel, extent)
            begin = span.end
            if begin < extent.numel:
                left = 0  # the rest goes into other subgroups
    return [
        Subgroup(index, tuple(spans), tuple(parameters[span.parameter].fields for span in spans))
        for index, spans in enumerate(found)
    ]


def strips(spans: Sequence[Span], most: int, threads: int) -> Iterator[list[Span]]:
    """The same elements as lists of spans with at most `most` elements, a multiple of CUT.

    There are as many for each of `threads`, of about the same size. The new cuts are at multiples
    of CUT, too.
    """
    total = sum(span.numel for span in spans)
    count = -(-total // (most * threads)) * threads
    numel = max(CUT, min(most, -(-total // (max(1, count) * CUT)) * CUT))
    strip: list[Span] = []
    left = numel
    for span in spans:
        begin = span.begin
        while begin < span.end:
            end = span.end if span.end - begin <= left else begin + left // CUT * CUT
            if end > begin:
                strip.append(Span(span.parameter, begin, end))
                left, begin = left - (end - begin), end
            if begin < span.end:
                yield strip
                strip, left = [], numel
    if strip:
        yield strip


def _end_of(begin: int, extent: Extent, block: int) -> int:
    """Where a span from `begin` ends at last."""
    return min(extent.numel, (begin // block + 1) * block)


def _next(rest: Span, extent: Extent, unit: int, left: int) -> Span | None:
    """As much of `rest` as fits into `left` bytes of a subgroup; None: not even one unit fits."""
    if _bytes(rest.numel, extent) <= left:
        return rest
    each = ITEM_BYTES * len(extent.fields)
    fits = left // (PAGE_ITEMS * each) * PAGE_ITEMS // unit * unit
    return Span(rest.parameter, rest.begin, rest.begin + fits) if fits > 0 else None


def _unit(extent: Extent, subgroup_bytes: int) -> tuple[int, int]:
    """(each cut is a multiple of so many elements, no span crosses a multiple of so many)."""
    block = max(1, extent.numel)
    for row in extent.rows:
        unit = math.lcm(max(1, row), CUT)
        if _bytes(unit, extent) * ROW_CUTS_MIN <= subgroup_bytes:
            return unit, block
        if row % CUT:
            break
        block = row
    return CUT, max(1, extent.numel)


def _bytes(numel: int, extent: Extent) -> int:
    return _aligned(numel) * ITEM_BYTES * len(extent.fields)


def _aligned(numel: int) -> int:
    """Its elements in whole pages."""
    return -(-numel // PAGE_ITEMS) * PAGE_ITEMS
