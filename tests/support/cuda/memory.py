"""Memory of an emulated device: host memory that is known to belong to it, and is counted.

Invariants: a block is given back when its last tensor goes, as to a caching allocator: the memory
is overwritten in the order of the stream that took it. Work that other streams still have with it
then meets POISON, unless somebody has made sure of the order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch

POISON = 0xA5


class Block:
    """Some bytes of a device. `storage` outlives the tensors that programs see."""

    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.bytes = np.full(max(nbytes, 1), POISON, np.uint8)
        self.storage = torch.from_numpy(self.bytes).untyped_storage()

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def poison(self) -> None:
        self.bytes.fill(POISON)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of memory as `tensor`, which lies in this block, without keeping it."""
        shadow = torch.empty(0, dtype=tensor.dtype)
        shadow.set_(self.storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return _flagged(shadow, tensor)


def _flagged(shadow: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj():
        shadow = shadow.conj()
    return torch._neg_view(shadow) if tensor.is_neg() else shadow


class Memory:
    """The blocks of all devices. `limits`: bytes by device, beyond which none is left."""

    def __init__(self, freed: Callable[[Block, object], None]) -> None:
        self.limits: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self._freed = freed
        self._blocks: dict[int, Block] = {}

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block in which a tensor lies; None for host memory, and for sparse tensors."""
        if tensor.layout is not torch.strided:
            return None
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def block_at(self, address: int, nbytes: int) -> tuple[Block, int]:
        """The block that holds these bytes, and where they begin in it."""
        for block in list(self._blocks.values()):
            if block.address <= address and address + nbytes <= block.address + block.nbytes:
                return block, address - block.address
        raise AssertionError("a copy reads memory that is no device's, or is given back")

    def empty(
        self,
        device: int,
        stream: object,
        shape: Iterable[int],
        stride: Iterable[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """A new tensor on a device, taken by `stream`."""
        shape, stride = tuple(shape), tuple(stride)
        items = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        nbytes = dtype.itemsize * (items if math.prod(shape) else 0)
        self._count(device, nbytes)
        block = Block(device, nbytes)
        visible = block.bytes.view()
        self._blocks[block.address] = block
        weakref.finalize(visible, self._free, block, stream).atexit = False
        tensor = torch.empty(0, dtype=dtype)
        return tensor.set_(torch.from_numpy(visible).untyped_storage(), 0, shape, stride)

    def _count(self, device: int, nbytes: int) -> None:
        now = self.allocated.get(device, 0) + nbytes
        if now > self.limits.get(device, now):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        self.allocated[device] = now
        self.peak[device] = max(now, self.peak.get(device, 0))

    def _free(self, block: Block, stream: object) -> None:
        del self._blocks[block.address]
        self.allocated[block.device] -= block.nbytes
        self._freed(block, stream)


class Pins:
    """Host memory that the devices reach themselves. Errors are those of the CUDA runtime."""

    ALREADY, NEVER = 712, 713

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}  # address -> bytes
        self.calls: list[tuple[str, int]] = []
        self.most = 0

    def add(self, address: int, nbytes: int) -> int:
        self.calls.append(("pin", address))
        overlaps = (a < address + nbytes and address < a + n for a, n in self.ranges.items())
        if any(overlaps):
            return self.ALREADY
        self.ranges[address] = nbytes
        self.most = max(self.most, sum(self.ranges.values()))
        return 0

    def remove(self, address: int) -> int:
        self.calls.append(("unpin", address))
        return 0 if self.ranges.pop(address, None) else self.NEVER

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a copy may go to or from this host memory by itself."""
        return self.hold_bytes(tensor.data_ptr(), tensor.nbytes)

    def hold_bytes(self, address: int, nbytes: int) -> bool:
        """The same, by address."""
        inside = [
            a <= address and address + nbytes <= a + n
            for a, n in self.ranges.items()
            if a < address + nbytes and address < a + n
        ]
        if len(inside) > 1:
            raise RuntimeError("CUDA error: invalid argument: a copy spans two pinned ranges")
        return inside == [True]

    def begin(self, tensor: torch.Tensor) -> bool:
        """What is_pinned() says: whether the storage of a tensor begins in pinned memory."""
        at = tensor.untyped_storage().data_ptr()
        return any(a <= at < a + n for a, n in self.ranges.items())

    def forked(self) -> list[int]:
        """The addresses of ranges that a child would have, too, as the kernel sees it (proc(5))."""
        found, begin, end = [], 0, 0
        with open("/proc/self/smaps", encoding="utf-8") as mappings:
            for line in mappings:
                first, *rest = line.split()
                if first == "VmFlags:" and "dc" not in rest:
                    found += [a for a, n in self.ranges.items() if a < end and begin < a + n]
                elif not first.endswith(":"):
                    begin, end = (int(each, 16) for each in first.split("-"))
        return found
