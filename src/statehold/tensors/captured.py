"""What a capture holds: each tensor of a state with its spec, as it was then; and copies of some.

Owns: what is external, what is eager and when, and what has been changed since.
Invariants: a captured tensor is an alias that keeps the memory alive at the address it had at
capture, with the version counter of then.
Not here: which tensors a state has, and which of them are eager (capture).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

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


@dataclass(slots=True)
class CapturedTensor:
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


@dataclass(slots=True)
class Capture:
    """A state at the time of `capture`. `tensors` are distinct in memory; ties are in the tree.

    note: what the user could hand over so that save() returns earlier; "" if nothing.
    doubts: what a restore will not put back, and what the user can do about it now.
    numbers: what of the tree lies on devices, to be filled in before the save is staged.
    """

    tensors: list[CapturedTensor]
    tree: Any
    note: str = ""
    doubts: list[str] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    _settled: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

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
        for captured in self.tensors:
            if captured.eager is not eager or captured.version < 0:
                continue
            if version_of(captured.tensor, captured.wrapper) != captured.version:
                return captured.spec.name
        return None

    @property
    def eager_bytes(self) -> int:
        """The bytes that are copied before save() returns, in capture() or right after it."""
        return sum(each.spec.nbytes for each in self.tensors if each.eager or each.owned)


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


def clone_small_host_tensors(tensors: list[CapturedTensor]) -> None:
    """Copy small host tensors now; see SMALL_BYTES."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(tensors):
        if each.spec.nbytes <= SMALL_BYTES and not each.external and not each.owned:
            if each.spec.shape == () and each.spec.dtype in _NUMBERS:
                numbers[each.spec.dtype].append(index)
            else:
                tensors[index] = _owned_copy(each)
    for indices in numbers.values():
        _clone_together(tensors, indices)


def _clone_together(tensors: list[CapturedTensor], indices: list[int]) -> None:
    """Copy numbers of one dtype into one new tensor; a clone of each takes three times as long."""
    copies = torch.stack([tensors[index].tensor for index in indices])
    version, address, size = version_of(copies), copies.data_ptr(), copies.element_size()
    for place, (index, copy) in enumerate(zip(indices, copies.unbind(), strict=True)):
        at = address + place * size
        spec = tensors[index].spec
        tensors[index] = CapturedTensor(spec, copy, version, at, None, False, True, None)


def clone_eager_device_tensors(tensors: list[CapturedTensor]) -> None:
    """Copy the eager tensors of devices there, if they are small in all and there is memory."""
    eager = [index for index, each in enumerate(tensors) if each.external and each.eager]
    if sum(tensors[index].spec.nbytes for index in eager) > CLONED_BYTES_MAX:
        return
    try:
        clones = [_owned_copy(tensors[index]) for index in eager]
    except torch.OutOfMemoryError:
        return  # none at all: save() waits in any case
    for index, clone in zip(eager, clones, strict=True):
        tensors[index] = clone
