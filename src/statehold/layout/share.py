"""Which rank writes which part of a state that many ranks hold: pure arithmetic, no messages.

Owns: the choice of the writer of every box that several ranks hold, the cutting of large boxes, and
the cache that keeps a rank's share with the plan of its data file.
Invariants: exactly one rank writes every element of a tensor with a layout. Each rank writes its
tensors without a layout. All ranks of a mesh choose alike: they see the same tensors, and choose
only by global shapes and names, never by the size of their own box. If every box counts as the
largest of its tensor, no replica writes more than the mean of the replicas and one item (a piece,
or a tensor that is not cut). The time depends on a rank's own tensors, and hardly on the number of
ranks.
Not here: boxes (layout), the file (plan), the documents on disk (record).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from statehold.encoding import header
from statehold.errors import InvariantError
from statehold.layout.layout import AnyLayout, Box, ExplicitLayout, Layout, Mesh
from statehold.layout.plan import SavePlan, TensorSpec, plan_save
from statehold.ranks.membership import ALONE, Membership
from statehold.units import MiB

SPLIT_BYTES = 8 * MiB  # a replicated box from this size on is cut
PIECE_BYTES = 1 * MiB  # no piece of the largest box is cut smaller


class HeldTensor(NamedTuple):
    """The entry of a record for a tensor that its rank holds, written there or not.

    `shape` is global. `layout` is the written one (a large replicated tensor is split over its
    replicas), or None for a tensor that is this rank's own. `writer` is the replica that writes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: AnyLayout | None
    writer: int = 0


class Part(NamedTuple):
    """A part that this rank writes: `rows` (of dim 0; None: all) of the captured spec `source`."""

    spec: TensorSpec
    source: int
    rows: tuple[int, int] | None


@dataclass(frozen=True)
class Parts:
    """All of these, by column: Python's collector would look at an object for each."""

    specs: list[TensorSpec]
    sources: list[int]
    rows: list[tuple[int, int] | None]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Parts:
        found = cls([], [], [])
        for part in parts:
            found.specs.append(part.spec)
            found.sources.append(part.source)
            found.rows.append(part.rows)
        return found

    def __iter__(self) -> Iterator[Part]:
        return map(Part, self.specs, self.sources, self.rows)


@dataclass(frozen=True)
class Share:
    """The part of one rank in a save. specs: what the rank holds. shared: by its index, the written
    layout and the writer of what several ranks hold."""

    parts: Parts
    specs: tuple[TensorSpec, ...] = ()
    shared: Mapping[int, tuple[Layout | None, int]] = field(default_factory=dict)

    def written(self, index: int) -> tuple[AnyLayout | None, int]:
        """The written layout and the writer of specs[index]."""
        return self.shared.get(index) or (self.specs[index].layout, 0)

    @cached_property
    def held(self) -> tuple[HeldTensor, ...]:
        """In the order of `specs`. A rank that is alone needs none of it."""
        return tuple(
            [
                HeldTensor(spec.name, spec.dtype, global_shape(spec), *self.written(index))
                for index, spec in enumerate(self.specs)
            ]
        )


def share(specs: Sequence[TensorSpec], rank: int) -> Share:
    """The part that `rank` writes of its `specs`.

    Raises InvariantError for a spec whose box differs from the one that its layout gives this rank.
    """
    shared: dict[int, tuple[Layout | None, int]] = {}
    for members in _replicated(specs):
        shared.update(zip(members, _choose([specs[i] for i in members]), strict=True))
    whole = Share(Parts.of(()), tuple(specs), shared)
    parts = (_part(spec, index, *whole.written(index), rank) for index, spec in enumerate(specs))
    return replace(whole, parts=Parts.of(part for part in parts if part is not None))


def global_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    return spec.shape if spec.global_shape is None else spec.global_shape


# -- what a rank writes ------------------------------------------------------------------------


def _part(
    spec: TensorSpec, source: int, layout: AnyLayout | None, writer: int, rank: int
) -> Part | None:
    if layout is None or spec.layout is None:
        return Part(spec, source, None)
    own = _own_box(spec, spec.layout, rank)
    if layout.replica_count > 1 and layout.replica_index(rank) != writer:
        return None
    box = own if layout is spec.layout else layout.box(global_shape(spec), rank)
    # On a mesh of one rank, only that rank can tell that an empty tensor exists.
    if not box.numel and (isinstance(layout, ExplicitLayout) or len(layout.ranks) > 1):
        return None
    if box == own:
        return Part(spec, source, None)
    begin = box.offsets[0] - own.offsets[0]
    return Part(_spec_of(spec, box), source, (begin, begin + box.shape[0]))


def _own_box(spec: TensorSpec, layout: AnyLayout, rank: int) -> Box:
    offsets = (0,) * len(spec.shape) if spec.offsets is None else spec.offsets
    got = Box(offsets, spec.shape)
    takes_part = isinstance(layout, ExplicitLayout) or rank in layout.mesh
    if takes_part:
        expected = layout.box(global_shape(spec), rank)
        if got == expected:
            return expected
    wanted = str(expected) if takes_part else "nothing: it is not in the mesh"
    facts = {"tensor": spec.name, "rank": str(rank), "expected": wanted, "got": str(got)}
    raise InvariantError("a rank holds another box than its layout says", facts=facts)


def _spec_of(spec: TensorSpec, box: Box) -> TensorSpec:
    nbytes = header.DTYPE_BITS[spec.dtype] * box.numel // 8  # _item cuts no byte
    return spec._replace(shape=box.shape, nbytes=nbytes, offsets=box.offsets)


# -- who writes a replicated box ---------------------------------------------------------------
# A box that R replicas hold can be cut into P pieces along dim 0, for each P of a ladder of
# divisors of R. Neighbouring replicas take one piece each, and the R / P groups of neighbours are
# the choices. Items go to the group with the fewest bytes, finest cuts first, then the largest
# items. This is longest-processing-time scheduling. Splitting everything over all replicas was
# rejected: over thousands of replicas a piece would be a few hundred bytes, and a restore would
# need as many reads.


@dataclass(frozen=True)
class _ShareCut:
    """A way to cut: each run of `parts` neighbouring replicas shares a box, with a piece for each.

    Axis `refined` of the old mesh is two axes in `mesh`, unless it is beyond the last one.
    """

    parts: int
    mesh: Mesh
    refined: int
    axes: tuple[int, ...]  # of `mesh`, that hold the neighbours

    def layout(self, of: Layout) -> Layout:
        """The written layout: the pieces are cut after, and out of, the boxes of `of`."""
        kept = [(axis + (axis > self.refined), dim) for axis, dim in of.splits]
        return Layout(self.mesh, (*kept, *[(axis, 0) for axis in self.axes]))


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor's demand on each replica that takes part in writing it."""

    cut: int  # in the ladder
    nbytes: int
    name: str
    member: int

    @property
    def key(self) -> tuple[int, int, str]:
        return -self.cut, -self.nbytes, self.name


def _replicated(specs: Sequence[TensorSpec]) -> Iterable[list[int]]:
    """The tensors that several ranks hold, by the mesh and the axes along which they hold them."""
    groups: defaultdict[tuple[Mesh, tuple[int, ...]], list[int]] = defaultdict(list)
    for index, spec in enumerate(specs):
        layout = spec.layout
        # Eager tensors stay with the first replica. DistributedDataParallel takes the buffers of
        # rank 0 for the true ones, even if the others have computed other values meanwhile.
        if isinstance(layout, Layout) and layout.replica_count > 1 and not spec.eager:
            groups[layout.mesh, layout.replica_axes].append(index)
    return groups.values()


def _choose(specs: Sequence[TensorSpec]) -> list[tuple[Layout | None, int]]:
    """(written layout, writer) of each of `specs`, which have one mesh and the same replica
    axes."""
    layouts = [spec.layout for spec in specs if isinstance(spec.layout, Layout)]
    ladder = _ladder(layouts[0].mesh, layouts[0].replica_axes)
    items = [_item(spec, member, ladder) for member, spec in enumerate(specs)]
    chosen: list[tuple[Layout | None, int]] = [(None, 0)] * len(specs)
    known: dict[tuple[int, Layout], Layout] = {}
    for item, writer in _schedule(items, [cut.parts for cut in ladder]):
        key = item.cut, layouts[item.member]
        if key not in known:
            known[key] = ladder[item.cut].layout(key[1]) if item.cut else key[1]
        chosen[item.member] = known[key], writer
    return chosen


def _ladder(mesh: Mesh, axes: Sequence[int]) -> list[_ShareCut]:
    """The cuts of a mesh, from none to one piece a replica; each divides the next."""
    parts, ladder = 1, [_cut(mesh, axes, 1)]
    for axis in reversed(axes):
        for prime in _primes(mesh.shape[axis]):
            parts *= prime
            ladder.append(_cut(mesh, axes, parts))
    return ladder


def _primes(n: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            yield divisor
            n //= divisor
        divisor += 1
    if n > 1:
        yield n


def _cut(mesh: Mesh, axes: Sequence[int], parts: int) -> _ShareCut:
    """Cut over the last replica axes. An axis that `parts` does not use up becomes two."""
    shape, refined, cut, left = list(mesh.shape), len(mesh.shape), [], parts
    for axis in reversed(axes):
        size = mesh.shape[axis]
        inner = min(size, left)
        left //= inner
        if 1 < inner < size:
            shape[axis : axis + 1] = [size // inner, inner]
            refined = axis
        if inner > 1:
            cut.append(axis)
    if refined == len(mesh.shape):
        return _ShareCut(parts, mesh, refined, tuple(sorted(cut)))
    moved = sorted(axis + (axis >= refined) for axis in cut)
    return _ShareCut(parts, Mesh(tuple(shape), mesh.ranks), refined, tuple(moved))


def _item(spec: TensorSpec, member: int, ladder: Sequence[_ShareCut]) -> _Item:
    """The finest cut that pays, by the nominal size, which is the size of the largest box."""
    assert isinstance(spec.layout, Layout)
    shape = spec.layout.largest_box(global_shape(spec)).shape
    nbytes = -(-header.DTYPE_BITS[spec.dtype] * math.prod(shape) // 8)
    if nbytes < SPLIT_BYTES or header.DTYPE_BITS[spec.dtype] * math.prod(shape[1:]) % 8:
        return _Item(0, nbytes, spec.name, member)
    rows, row_bytes = shape[0], nbytes // shape[0]
    for cut in reversed(range(len(ladder))):
        parts = ladder[cut].parts
        most = -(-rows // parts)
        # Pieces of very different sizes would not balance: 9 rows in 8 pieces are 2, 2, 2, 2, 1.
        if parts * PIECE_BYTES <= nbytes and 8 * most * parts <= 9 * rows:
            return _Item(cut, most * row_bytes, spec.name, member)
    return _Item(0, nbytes, spec.name, member)


def _schedule(items: Sequence[_Item], parts: Sequence[int]) -> Iterator[tuple[_Item, int]]:
    """Each item and the group of neighbours that writes it; `parts` is the ladder.

    A heap entry is a run of groups with equal load. There are at most twice as many entries as
    items, however many groups there are. The longest run is taken first, and in its middle, so a
    few items go to groups that are far apart, on other hosts.
    """
    heap = [(0, -1, 0)]  # bytes, minus the length of the run, its first group
    size = parts[-1]
    for item in sorted(items, key=lambda item: item.key):
        if (finer := size // parts[item.cut]) > 1:
            heap = [(load, length * finer, first * finer) for load, length, first in heap]
            size = parts[item.cut]
        load, length, first = heapq.heappop(heap)
        chosen, end = first + (-length - 1) // 2, first - length
        for low, high in ((first, chosen), (chosen + 1, end)):
            if low < high:
                heapq.heappush(heap, (load, low - high, low))
        heapq.heappush(heap, (load + item.nbytes, -1, chosen))
        yield item, chosen


# -- the cache ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPlan:
    """The part that a rank writes, and its place in the data file.

    `save` plans the specs of `share.parts`; `save.source_index` gives their places in file order.
    """

    save: SavePlan
    share: Share


class PlanCache:
    """The plan of the last save, for the next one, because a training run saves the same
    structure."""

    def __init__(self, membership: Membership = ALONE) -> None:
        self._membership = membership
        self._of: tuple[Any, ...] | None = None  # the specs, and what is frozen
        self._plan: RankPlan | None = None

    def get(
        self, specs: Sequence[TensorSpec], step: int, frozen: tuple[str, ...] | None = None
    ) -> RankPlan:
        """The plan of `specs` at `step`; cheap while the specs stay equal, and what is frozen."""
        specs = tuple(specs)
        if self._plan is not None and self._of == (specs, frozen):
            return RankPlan(self._plan.save.at_step(step), self._plan.share)
        rank, world = self._membership.rank, self._membership.world
        found = share(specs, rank)
        written = found.parts.specs
        save = plan_save(written, step=step, world_size=world, rank=rank, frozen=frozen)
        self._of, self._plan = (specs, frozen), RankPlan(save, found)
        return self._plan


# -- reporting ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Of bytes written."""

    min: int
    mean: float
    max: int


@dataclass(frozen=True, slots=True)
class Balance:
    ranks: Spread
    nodes: Spread


def balance(rank_bytes: Sequence[int], hosts: Sequence[str]) -> Balance:
    """How evenly the ranks, and their hosts, write: one entry a rank in both."""
    node_bytes: defaultdict[str, int] = defaultdict(int)
    for nbytes, host in zip(rank_bytes, hosts, strict=True):
        node_bytes[host] += nbytes
    return Balance(_spread(rank_bytes), _spread(list(node_bytes.values())))


def _spread(values: Sequence[int]) -> Spread:
    return Spread(min(values), sum(values) / len(values), max(values))


# -- what tells a part from others -----------------------------------------------------------------
# From save to save, a part keeps its key while its tensor keeps its name, dtype and shape, and the
# rank its place in it. Two parts of one rank have different keys.


# The name, the dtype, the shape, and where the part begins in the whole tensor.
Key: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def key_of(spec: TensorSpec) -> Key:
    return spec.name, spec.dtype, spec.shape, spec.offsets or (0,) * len(spec.shape)


def keys_of(plan: RankPlan) -> tuple[Key, ...]:
    """The keys of the parts of a file, in file order."""
    return tuple([key_of(spec) for spec in plan.save.specs])
