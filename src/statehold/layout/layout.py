"""Layouts: which rank holds which box of a tensor. Pure arithmetic.

A split cuts the part that the splits before it left, as `torch.chunk` does: pieces of ceil(n /
parts), the last ones smaller or empty. FSDP over tensor parallel on one dimension splits the
tensor-parallel axis first and the data-parallel axis second, whatever the order of the mesh axes.

Owns: boxes, sets of ranks, meshes of ranks, and the split of a tensor over a mesh.
Invariants: the boxes of a Layout cover the tensor, and two of them are equal or disjoint. Ranks
that differ only along mesh axes without a split hold the same box (replicas). An ExplicitLayout
comes from elsewhere and promises nothing: its readers check that it covers the tensor.
Not here: torch (tensors/placements reads layouts off tensors), who writes what (share), files.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add, itemgetter
from typing import NamedTuple


class Box(NamedTuple):
    """A hyper-rectangle of a tensor, in elements: [offsets[d], offsets[d] + shape[d]) in dim d."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return _whole(tuple(shape)) if len(shape) < 100 else Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))

    def intersection(self, other: Box) -> Box | None:
        """The elements of both boxes, or None if there are none."""
        if self == other:
            return self if self.numel else None
        lows = tuple(map(max, self.offsets, other.offsets))
        shape = tuple(
            min(a, b) - low for low, a, b in zip(lows, self.ends, other.ends, strict=True)
        )
        return Box(lows, shape) if all(size > 0 for size in shape) else None

    def minus(self, other: Box) -> list[Box]:
        """The elements of only this box, as disjoint boxes."""
        cut = self.intersection(other)
        if cut is None:
            return [self] if self.numel else []
        left, lows, ends = [], list(self.offsets), list(self.ends)
        for dim, (low, end) in enumerate(zip(cut.offsets, cut.ends, strict=True)):
            for begin, stop in ((lows[dim], low), (end, ends[dim])):
                if begin < stop:
                    offsets, limits = list(lows), list(ends)
                    offsets[dim], limits[dim] = begin, stop
                    shape = [b - a for a, b in zip(offsets, limits, strict=True)]
                    left.append(Box(tuple(offsets), tuple(shape)))
            lows[dim], ends[dim] = low, end
        return left

    def relative_to(self, outer: Box) -> Box:
        """The same box, counted from the first element of `outer`."""
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.shape)

    def within(self, outer: Box) -> Box:
        """The inverse of `relative_to`."""
        return Box(tuple(map(add, outer.offsets, self.offsets)), self.shape)

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True))
        return f"[{ranges}]"


@lru_cache(1 << 12)  # a state has few shapes, and no long ones
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A set of ranks as ranges [first, last], ascending and separate; thousands are often one."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        return cls.union(cls(((rank, rank),)) for rank in ranks)

    @classmethod
    def union(cls, sets: Iterable[Ranks]) -> Ranks:
        ranges: list[tuple[int, int]] = []
        for first, last in sorted(each for ranks in sets for each in ranks.ranges):
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
            else:
                ranges.append((first, last))
        return cls(tuple(ranges))

    @property
    def lowest(self) -> int:
        return self.ranges[0][0]

    def covers(self, other: Ranks) -> bool:
        """Whether all ranks of `other` are in this set."""
        return all(last <= self._end_after(first) for first, last in other.ranges)

    def __contains__(self, rank: int) -> bool:
        return rank <= self._end_after(rank)

    def _end_after(self, rank: int) -> int:
        """The last rank of the range that `rank` is in; -1 if it is in none."""
        index = bisect_right(self.ranges, rank, key=itemgetter(0)) - 1
        last = self.ranges[index][1] if index >= 0 else -1
        return last if rank <= last else -1

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in self.ranges)


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged in a grid; `ranks` is in row-major order, each rank at most once."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    def __hash__(self) -> int:  # meshes are long, and are looked up for every tensor
        return self._hash

    def __contains__(self, rank: int) -> bool:
        return rank in self._places

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank, one index an axis. KeyError for a rank outside."""
        place = self._places[rank]
        coordinate = []
        for size in reversed(self.shape):
            place, index = divmod(place, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at one index an axis."""
        place = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            place = place * size + index
        return self.ranks[place]


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """[begin, end) of part `index` of `size` elements cut into `parts`, as torch.chunk cuts."""
    step = -(-size // parts)
    begin = min(size, step * index)
    return begin, min(size, begin + step)


class _Cut(NamedTuple):
    """A part of one dimension, and the (mesh axis, index) that lead to it."""

    begin: int
    size: int
    indices: tuple[tuple[int, int], ...]

    def parts(self, axis: int, count: int, low: int, end: int) -> Iterator[_Cut]:
        """The parts, of `count` along a mesh axis, that meet [low, end)."""
        step = -(-self.size // count)
        first = max(0, low - self.begin) // step
        last = min(-(-self.size // step), -(-(end - self.begin) // step))
        for index in range(first, last):
            size = min(step, self.size - index * step)
            yield _Cut(self.begin + index * step, size, (*self.indices, (axis, index)))


@dataclass(frozen=True)
class Layout:
    """A tensor over a mesh: `splits` are (mesh axis, tensor dim) in the order of splitting.

    No axis is split twice. Axes without a split replicate.
    """

    mesh: Mesh
    splits: tuple[tuple[int, int], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a box."""
        return self.mesh.ranks

    @cached_property
    def replica_axes(self) -> tuple[int, ...]:
        """The mesh axes along which all ranks hold the same box."""
        split = {axis for axis, _ in self.splits}
        return tuple(axis for axis in range(len(self.mesh.shape)) if axis not in split)

    @cached_property
    def replica_count(self) -> int:
        """How many ranks hold each box."""
        return math.prod(self.mesh.shape[axis] for axis in self.replica_axes)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """The box that `rank` holds of a tensor of `shape`; may be empty. KeyError for a rank
        outside."""
        return self._box(shape, self.mesh.coordinate(rank))

    def largest_box(self, shape: Sequence[int]) -> Box:
        """The box at the first coordinate; no other box is larger in any dimension."""
        return self._box(shape, (0,) * len(self.mesh.shape))

    def replica_index(self, rank: int) -> int:
        """The place of a rank among the ranks that hold its box."""
        coordinate, index = self.mesh.coordinate(rank), 0
        for axis in self.replica_axes:
            index = index * self.mesh.shape[axis] + coordinate[axis]
        return index

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the box of `rank`, in the order of replica_index."""
        return self._replicas(self.mesh.coordinate(rank))

    def boxes(
        self, shape: Sequence[int], within: Box | None = None
    ) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each distinct non-empty box and its ranks; only boxes that meet `within`.

        Takes time in proportion to the returned boxes, not to all boxes.
        """
        within = within or Box.whole(shape)
        lists = [self._cuts(dim, size, within) for dim, size in enumerate(shape)]
        for cuts in itertools.product(*lists):
            coordinate = [0] * len(self.mesh.shape)
            for cut in cuts:
                for axis, index in cut.indices:
                    coordinate[axis] = index
            box = Box(tuple([cut.begin for cut in cuts]), tuple([cut.size for cut in cuts]))
            yield box, self._replicas(coordinate)

    def _cuts(self, dim: int, size: int, within: Box) -> list[_Cut]:
        """The parts of one dimension that meet `within`."""
        low, end = within.offsets[dim], within.ends[dim]
        cuts = [_Cut(0, size, ())] if size and low < end else []
        for axis, split in self.splits:
            if split == dim:
                parts = self.mesh.shape[axis]
                cuts = [part for cut in cuts for part in cut.parts(axis, parts, low, end)]
        return cuts

    @cached_property
    def _known_replicas(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}  # many tensors share a layout; all entries together have each rank once

    def _replicas(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        place = tuple([coordinate[axis] for axis, _ in self.splits])
        found = self._known_replicas.get(place)
        if found is None:
            free = set(self.replica_axes)
            choices = [
                range(size) if axis in free else (coordinate[axis],)
                for axis, size in enumerate(self.mesh.shape)
            ]
            found = tuple(self.mesh.rank_at(each) for each in itertools.product(*choices))
            self._known_replicas[place] = found
        return found

    def _box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, dim in self.splits:
            begin, end = chunk_range(sizes[dim], self.mesh.shape[axis], coordinate[axis])
            offsets[dim] += begin
            sizes[dim] = end - begin
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class ExplicitLayout:
    """A tensor cut freely: each box, and the one rank that holds it."""

    placed: tuple[tuple[Box, int], ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a box."""
        return tuple(sorted({rank for _, rank in self.placed}))

    @property
    def replica_count(self) -> int:
        """How many ranks hold each box."""
        return 1

    def replica_index(self, rank: int) -> int:
        """The place of a rank among the ranks that hold its box."""
        return 0

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """The box of a rank that has one at most; an empty one for any other."""
        found = self.boxes_of(rank)
        return found[0] if found else Box((0,) * len(shape), (0,) * len(shape))

    def boxes(
        self, shape: Sequence[int], within: Box | None = None
    ) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each non-empty box and its rank; only boxes that meet `within`."""
        within = within or Box.whole(shape)
        for box, rank in self.placed:
            if box.numel and box.intersection(within):
                yield box, (rank,)

    def boxes_of(self, rank: int) -> list[Box]:
        """The non-empty boxes of one rank."""
        return [box for box, owner in self.placed if owner == rank and box.numel]


AnyLayout = Layout | ExplicitLayout
