"""Captured tensors, column by column: a state has tens of thousands, and an object for each would
cost the trainer more than all else that save() does.

Owns: the reads that decide a tensor's spec, strides and ties, for a batch of tensors at once
(facts); what is known of a captured tensor; what follows from a capture's structure, which is
worked out once for all captures that are equal in it; whether a tensor has changed since then.
Invariants: `storage` keeps the memory at `address` alive, whatever becomes of the tensor. `tensor`
is the live tensor, or an alias of it; either counts the changes of its memory. aliases() show the
memory as it was at capture. A Structure keeps no tensor alive. Equal facts, at equal names and
places, give equal specs and strides. A batch in which any tensor is out of the ordinary has no
facts, and is looked at one tensor at a time.
Not here: which tensors a state has (kinds), which of them are copied at once (captured), what is
recognised by the facts (found).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain, compress, repeat
from operator import add, attrgetter, itemgetter, not_
from typing import Any, NamedTuple, overload

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from statehold._core import read_elements, read_forms, read_members
from statehold.errors import TornSnapshot
from statehold.layout.plan import TensorSpec
from statehold.tensors.storable import (
    ORDINARY,
    Strided,
    devices_of,
    is_dtensor,
    strides_of,
    version_of,
)

# A batch is small, so that its tensors are still in the processor's cache when the next column is
# read.
BATCH = 256
# With tensors on a device, neither save() nor the gate waits for it: the copies are enqueued behind
# its work. Host tensors are not in that order, and share blocks with device tensors, so those up
# to this size (an optimizer's `step`) are cloned at capture.
SMALL_BYTES = 64 << 10
# An optimizer has a `step` for each parameter, of one of these dtypes.
_NUMBERS = ("F32", "F64", "I64")

_version, _impl = attrgetter("_version"), attrgetter("_cdata")
_dtype = attrgetter("dtype")
_size, _stride, _data_ptr = torch.Tensor.size, torch.Tensor.stride, torch.Tensor.data_ptr
_data, _is_neg = attrgetter("data"), torch.Tensor.is_neg
_is_eager, _nbytes = attrgetter("eager"), attrgetter("nbytes")


# -- one tensor ------------------------------------------------------------------------------------
# Facts about PyTorch that decide what is here:
# - A detached alias takes 0.5 us, and more when it is collected; the storage, which exists, 0.06
#   us.
# - `.data = other` leaves a tensor its version counter, `set_` moves it. torch.utils.swap_tensors
#   gives a tensor another counter: the address of what is behind the tensor (`_cdata`) tells.


class Form(NamedTuple):
    """How a tensor shows its memory, and where that is (devices_of)."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: int


class CapturedTensor(NamedTuple):
    """A tensor to save. `strided` is None for contiguous memory; `external`: not host memory.

    `tensor` is the local tensor of a DTensor, `wrapper` the DTensor; `version` counts both. `impl`
    is what was behind `tensor`.
    `spec.eager` says where the tensor is laid out. All ranks have to agree on it, so it follows
    from marks and kinds, and never from sizes or from memory that is free. `eager` says when the
    bytes are copied, which each rank decides for itself.
    """

    spec: TensorSpec
    form: Form
    strided: Strided | None
    external: bool
    owned: bool  # a copy that nobody else can change
    is_gated: bool  # laid out as eager, and yet only a step() that waits changes it
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    impl: int
    version: int
    address: int
    wrapper: torch.Tensor | None

    @property
    def eager(self) -> bool:
        """Whether the bytes have still to be copied before save() returns; those of a device only
        have to be under way, before what its stream is given next."""
        return self.spec.eager and not self.is_gated and not self.owned

    @property
    def has_moved(self) -> bool:
        """Whether it has changed since capture, as far as counters tell."""
        if self.version < 0:
            return False
        now = version_of(self.tensor, self.wrapper)
        return (now, _impl(self.tensor)) != (self.version, self.impl)

    @property
    def alias(self) -> torch.Tensor:
        """A tensor of its own that shows this one as it was at capture. Raises TornSnapshot."""
        alias = self.tensor.detach()
        if (form_of(alias), alias.data_ptr()) == (self.form, self.address) and not alias.is_neg():
            return alias
        dtype, shape, stride, _ = self.form
        at = self.address - self.storage.data_ptr()
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if not 0 <= at <= self.storage.nbytes() - reach * dtype.itemsize:
            raise TornSnapshot(
                "the memory of a tensor was given back while it was being copied",
                facts={"tensor": self.spec.name},
            )
        memory = torch.empty(0, dtype=dtype, device=self.storage.device)
        return memory.set_(self.storage, at // dtype.itemsize, shape, stride)


def form_of(tensor: torch.Tensor) -> Form:
    """The form of a tensor."""
    return Form(tensor.dtype, tensor.size(), tensor.stride(), *devices_of((tensor,)))


def forms_of(tensors: Sequence[torch.Tensor], devices: Iterable[int]) -> list[Form]:
    """The forms of tensors on these devices (devices_of); of equal ones, one object."""
    forms = map(Form, map(_dtype, tensors), map(_size, tensors), map(_stride, tensors), devices)
    known: dict[Form, Form] = {}
    return [known.setdefault(form, form) for form in forms]


_FIELDS = CapturedTensor._fields
# So many of the fields, the first ones, are the same in equal structures.
_STRUCTURE = _FIELDS.index("tensor")


def described(
    spec: TensorSpec,
    tensor: torch.Tensor,
    *,
    external: bool,
    owned: bool = False,
    is_gated: bool = False,
    wrapper: torch.Tensor | None = None,
) -> CapturedTensor:
    """All that is to be known of a tensor that shows the values in its memory."""
    form = form_of(tensor)
    version, strided = version_of(tensor, wrapper), strides_of(tensor)
    storage, address, impl = tensor.untyped_storage(), tensor.data_ptr(), _impl(tensor)
    return CapturedTensor(
        spec, form, strided, external, owned, is_gated,
        tensor, storage, impl, version, address, wrapper,
    )  # fmt: skip


# -- all of them -----------------------------------------------------------------------------------


class LiveColumns(NamedTuple):
    """The fields that differ from capture to capture, in their order in a tensor, by column."""

    tensors: list[Any]
    storages: list[Any]
    impls: list[Any]
    versions: list[Any]
    addresses: list[Any]
    wrappers: list[Any]


class Stamps:
    """What tells in a later capture which tensors of this one have changed since.

    This does not keep their memory. So another tensor may have the memory of one by then, and what
    is behind it may lie where that of one was: no other storage is where one was that is referred
    to. References to tensors would keep torch.utils.swap_tensors from exchanging those.
    """

    __slots__ = ("_addresses", "_impls", "_storages", "_versions")

    def __init__(
        self,
        storages: Iterable[torch.UntypedStorage],
        impls: Sequence[int],
        versions: Sequence[int],
        addresses: Sequence[int],
    ) -> None:
        self._storages = list(map(StorageWeakRef, storages))
        self._impls, self._versions, self._addresses = impls, versions, addresses

    def changed_since(self, then: Stamps) -> list[int]:
        """The indices of tensors that have changed. Of another tensor, and of one that has got
        another storage or something else behind it, version and address tell nothing."""
        if self._versions == then._versions and self._addresses == then._addresses:
            return []
        both = enumerate(zip(then._rows(), self._rows(), strict=True))
        return [
            index
            for index, ((was, impl, *before), (now, other, *after)) in both
            if was == now and impl == other and before != after
        ]

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        columns = self._storages, self._impls, self._versions, self._addresses
        return zip(*columns, strict=True)


class ColumnRun:
    """Of tensors that were captured one after the other the columns that are the same while the
    structure of the state stays as it is. Runs are equal if they are the same object."""

    __slots__ = ("columns",)

    def __init__(self, *columns: Sequence[Any]) -> None:
        """The columns in the order of the fields of a tensor."""
        self.columns = columns


# A run, or these fields of one tensor.
Part = ColumnRun | tuple[Any, ...]


class Structure:
    """All these columns of a capture, the parts that they came from, and what follows from them.
    Nobody changes it."""

    def __init__(self, columns: Sequence[Sequence[Any]], parts: list[Part] | None = None) -> None:
        self.columns, self.parts = columns, parts
        self.specs: tuple[TensorSpec, ...] = tuple(columns[0])
        self.strided: Sequence[Strided | None] = columns[2]
        self.external: Sequence[bool] = columns[3]
        self.owned: Sequence[bool] = columns[4]
        self._with_copies: dict[tuple[int, ...], Structure] = {}
        # What some of them show that have these forms (Tensors.aliases), by their indices.
        self.shown: dict[tuple[int, ...], list[Any]] = {}

    def with_copies(
        self, copies: Mapping[int, CapturedTensor], numbers: Iterable[Sequence[int]]
    ) -> Structure:
        """The structure once these have been replaced by copies, and numbers by others."""
        key = tuple(copies)
        if key not in self._with_copies:
            columns = list(map(list, self.columns))
            _, _, strided, _, owned, are_gated = columns
            for index in chain.from_iterable(numbers):
                strided[index], owned[index], are_gated[index] = None, True, False
            for index, copy in copies.items():
                for column, value in zip(columns, copy, strict=False):
                    column[index] = value
            self._with_copies[key] = Structure(columns)
        return self._with_copies[key]

    @cached_property
    def eager(self) -> tuple[int, ...]:
        """The indices of those that are copied before save() returns."""
        are_gated = self.columns[5]
        eager = compress(range(len(self.specs)), map(_is_eager, self.specs))
        return tuple([index for index in eager if not (are_gated[index] or self.owned[index])])

    @cached_property
    def small_on_host(self) -> tuple[tuple[int, ...], list[Sequence[int]]]:
        """The indices of small host tensors that are not copies; and apart those of numbers, of
        each dtype."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        others: list[int] = []
        for index, spec in enumerate(self.specs):
            if spec.nbytes <= SMALL_BYTES and not self.external[index] and not self.owned[index]:
                is_number = spec.shape == () and spec.dtype in _NUMBERS
                (numbers[spec.dtype] if is_number else others).append(index)
        return tuple(others), list(map(_as_range, numbers.values()))

    @cached_property
    def on_host(self) -> tuple[bool, ...]:
        return tuple(map(not_, self.external))

    @cached_property
    def lazy(self) -> tuple[int, ...]:
        """The indices of the others."""
        eager = set(self.eager)
        return tuple([index for index in range(len(self.specs)) if index not in eager])

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(map(_nbytes, self.specs))

    @cached_property
    def eager_bytes(self) -> int:
        """The bytes that are copied before save() returns, in capture() or right after it."""
        owned: int = sum(map(_nbytes, compress(self.specs, self.owned)))
        return owned + sum(self.specs[index].nbytes for index in self.eager)

    @cached_property
    def has_lazy_on_host(self) -> bool:
        """Whether host memory is copied that only a gate keeps as it is."""
        return any(
            self.specs[index].nbytes > 0 and not self.external[index] and not self.owned[index]
            for index in self.lazy
        )


class Tensors(Sequence[CapturedTensor]):
    """Captured tensors as columns, in the order of the fields of one."""

    __slots__ = ("__weakref__", "_columns", "_parts", "_structure", "_worked_out", "live")

    def __init__(self, tensors: Iterable[CapturedTensor] = ()) -> None:
        self._parts: list[Part] | None = []  # None: one was replaced since
        self._worked_out = 0  # so many of the parts are in the columns
        self._columns: list[list[Any]] = [[] for _ in _FIELDS[:_STRUCTURE]]
        self.live = LiveColumns([], [], [], [], [], [])
        self._structure: Structure | None = None  # of all, once that is asked for
        for tensor in tensors:
            self.append(tensor)

    @property
    def structure(self) -> Structure:
        """What is the same in other captures, and what follows from it."""
        return self.recognise(None)

    def recognise(self, known: Structure | None) -> Structure:
        """The structure; `known`, if that is equal. Nothing is added or replaced after it."""
        if self._structure is None:
            if known is None or not self._is_of(known):
                known = Structure(self._work_out(), self._parts)
            self._structure = known
        return self._structure

    def _is_of(self, known: Structure) -> bool:
        if self._parts is not None and self._parts == known.parts:
            return True
        if self._work_out() != known.columns:
            return False
        known.parts = self._parts  # the next ones are more like these
        return True

    def _work_out(self) -> list[list[Any]]:
        """The columns of the parts."""
        for part in (self._parts or [])[self._worked_out :]:
            self._worked_out += 1
            if isinstance(part, ColumnRun):
                for column, more in zip(self._columns, part.columns, strict=True):
                    column.extend(more)
            else:
                for column, value in zip(self._columns, part, strict=True):
                    column.append(value)
        return self._columns

    @property
    def specs(self) -> Sequence[TensorSpec]:
        return self._all_columns()[0]

    def append(self, tensor: CapturedTensor) -> None:
        self._add(tensor[:_STRUCTURE])
        for column, value in zip(self.live, tensor[_STRUCTURE:], strict=True):
            column.append(value)

    def extend(self, run: ColumnRun, live: LiveColumns) -> None:
        """Append tensors that were captured one after the other."""
        self._add(run)
        for column, more in zip(self.live, live, strict=True):
            column.extend(more)

    def _add(self, part: Part) -> None:
        if self._parts is None:
            self._parts = [ColumnRun(*map(tuple, self._columns))]
            self._worked_out = 1
        self._parts.append(part)

    def put(self, index: int, tensor: CapturedTensor) -> None:
        """Put another one in this place, in an equal structure."""
        for column, value in zip(self.live, tensor[_STRUCTURE:], strict=True):
            column[index] = value

    def copied(
        self,
        copies: Mapping[int, CapturedTensor],
        numbers: Iterable[tuple[Sequence[int], torch.Tensor]],
    ) -> None:
        """Replace these by copies that nobody else changes; numbers by the elements of a tensor."""
        structure = self.structure.with_copies(copies, [indices for indices, _ in numbers])
        for indices, stack in numbers:
            begin, size = stack.data_ptr(), stack.element_size()
            end = begin + len(indices) * size
            values = stack, stack.untyped_storage(), _impl(stack), version_of(stack)
            for place, value in enumerate(values):
                _put(self.live[place], indices, repeat(value, len(indices)))
            _put(self.live.addresses, indices, range(begin, end, size))
            _put(self.live.wrappers, indices, repeat(None, len(indices)))
        for index, copy in copies.items():
            self.put(index, copy)
        self._structure = structure

    def picked(self, pick: Callable[[Any], Any], known: Structure | None = None) -> Tensors:
        """These, in this order; `known`: the structure of what that gives, if it is known."""
        found = Tensors()
        found.live = LiveColumns._make([list(pick(column)) for column in self.live])
        found._structure, found._parts = known, None
        if known is None:
            found._columns = [list(pick(column)) for column in self.structure.columns]
        return found

    # -- since capture ---------------------------------------------------------------------

    def first_moved(self, indices: Sequence[int]) -> int | None:
        """The first of these that has changed since capture."""
        for begin in range(0, len(indices), BATCH):
            some = indices[begin : begin + BATCH]
            if not self._are_unmoved(some):
                for index in some:
                    if self[index].has_moved:
                        return index
        return None

    def stamps(self, indices: Sequence[int]) -> Stamps:
        """What tells later which of these have changed."""
        columns = self.live.storages, self.live.impls, self.live.versions, self.live.addresses
        return Stamps(*(picked(column, indices) for column in columns))

    def _are_unmoved(self, indices: Sequence[int]) -> bool:
        """Whether none of these has changed; False, too, where that is to be asked one by one."""
        live = self.live
        columns = live.tensors, live.impls, live.versions, live.wrappers
        tensors, impls, versions, wrappers = (picked(column, indices) for column in columns)
        try:
            now, impls_now = read_members(tensors, _STAMPS)
        except RuntimeError:  # inference tensors have no counter
            return False
        if set(map(type, wrappers)) != {type(None)}:
            moved = [0 if each is None else _version(each) for each in wrappers]
            now = list(map(add, now, moved))
        return now == versions and impls_now == impls

    def aliases(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Tensors of their own that show these as they were at capture. Raises TornSnapshot."""
        found: list[torch.Tensor] = []
        for begin in range(0, len(indices), BATCH):
            found += self._aliases(indices[begin : begin + BATCH])
        return found

    def _aliases(self, indices: Sequence[int]) -> list[torch.Tensor]:
        # Half the time of detach(). Nobody asks these for a version.
        aliases = list(map(_data, picked(self.live.tensors, indices)))
        *form, addresses = _shown(aliases)
        form.append(devices_of(aliases))
        if addresses == picked(self.live.addresses, indices) and not any(map(_is_neg, aliases)):
            key, structure = tuple(indices), self.structure
            if structure.shown.get(key) == form:
                return aliases
            if forms_of(aliases, form[-1]) == picked(structure.columns[1], indices):
                structure.shown[key] = form
                return aliases
        return [self[index].alias for index in indices]

    # -- as a sequence ---------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> CapturedTensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[CapturedTensor]: ...

    def __getitem__(self, index: int | slice) -> CapturedTensor | list[CapturedTensor]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        columns = chain(self._all_columns(), self.live)
        return CapturedTensor._make([column[index] for column in columns])

    def __setitem__(self, index: int, tensor: CapturedTensor) -> None:
        for column, value in zip(self._work_out(), tensor, strict=False):
            column[index] = value
        self._parts = None
        self.put(index, tensor)

    def __iter__(self) -> Iterator[CapturedTensor]:
        columns = chain(self._all_columns(), self.live)
        return map(CapturedTensor._make, zip(*columns, strict=True))

    def _all_columns(self) -> Sequence[Sequence[Any]]:
        return self._work_out() if self._structure is None else self._structure.columns

    def __len__(self) -> int:
        return len(self.live.tensors)


def together(live: LiveColumns, numbers: Sequence[int]) -> torch.Tensor:
    """A copy of these single numbers on the host, which have one dtype, in one tensor."""
    first = live.tensors[numbers[0]]
    copy = read_elements(picked(live.addresses, numbers), first.element_size())
    return torch.frombuffer(copy, dtype=first.dtype)


def _as_range(indices: list[int]) -> Sequence[int]:
    """A range where they are equally far apart, such as the numbers among an optimizer's state."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    equal = range(indices[0], indices[-1] + 1, step)
    return equal if indices == list(equal) else tuple(indices)


def _put(column: list[Any], indices: Sequence[int], values: Iterable[Any]) -> None:
    """Put values into these places."""
    if isinstance(indices, range):
        column[indices.start : indices.stop : indices.step] = values
        return
    for index, value in zip(indices, values, strict=True):
        column[index] = value


def picker(indices: Sequence[int]) -> Callable[[Any], Any]:
    """What picks these members of many columns. It takes half the time of picked()."""
    return itemgetter(*indices) if len(indices) > 1 else partial(picked, indices=indices)


def picked(column: Sequence[Any], indices: Iterable[int]) -> list[Any]:
    """These members of a column."""
    return [column[index] for index in indices]


# -- facts -----------------------------------------------------------------------------------------
_local = attrgetter("_local_tensor")
_storage, _storage_ptr = torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr
# What read_members() takes: of an attribute the descriptor.
_STAMPS = list(attrgetter("_version", "_cdata")(torch.Tensor))
_MEMBERS = [*_STAMPS, _storage, _is_neg]
# All that decides where a DTensor lies.
_layout = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta")
# C functions that torch offers to others from 2.10 on. One call says what four of Python say, which
# would also make an object of each size.
EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


class Facts(NamedTuple):
    """What decides specs and strides. The first three are equal exactly when these are, and have no
    other form to rely on. devices: as devices_of() says. layouts: those of DTensors, None for each
    other tensor; no list at all where there is no DTensor."""

    shapes: Any
    strides: Any
    dtypes: Any
    devices: list[int]
    layouts: list[Any]


class BatchFacts(NamedTuple):
    """A batch as it is now. places: what two tensors share when they may be one: addresses, and the
    ids of DTensors."""

    facts: Facts
    live: LiveColumns
    places: list[int]


def read(values: list[Any]) -> BatchFacts | None:
    """What a batch shows; None unless all of it are ordinary tensors, or DTensors of such."""
    wrappers: list[Any] = [None] * len(values)
    tensors, layouts = values, list[Any]()
    try:
        if not ORDINARY.issuperset(map(type, values)):
            if not all(type(value) in ORDINARY or is_dtensor(value) for value in values):
                return None
            wrappers = [None if type(value) in ORDINARY else value for value in values]
            layouts = [None if value is None else layout_of(value) for value in wrappers]
            tensors = [value if type(value) in ORDINARY else _local(value) for value in values]
            if not ORDINARY.issuperset(map(type, tensors)):
                return None  # under way from a collective, or made of others
        shapes, strides, dtypes, addresses = _shown(tensors)
        facts = Facts(shapes, strides, dtypes, devices_of(tensors), layouts)
        versions, impls, storages, are_neg = read_members(tensors, _MEMBERS)
        if any(are_neg):
            return None
    except RuntimeError:  # no memory, no shape, no version: sparse, nested, or of inference mode
        return None
    places = addresses
    if layouts:
        wrapped = list(zip(wrappers, addresses, strict=True))
        places = [address if each is None else id(each) for each, address in wrapped]
        moved = [0 if each is None else _version(each) for each in wrappers]
        versions = list(map(add, versions, moved))
    live = LiveColumns(tensors, storages, impls, versions, addresses, wrappers)
    return BatchFacts(facts, live, places)


def _shown(tensors: list[torch.Tensor]) -> tuple[Any, Any, Any, list[int]]:
    """Shapes, strides, dtypes and addresses. Raises RuntimeError."""
    if EXCHANGE is not None:
        with suppress(RuntimeError, BufferError):  # some kinds of tensors are not in it
            return read_forms(tensors, EXCHANGE)
    sizes, strides = list(map(_size, tensors)), list(map(_stride, tensors))
    return sizes, strides, list(map(_dtype, tensors)), list(map(_data_ptr, tensors))


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """What decides where a DTensor lies."""
    return (*_layout(tensor), getattr(tensor._spec, "shard_order", None))


def storage_addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Of the storages of ordinary tensors and DTensors; None where one is neither, or has none."""
    local = tensors
    if not ORDINARY.issuperset(map(type, tensors)):
        local = [_local(each) if is_dtensor(each) else each for each in tensors]
        if not ORDINARY.issuperset(map(type, local)):
            return None
    try:
        return list(map(_storage_ptr, map(_storage, local)))
    except RuntimeError:  # sparse, or nested
        return None
