"""Live memory for saved tensors: what fits, what is filled where it is, and what has to be made.

Owns: the comparison of shapes and dtypes, ties, new tensors; conversions to the dtype of the live
ones.
Invariants: a destination changes nothing live. A DTensor is compared by its global shape and filled
in its local tensor; no collective is called. What is made for a sharded parameter is sharded as it
is.
Not here: names and trees (matching), who reads the bytes (engine).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from statehold.errors import StateMismatchError
from statehold.format.saved import SavedStep
from statehold.layout.flat import parts_of
from statehold.layout.layout import Box, Layout
from statehold.layout.plan import pieces
from statehold.process.host_memory import ReadOnly
from statehold.tensors import dtypes, placements
from statehold.tensors.columns import layout_of
from statehold.tensors.placements import Piece, Placed
from statehold.tensors.storable import (
    Memory,
    boxed,
    empty_on,
    is_dtensor,
    is_external,
    is_storable,
    is_view_of_other_values,
    local_of,
    memory_of,
    overlaps_itself,
    part_of,
)
from statehold.tensors.stored import Fill, Wanted
from statehold.units import MiB

# -- casts -----------------------------------------------------------------------------------------
# Floats of 8 to 64 bits can be asked for in another dtype. A tensor is read in its saved dtype, a
# block of bounded size at a time, and converted only after the bytes of the block were verified.
# The state of a parameter that is converted is made in the dtype of the parameter, as torch's
# load_state_dict() has it.


BLOCK_BYTES = 64 * MiB
# Not float8_e8m0fnu and float4_e2m1fn_x2: they mean nothing without the scales of their block.
_FLOATS = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip


def can_cast(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether values of one dtype may be asked for in the other."""
    return one == other or {one, other} <= _FLOATS


class _Cast(NamedTuple):
    """A tensor, its box, its saved dtype, and the live memory of a part of the box."""

    name: str
    box: Box
    saved: torch.dtype
    part: Callable[[Box], torch.Tensor]


class Casts:
    """The conversions of one restore. names: the names of parameters, by their ids."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._found: list[_Cast] = []

    @property
    def names(self) -> list[str]:
        """Of the saved tensors that are converted."""
        return list(dict.fromkeys(each.name for each in self._found))

    def add(
        self, name: str, box: Box, saved: torch.dtype, part: Callable[[Box], torch.Tensor]
    ) -> None:
        """part: the live memory that takes a part of `box`."""
        self._found.append(_Cast(name, box, saved, part))

    def sharing(self, found: Sequence[Destination]) -> Iterator[str]:
        """The names of those that share live memory with what is converted, or with `found` and
        that: conversions compare no values."""
        casts = [Destination(each.name, each.part(each.box), False, each.box, False)
                 for each in self._found]  # fmt: skip
        for tensors, beside, begin, end in _clusters([*found, *casts]):
            if any(at >= len(found) for _, at in tensors):
                for at, shared in _sharing(tensors, beside, begin, end):
                    if shared.any():
                        yield [*found, *casts][at].name

    def dtype_beside(
        self, parameter: torch.Tensor, dtype: torch.dtype, saved: SavedStep
    ) -> torch.dtype:
        """The dtype of a new state tensor that was saved as `dtype`, beside its parameter."""
        own = saved.tensors.get(name := self._names.get(id(parameter), ""))
        if own is None or not can_cast(dtype, parameter.dtype):
            return dtype
        is_cast = dtypes.dtype_of(own.dtype, name) != parameter.dtype
        return parameter.dtype if is_cast else dtype

    def fill(self, fill: Fill) -> None:
        """Read and convert all of them."""
        batch: list[tuple[torch.Tensor, Wanted]] = []
        size = 0
        for name, whole, dtype, part in self._found:
            for box in parts_of(whole, BLOCK_BYTES // dtype.itemsize):
                shape = dtypes.torch_shape(dtype, box.shape)
                memory = torch.empty(shape, dtype=dtype, device="cpu")
                if size and size + memory.nbytes > BLOCK_BYTES:
                    _convert(batch, fill)
                    batch, size = [], 0
                batch.append((part(box), Wanted(name, box, memory)))
                size += memory.nbytes
        _convert(batch, fill)


def _convert(batch: list[tuple[torch.Tensor, Wanted]], fill: Fill) -> None:
    fill([wanted for _, wanted in batch])
    with torch.no_grad():
        for target, wanted in batch:
            target.copy_(wanted.memory)


# -- destinations ----------------------------------------------------------------------------------


class Destination(NamedTuple):
    """Memory that takes the elements `box` (global coordinates) of the saved tensor `name`.

    `shared`: other ranks of this job may want the same bytes. `among`: the ranks that hold the
    tensor together; None for a rank's own.
    """

    name: str
    tensor: torch.Tensor
    external: bool
    box: Box
    shared: bool
    among: tuple[int, ...] | None = None

    def part(self, box: Box) -> torch.Tensor:
        """The memory that takes `box`, which lies in the destination's."""
        if box == self.box:
            return self.tensor
        return part_of(self.tensor, dtypes.torch_box(self.tensor.dtype, box.relative_to(self.box)))


def destinations_of(wanted: Sequence[Wanted]) -> list[Destination]:
    """Host memory of nobody else."""
    return [Destination(each.name, each.memory, False, each.box, shared=False) for each in wanted]


class Destinations:
    """The destinations of one restore. `acts` are left to do once their bytes have arrived."""

    def __init__(
        self,
        saved: SavedStep,
        replicas: Mapping[int, Layout],
        rank: int | None,
        casts: Casts | None = None,
    ) -> None:
        self._casts = casts
        self.found: list[Destination] = []
        self.acts: list[Callable[[], Any]] = []
        self.used: set[str] = set()
        self.made_plain: set[str] = set()  # what had to be made, and is no DTensor
        self._saved = saved
        self._rank = rank
        self._replicas = replicas
        self._filled: dict[Memory, str] = {}
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._read_only = ReadOnly()

    def place(self, live: torch.Tensor, path: str) -> Placed:
        """Where a live tensor lies. Raises UnsupportedValueError for what has no layout."""
        return placements.place_of(live, path, self._rank, self._replicas)

    def place_of_piece(self, live: Piece, path: str) -> Placed:
        """As place() of a piece. Raises UnsupportedValueError."""
        return live.at(path, self._rank)

    def fits(self, live: torch.Tensor, name: str, place: Placed, *, casts: bool = False) -> bool:
        """Whether the saved tensor has the global shape of a live one, and its dtype or, with
        `casts`, one that can be converted."""
        saved = self._saved.tensors[name]
        dtype = dtypes.dtype_of(saved.dtype, name)
        if live.dtype != dtype:
            casts = casts or self._casts is not None
            if not casts or not can_cast(live.dtype, dtype):
                return False
        shape = tuple(local_of(live).shape) if place.shape is None else place.shape
        return shape == dtypes.torch_shape(dtype, saved.shape)

    def fill(self, live: torch.Tensor, name: str, place: Placed) -> str | None:
        """Make `live` a destination; the name of another tensor that already goes there. Raises
        StateMismatchError for memory that may not be written."""
        local = local_of(live)
        self._check_writable(local, name)
        target = local.detach()
        memory = memory_of(target)
        other = self._filled.get(memory) if target.numel() else None
        is_same = other in (None, name) or self._same_bytes(name, str(other))
        if is_same is False or (is_same is None and self._casts is not None):
            return other
        self.used.add(name)
        if other is None or is_same is None:
            self._filled[memory] = name
            found = self._destination(name, target, place)
            if self._casts is None or target.dtype == self.dtype_of(name):
                self.found.append(found)
            else:
                self._saved.chunks(name, found.box, found.among)  # raises where ranks differ
                self._casts.add(name, found.box, self.dtype_of(name), found.part)
        return None

    def _check_writable(self, local: torch.Tensor, name: str) -> None:
        if is_external(local) or not local.numel():
            return
        # What torch has allocated itself can be resized, and written.
        is_torchs = local.untyped_storage().resizable()
        if not is_torchs and self._read_only.holds(local.data_ptr(), local.nbytes):
            raise StateMismatchError(
                "a tensor lies in memory that may not be written; nothing was changed",
                facts={"tensor": name, "expected": "writable memory", "got": "read-only memory"},
                hint="leave it out by skip=, or copy it first: tensor.clone()",
            )

    def usable(self, live: torch.Tensor, name: str, place: Placed | None = None) -> bool:
        """Whether `live` can take the saved tensor; if so, it will."""
        if not is_storable(live) or overlaps_itself(local_of(live)):
            return False
        place = place or self.place(live, name)
        return self.fits(live, name, place) and self.fill(live, name, place) is None

    @torch.inference_mode(False)  # training changes it in place later
    def make(
        self, name: str, device: torch.device, beside: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        """A new tensor for `name`; one for all places that were tied. beside: the parameter whose
        state it is; one of the same shape gives it its strides, a DTensor its placements, too.
        dtype: that of the tensor, if not the saved one."""
        if beside is not None and not self.has_shape_of(beside, name):
            beside = None
        like = beside if beside is not None and is_dtensor(beside) else None
        dtype = dtype or self.dtype_of(name)
        key = name, device, None if like is None else layout_of(like), dtype
        if key not in self._made:
            if self._casts is not None and beside is not None:
                dtype = self._casts.dtype_beside(beside, dtype, self._saved)
            if like is None:
                shape = dtypes.torch_shape(dtype, self._saved.tensors[name].shape)
                strides = None if beside is None else _strides_of_state(beside)
                made = empty_on(device, shape, dtype, strides)
                self.made_plain.add(name)
            else:
                local = torch.empty_like(local_of(like), dtype=dtype, requires_grad=False)
                made = boxed(local, like)
            self._made[key] = made
            self.fill(made, name, self.place(made, name))
        return self._made[key]

    @torch.inference_mode(False)
    def make_at(self, name: str, place: Placed, device: torch.device) -> torch.Tensor:
        """A new plain tensor for what lies at `place` of `name`; the same for the same place."""
        key = name, device, place
        if key not in self._made:
            dtype = dtypes.dtype_of(self._saved.tensors[name].dtype, name)
            shape = self.shape_of(name) if place.box is None else place.box.shape
            self._made[key] = empty_on(device, shape, dtype)
            self.fill(self._made[key], name, place)
        return self._made[key]

    def described(self, name: str) -> str:
        saved = self._saved.tensors[name]
        return f"{saved.dtype} {list(saved.shape)} in the step"

    def has_shape_of(self, parameter: torch.Tensor, name: str) -> bool:
        """Whether the saved tensor has the shape of a parameter, and is no scalar."""
        shape = self.shape_of(name)
        return bool(shape) and shape == tuple(parameter.shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a saved tensor."""
        return dtypes.dtype_of(self._saved.tensors[name].dtype, name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The global shape of a saved tensor, in elements of torch."""
        saved = self._saved.tensors[name]
        return dtypes.torch_shape(dtypes.dtype_of(saved.dtype, name), saved.shape)

    def _destination(self, name: str, target: torch.Tensor, place: Placed) -> Destination:
        stored = self._saved.tensors[name].shape
        box = Box.whole(stored)
        if place.box is not None:
            box = dtypes.stored_box(target.dtype, place.box, name)
        # Ranks that hold a tensor of the same name without a layout may well read the same bytes.
        alone = place.layout is not None and place.layout.replica_count == 1
        shared = self._rank is not None and not alone
        among = place.layout.ranks if place.layout else None
        return Destination(name, target, is_external(target), box, shared, among)

    def _same_bytes(self, name: str, other: str) -> bool | None:
        """None where only the bytes tell: a checksum is of what a block of the file has."""
        one, two = self._saved.tensors[name], self._saved.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        ours, theirs = self._sums(name, one.shape), self._sums(other, two.shape)
        if ours == theirs:
            return True
        places = ([(box, sizes) for box, sizes, _ in each] for each in (ours, theirs))
        return None if operator.ne(*places) else False

    def _sums(self, name: str, shape: tuple[int, ...]) -> list[tuple[Box, list[int], str]]:
        """(box, the sizes of the pieces with a checksum, checksums) of each chunk."""
        block, found = self._saved.block_bytes, list[tuple[Box, list[int], str]]()
        for each in self._saved.chunks(name, Box.whole(shape)):
            sizes = [b - a for a, b in pieces(each.begin, each.end - each.begin, block)]
            found.append((each.box, sizes, each.sums))
        return sorted(found, key=lambda each: str(each[0]))


# -- memory that several tensors share -------------------------------------------------------------
# Only the values in a step tell whether it fits. So a restore reads these tensors twice: before
# anything is overwritten into memory like theirs, and then into theirs.


_ALIGNED = 64  # a multiple of the size of any element
# (tensors with their places in the list, the places of those that go beside, begin, end)
Cluster = tuple[list[tuple[torch.Tensor, int]], set[int], int, int]


def apart(found: list[Destination]) -> Iterator[Callable[[], None]]:
    """Give each destination memory of its own, and yield what then proves that those that share
    live memory have the same values there. The largest of them are read in place, unless the memory
    has other values than they show."""
    for cluster in _clusters(found):
        for at, shared in _sharing(*cluster):
            live = found[at]
            staged = torch.empty(live.tensor.shape, dtype=live.tensor.dtype, device="cpu")
            found[at] = live._replace(tensor=staged, external=False)
            yield partial(_put_beside, live, staged, shared)


def check_shared(
    found: Sequence[Destination], read: Callable[[Sequence[Destination]], None]
) -> None:
    """Raise StateMismatchError unless the step has the same values wherever these share memory.

    `read` fills destinations: others, which share memory in the same way. Nothing live changes.
    """
    twins: list[Destination] = []
    for tensors, beside, begin, end in _clusters(found):
        if any(shared.any() for _, shared in _sharing(tensors, beside, begin, end)):
            begin -= begin % _ALIGNED
            memory = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            twins += [
                found[at]._replace(tensor=_twin(tensor, memory, begin), external=False)
                for tensor, at in tensors
            ]
    acts = list(apart(twins))
    if twins:
        read(twins)
    try:
        for act in acts:
            act()
    except StateMismatchError as error:
        error.hint = "nothing was changed: clone() one of the tensors, and restore again"
        raise


def _twin(tensor: torch.Tensor, memory: torch.Tensor, begin: int) -> torch.Tensor:
    """A tensor in `memory` that is like one of the memory that begins at `begin`."""
    at = (tensor.data_ptr() - begin) // tensor.element_size()
    plain = memory[: memory.numel() // tensor.element_size() * tensor.element_size()]
    twin = plain.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), at)
    twin = twin.conj() if tensor.is_conj() else twin
    return torch._neg_view(twin) if tensor.is_neg() else twin


def _clusters(found: Sequence[Destination]) -> Iterator[Cluster]:
    """Those whose memory may be the same in part, or does not have the values that they show."""
    spans, beside = [], set[int]()
    for at, each in enumerate(found):
        if (begin := each.tensor.data_ptr()) and (nbytes := each.tensor.nbytes):
            if is_view_of_other_values(each.tensor) and not each.external:
                beside.add(at)
            if not each.tensor.is_contiguous():
                reach = map(
                    operator.mul, each.tensor.stride(), map((-1).__add__, each.tensor.shape)
                )
                nbytes = (1 + sum(reach)) * each.tensor.element_size()
            spans.append((begin, begin + nbytes, at))
    cluster: list[int] = []
    begin = end = 0
    for first, last, next_at in (*sorted(spans), (sys.maxsize, sys.maxsize, -1)):
        if first < end:
            cluster.append(next_at)
            end = max(end, last)
            continue
        if len(cluster) > 1 or not beside.isdisjoint(cluster):
            yield [(found[each].tensor, each) for each in cluster], beside, begin, end
        cluster, begin, end = [next_at], first, last


def _sharing(
    cluster: list[tuple[torch.Tensor, int]], beside: set[int], begin: int, end: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Those in [begin, end) that are `beside`, or share elements with a larger one, or with an
    earlier one, and which elements these are."""
    unit = math.gcd(*(n for t, _ in cluster for n in (t.element_size(), t.data_ptr() - begin)))
    taken = torch.zeros((end - begin) // unit, dtype=torch.bool, device="cpu")
    for tensor, at in sorted(cluster, key=lambda each: (-each[0].nbytes, each[1])):
        units = tensor.element_size() // unit
        strides = (*(stride * units for stride in tensor.stride()), 1)
        place = taken.as_strided(
            (*tensor.shape, units), strides, (tensor.data_ptr() - begin) // unit
        )
        if place.any() or at in beside:
            yield at, place.any(-1).reshape(-1)
        place.fill_(True)


def _put_beside(live: Destination, staged: torch.Tensor, shared: torch.Tensor) -> None:
    """Give a tensor its values. The `shared` ones are there already, and are compared."""
    now = live.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    there, wanted = (
        each.reshape(-1).view(torch.uint8).reshape(shared.numel(), -1)[shared]
        for each in (now, staged)
    )
    if not torch.equal(there, wanted):
        raise StateMismatchError(
            "tensors of the state share memory, and the step has different values for them there",
            facts={"tensor": live.name, "expected": "the values of the larger one"},
            hint="the live state is partly overwritten: restore another step before training on, "
            "or clone() one of the tensors and restore again",
        )
    if not shared.all():
        live.tensor.detach().copy_(staged)


def _strides_of_state(parameter: torch.Tensor) -> tuple[int, ...]:
    """As optimizers make the state of a parameter. Fused ones walk through the memory of both at
    once: with other strides they mix up the elements, or refuse to step."""
    alike = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
    return torch.empty_like(alike).stride()
