"""Bytes and elements of tensors: how they are shown, so that every device can copy them."""

from __future__ import annotations

import ctypes

import torch

# A copy of this size takes longer than the launch of one; what is smaller goes together.
SMALL_BYTES = 256 << 10

# With less scratch than this, a tensor that is not contiguous cannot be copied.
SCRATCH_BYTES_MIN = 64 << 10

# What elements are moved as: every device has kernels for these.
_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOVED_AS_THEY_ARE = {torch.float32, torch.bfloat16, torch.float16, *_BY_ITEMSIZE.values()}


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same elements, of a dtype that keeps all their bits. It has no flags."""
    if tensor.dtype in _MOVED_AS_THEY_ARE:
        return tensor
    return tensor.view(_BY_ITEMSIZE[tensor.element_size()])


def flat(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of a contiguous tensor without flags."""
    # Not view(-1): a single element may have any stride, and keeps it.
    whole = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return whole if whole.numel() == nbytes else whole.narrow(0, offset, nbytes)


def host_memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor of the host, to read and write, from its first element to its last
    one. The tensor lives as long as the view."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in places) if tensor.numel() else 0
    memory = (ctypes.c_char * (elements * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
