"""What capture and restore both have to know about a tensor: whether a step can hold it, and where
its bytes are.

Facts about PyTorch that decide what is here:
- A detached tensor shares storage and version counter with its origin, and keeps the old storage
  when `.data` of the origin is replaced. So a detached alias is what a save holds on to.
- In-place operations move the counter: under no_grad and inference_mode, through views and
  `out=`, by foreach optimizers. These change memory without moving it (torch 2.13): **fused**
  optimizers (only `step` moves, so SGD leaves no trace), running statistics of batch norm,
  `.data` and NumPy views, writes to the storage, foreign kernels. That is why the gate waits
  instead of comparing, why buffers are eager, and why a moved counter proves a torn copy but an
  unmoved one proves nothing.
- `.data = other` and `set_` leave a detached alias on the old storage, with the old bytes.
  `untyped_storage().resize_()` frees it under the alias: nothing can be done about that.
- Inference tensors have no counter, and a detached alias of one pretends to: they are eager.
- Conjugate and negative views are flags: their memory holds other values than they show.
"""

from __future__ import annotations

import torch

from statehold.errors import UnsupportedValueError

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
Memory = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Refuse tensors without plain memory of their own."""
    kind = _refused_kind(tensor)
    if kind is not None:
        what, hint = kind
        raise UnsupportedValueError(
            f"{what} cannot be stored", facts={"path": path, "type": _type_name(tensor)}, hint=hint
        )


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a step can hold the tensor, its dtype aside."""
    return _refused_kind(tensor) is None


def _refused_kind(tensor: torch.Tensor) -> tuple[str, str] | None:
    if type(tensor) not in _PLAIN_TYPES:
        if torch.nn.parameter.is_lazy(tensor):
            return "an uninitialized parameter", "run the model once before saving or restoring"
        return "a tensor subclass", "store the plain tensors that it is made of"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no data,", "materialize it before saving or restoring"
    if tensor.layout is not torch.strided:
        return "a sparse tensor", "store its indices and values, or to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor", "store int_repr(), and the scales and zero points"
    if tensor.is_nested:
        return "a nested tensor", "store its values and offsets"
    return None


def _type_name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def is_external(tensor: torch.Tensor) -> bool:
    """Whether the processor cannot reach the memory: copying it is `device`'s work."""
    return tensor.device.type != "cpu"


def is_view_of_other_values(tensor: torch.Tensor) -> bool:
    """Whether the memory holds other values than the tensor shows (conjugate, negative)."""
    return tensor.is_conj() or tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> Memory:
    """What two tensors have in common exactly when they are the same elements of memory."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def strides_of(tensor: torch.Tensor) -> Strided | None:
    """(itemsize, shape, strides in elements) of a tensor that is not contiguous, else None."""
    if tensor.is_contiguous():
        return None
    return tensor.element_size(), tuple(tensor.shape), tensor.stride()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether an element of memory stands for several of the tensor (expanded dimensions)."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage, which all views of it share."""
    return tensor.untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version
