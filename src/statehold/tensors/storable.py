"""What capture and restore both have to know about a tensor: whether a step can hold it, and where
its bytes are.

Owns: the checks of tensors and of objects with state; addresses, strides and version counters of
memory.
Invariants: of a DTensor, what counts is the local tensor.
Not here: what a capture does with them (captured), what a restore fills (destinations).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import Box

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
Memory = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool]

# The kind that a value is of, and the thing itself (kinds).
KindOf = Callable[[Any], tuple[Any, Any] | None]

PROTOCOL = ("__tensor_flatten__", "__tensor_unflatten__")
# Types of tensors that are neither made of others nor boxes of one on several ranks.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a box of one that several ranks hold."""
    if type(tensor) in _PLAIN_TYPES:
        return False
    # Importing it takes long, and without it there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a tensor: the tensor itself where it is no DTensor.

    It may still be under way from a collective (AsyncCollectiveTensor); to_local() without grad
    waits for it.
    """
    if type(tensor) in _PLAIN_TYPES or not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) is torch.Tensor:
        return local
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def boxed(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor around this rank's part, with the mesh and the placements of another one."""
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    with torch.no_grad():
        made: torch.Tensor = dtensor.from_local(
            local,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    return made


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Refuse tensors without plain memory of their own."""
    kind = _refused_kind(tensor)
    if kind is not None:
        what, hint = kind
        facts = {"path": path, "type": name_of(type(tensor))}
        raise UnsupportedValueError(f"{what} cannot be stored", facts=facts, hint=hint)


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a step can hold the tensor, its dtype aside."""
    return _refused_kind(tensor) is None


def _refused_kind(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.is_nested:
        return "a nested tensor", "store its values and offsets"
    if type(tensor) not in _PLAIN_TYPES:
        if is_dtensor(tensor):
            return _refused_kind(local_of(tensor))
        if type(tensor).__name__ == "ShardedTensor":
            return "a ShardedTensor", "shard with fully_shard (FSDP2), whose DTensors can be stored"
        if torch.nn.parameter.is_lazy(tensor):
            return "an uninitialized parameter", "run the model once before saving or restoring"
        allow = "allow it with statehold.allow_tensor_class"
        if not says_what_it_is_made_of(type(tensor)):
            allow = f"give its class {' and '.join(PROTOCOL)} and {allow}"
        return "a tensor subclass", f"{allow}, or store the tensors it is made of"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no data,", "materialize it before saving or restoring"
    if tensor.is_mkldnn:
        return "a tensor of oneDNN", "store to_dense()"
    if tensor.layout is not torch.strided:
        return "a sparse tensor", "store its indices and values, or to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor", "store int_repr(), and the scales and zero points"
    return None


def says_what_it_is_made_of(cls: type) -> bool:
    """Whether a tensor class can be taken apart and put together by its own methods."""
    return all(callable(getattr(cls, name, None)) for name in PROTOCOL)


def is_stateful(value: Any) -> bool:
    """Whether `value` can give and take its state itself. A class is not an object with state."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def name_of(cls: type) -> str:
    """Module and qualified name of a class, as a step has it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_external(tensor: torch.Tensor) -> bool:
    """Whether the processor cannot reach the memory: copying it is `device`'s work."""
    return not tensor.is_cpu


def devices_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of each the number of its device; -1 where the processor reaches the memory."""
    return list(map(torch.Tensor.get_device, tensors))


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device whose streams have the work on the memory of an external tensor."""
    return tensor.device


def empty_on(
    device: torch.device,
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """New memory of a device, or of the host; contiguous where no strides are given."""
    if strides is None:
        strides = torch.empty(tuple(shape), device="meta").stride()
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)


def is_view_of_other_values(tensor: torch.Tensor) -> bool:
    """Whether the memory holds other values than the tensor shows: conjugate and negative views
    are flags."""
    return tensor.is_conj() or tensor.is_neg()


def without_flags(tensor: torch.Tensor) -> torch.Tensor:
    """A view that shows the values that are in the memory."""
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.conj() if tensor.is_conj() else tensor


def memory_of(tensor: torch.Tensor) -> Memory:
    """What two tensors have in common exactly when they are the same elements of memory, shown
    the same way."""
    shape, is_conj, is_neg = tuple(tensor.shape), tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), is_conj, is_neg


def strides_of(tensor: torch.Tensor) -> Strided | None:
    """(itemsize, shape, strides in elements) of a tensor that is not contiguous, else None."""
    if tensor.is_contiguous():
        return None
    return tensor.element_size(), tuple(tensor.shape), tensor.stride()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether an element of memory stands for several of the tensor (expanded dimensions)."""
    if 0 not in (strides := tensor.stride()):
        return False
    return any(not stride and size > 1 for size, stride in zip(tensor.shape, strides, strict=True))


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements `box` of a tensor, as a view."""
    for dim, (begin, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, size)
    return tensor


# -- storages and versions -------------------------------------------------------------------------
# These facts about PyTorch decide what is here and in a capture.
# - A detached tensor shares storage and version counter with its origin, and keeps the old storage
#   when `.data` of the origin is replaced. A save holds on to one, or to the tensor and its
#   storage.
# - In-place operations move the counter: under no_grad and inference_mode, through views and
#   `out=`, by foreach optimizers. These change memory without moving it (torch 2.13): **fused**
#   optimizers (only `step` moves, so SGD leaves no trace), running statistics of batch norm,
#   `.data` and NumPy views, writes to the storage, foreign kernels. That is why the gate waits
#   instead of comparing, why buffers are eager, and why a moved counter proves a torn copy but an
#   unmoved one proves nothing.
# - `.data = other` and `set_` leave a detached alias on the old storage, with the old bytes.
#   `untyped_storage().resize_()` frees it under the alias: nothing can be done about that.
# - A DTensor has two counters (torch 2.13). In-place operations on the DTensor, its detach() and
#   views, under no_grad and inference_mode, by for-loop optimizers and copy_, move the counter of
#   the **wrapper** only. Operations on `_local_tensor` and to_local() move that of the **local**
#   tensor only. **foreach** (also of optimizers), fused optimizers and `.data` move neither. Both
#   only grow, so their sum moves when either does. What a foreach update leaves is the counter of
#   `step`.
# - Inference tensors have no counter, and a detached alias of one pretends to: they are eager.


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage, which all views of it share."""
    return tensor.untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor, wrapper: torch.Tensor | None = None) -> int:
    """The version counter; -1 for inference tensors, which have none. With the DTensor around the
    tensor, the sum of both counters."""
    if tensor.is_inference():
        return -1
    counted = (tensor,) if wrapper is None else (tensor, wrapper)
    return sum(each._version for each in counted)


# The address of what is behind a tensor, or a storage.
impl_of: Callable[[Any], int] = attrgetter("_cdata")
