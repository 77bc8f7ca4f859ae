"""What a capture holds: each tensor of a state with its spec, as it was then; and copies of some.

Owns: what is external, what is eager and when, and what has been changed since.
Invariants: a captured tensor is an alias that keeps the memory alive at the address it had at
capture, with the version counter of then.
Not here: which tensors a state has, and which of them are eager (capture).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
from operator import attrgetter, not_
from typing import Any, NamedTuple, overload

import torch

from statehold.layout.plan import TensorSpec
from statehold.tensors.scalers import Number
from statehold.tensors.storable import (
    Strided,
    is_external,
    is_view_of_other_values,
    strides_of,
    version_of,
)

__all__ = [
    "Capture",
    "CapturedTensor",
    "Tensors",
    "captured",
    "clone_eager_device_tensors",
    "clone_small_host_tensors",
]

# With tensors on a device, neither save() nor the gate waits for it: the copies are enqueued behind
# its work. Host tensors are not in that order, and share blocks with device tensors, so those up
# to this size (an optimizer's `step`) are cloned at capture.
SMALL_BYTES = 64 << 10
# Eager tensors of devices are cloned while they are no more than this in all: then save() waits for
# nobody. The clones live until their bytes are copied.
CLONED_BYTES_MAX = 256 << 20
# An optimizer has a `step` for each parameter, of one of these dtypes.
_NUMBERS = frozenset({"F32", "F64", "I64"})


class CapturedTensor(NamedTuple):
    """A tensor to save. `strided` is None for contiguous memory; `external`: not host memory.

    `tensor` is the local tensor of a DTensor, `wrapper` the DTensor; `version` counts both.
    `spec.eager` says where the tensor is laid out. All ranks have to agree on it, so it follows
    from marks and kinds, and never from sizes or from memory that is free. `eager` says when the
    bytes are copied, which each rank decides for itself.
    """

    spec: TensorSpec
    tensor: torch.Tensor
    version: int
    address: int
    strided: Strided | None
    external: bool
    owned: bool  # a copy that nobody else can change
    wrapper: torch.Tensor | None
    is_gated: bool = False  # laid out as eager, and yet only a step() that waits changes it

    @property
    def eager(self) -> bool:
        """Whether the bytes have still to be copied before save() returns; those of a device only
        have to be under way, before what its stream is given next."""
        return self.spec.eager and not self.is_gated and not self.owned


class Tensors(Sequence[CapturedTensor]):
    """Captured tensors, column by column: a state has tens of thousands, and an object for each
    would cost the trainer more than all else that save() does."""

    __slots__ = ("_eager", "columns")

    def __init__(self, tensors: Iterable[CapturedTensor] = ()) -> None:
        rows = list(tensors)
        self._eager: list[int] | None = None
        self.columns: tuple[list[Any], ...] = tuple(
            [row[place] for row in rows] for place in range(len(_FIELDS))
        )

    @property
    def specs(self) -> list[TensorSpec]:
        return self.columns[0]

    @property
    def aliases(self) -> list[torch.Tensor]:
        return self.columns[1]

    @property
    def versions(self) -> list[int]:
        return self.columns[2]

    @property
    def addresses(self) -> list[int]:
        return self.columns[3]

    @property
    def strided(self) -> list[Strided | None]:
        return self.columns[4]

    @property
    def external(self) -> list[bool]:
        return self.columns[5]

    @property
    def owned(self) -> list[bool]:
        return self.columns[6]

    @property
    def wrappers(self) -> list[torch.Tensor | None]:
        return self.columns[7]

    def eager(self) -> list[int]:
        """The indices of those that are copied before save() returns."""
        if self._eager is None:
            eager = compress(range(len(self)), map(_is_eager, self.specs))
            self._eager = [index for index in eager if self[index].eager]
        return self._eager

    def append(self, tensor: CapturedTensor) -> None:
        self._eager = None
        for column, value in zip(self.columns, tensor, strict=True):
            column.append(value)

    def extend(self, *columns: Iterable[Any]) -> None:
        """The columns in the order of the fields of a tensor."""
        self._eager = None
        for column, more in zip(self.columns, columns, strict=True):
            column.extend(more)

    def replace(self, indices: Sequence[int], **fields: Iterable[Any]) -> None:
        """Put other values into fields of these, as they come."""
        self._eager = None
        for name, others in fields.items():
            column = self.columns[_FIELDS.index(name)]
            for index, value in zip(indices, others, strict=False):
                column[index] = value

    def picked(self, indices: Sequence[int]) -> Tensors:
        """These, in this order."""
        picked = Tensors()
        picked.columns = tuple([*map(column.__getitem__, indices)] for column in self.columns)
        return picked

    @overload
    def __getitem__(self, index: int) -> CapturedTensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[CapturedTensor]: ...

    def __getitem__(self, index: int | slice) -> CapturedTensor | list[CapturedTensor]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return CapturedTensor._make([column[index] for column in self.columns])

    def __setitem__(self, index: int, tensor: CapturedTensor) -> None:
        self._eager = None
        for column, value in zip(self.columns, tensor, strict=True):
            column[index] = value

    def __iter__(self) -> Iterator[CapturedTensor]:
        return map(CapturedTensor._make, zip(*self.columns, strict=True))

    def __len__(self) -> int:
        return len(self.columns[0])


_FIELDS = CapturedTensor._fields
_is_eager, _nbytes = attrgetter("eager"), attrgetter("nbytes")


@dataclass(slots=True)
class Capture:
    """A state at the time of `capture`. `tensors` are distinct in memory; ties are in the tree.

    note: what the user could hand over so that save() returns earlier; "" if nothing.
    doubts: what a restore will not put back, and what the user can do about it now.
    numbers: what of the tree lies on devices, to be filled in before the save is staged.
    """

    tensors: Tensors
    tree: Any
    note: str = ""
    doubts: list[str] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    eager: list[int] = field(init=False)  # the indices of such tensors
    _settled: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.eager = self.tensors.eager()

    def settle(self) -> str | None:
        """Declare that lazy tensors may change from now on; the name of one that already has.

        Asked from the gate and from the stage thread: the first to find all unchanged decides,
        and what changes later is an update that was let through.
        """
        with self._guard:
            moved = None if self._settled else self.moved(eager=False)
            self._settled = moved is None
            return moved

    def moved(self, *, eager: bool) -> str | None:
        """The name of an eager (or of a lazy) tensor that changed since capture, or None."""
        chosen: Iterable[int] = self.eager
        if not eager:
            not_asked = set(self.eager)
            chosen = (index for index in range(len(self.tensors)) if index not in not_asked)
        tensors = self.tensors
        aliases, wrappers, versions = tensors.aliases, tensors.wrappers, tensors.versions
        for index in chosen:
            version = versions[index]
            if version >= 0 and version_of(aliases[index], wrappers[index]) != version:
                return tensors.specs[index].name
        return None

    def named(self, names: Set[str]) -> list[CapturedTensor]:
        """The tensors of these names."""
        if not names:
            return []
        specs = enumerate(self.tensors.specs)
        return [self.tensors[index] for index, spec in specs if spec.name in names]

    @property
    def state_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(map(_nbytes, self.tensors.specs))

    @property
    def eager_bytes(self) -> int:
        """The bytes that are copied before save() returns, in capture() or right after it."""
        specs = self.tensors.specs
        owned: int = sum(map(_nbytes, compress(specs, self.tensors.owned)))
        return owned + sum(specs[index].nbytes for index in self.eager)


def captured(
    tensor: torch.Tensor,
    spec: TensorSpec,
    eager: bool,
    owned: bool = False,
    wrapper: torch.Tensor | None = None,
    is_gated: bool = False,
) -> CapturedTensor:
    if is_view_of_other_values(tensor):
        tensor, owned = tensor.resolve_conj().resolve_neg(), True
    if tensor.is_inference():
        is_gated, eager = False, True
    if spec.eager is not eager:
        spec = replace(spec, eager=eager)
    wrapper = None if owned else wrapper
    version, strided = version_of(tensor, wrapper), strides_of(tensor)
    address = tensor.data_ptr()
    external, is_gated = is_external(tensor), is_gated and eager
    return CapturedTensor(
        spec, tensor, version, address, strided, external, owned, wrapper, is_gated
    )


def _owned_copy(each: CapturedTensor) -> CapturedTensor:
    """The same tensor, copied now; a copy on a device is made in the order of its stream."""
    copy = each.tensor.clone(memory_format=torch.contiguous_format)
    version, address = version_of(copy), copy.data_ptr()
    return CapturedTensor(each.spec, copy, version, address, None, each.external, True, None)


def clone_small_host_tensors(tensors: Tensors) -> None:
    """Copy small host tensors now; see SMALL_BYTES."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    specs, owned = tensors.specs, tensors.owned
    for index in compress(range(len(tensors)), map(not_, tensors.external)):
        spec = specs[index]
        if spec.nbytes <= SMALL_BYTES and not owned[index]:
            if spec.shape == () and spec.dtype in _NUMBERS:
                numbers[spec.dtype].append(index)
            else:
                tensors[index] = _owned_copy(tensors[index])
    for indices in numbers.values():
        _clone_together(tensors, indices)


def _clone_together(tensors: Tensors, indices: list[int]) -> None:
    """Copy numbers of one dtype into one new tensor; a clone of each takes three times as long."""
    copies = torch.stack([*map(tensors.aliases.__getitem__, indices)])
    begin, size = copies.data_ptr(), copies.element_size()
    tensors.replace(
        indices,
        tensor=copies.unbind(),
        version=repeat(version_of(copies)),
        address=range(begin, begin + len(indices) * size, size),
        strided=repeat(None),
        owned=repeat(True),
        wrapper=repeat(None),
        is_gated=repeat(False),
    )


def clone_eager_device_tensors(tensors: Tensors) -> None:
    """Copy the eager tensors of devices there, if they are small in all and there is memory."""
    eager = [index for index in tensors.eager() if tensors.external[index]]
    if sum(tensors.specs[index].nbytes for index in eager) > CLONED_BYTES_MAX:
        return
    try:
        clones = [_owned_copy(tensors[index]) for index in eager]
    except torch.OutOfMemoryError:
        return  # none at all: save() waits in any case
    for index, clone in zip(eager, clones, strict=True):
        tensors[index] = clone
