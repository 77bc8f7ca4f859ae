"""A column of simulated members in one process: threads that sum tensors, and failures of that.

Invariants: members have to start the same operations, with tensors of one size and type. The order
of addition is that of `order`. An operation that has failed still writes into its tensors, later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WAIT_S = 60


class Lost(Exception):
    """What an operation raises whose group is lost."""


@dataclass
class Operation:
    """One all_reduce(SUM) of all members."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    is_over: bool = False


class Column:
    """`size` members. Operation `fails_at` and those after it fail."""

    def __init__(
        self, size: int, order: Sequence[int] | None = None, fails_at: int | None = None
    ) -> None:
        self.size = size
        self.order = order or range(size)
        self.fails_at = fails_at
        self.operations: list[Operation] = []
        self.counts = [0] * size
        self._changed = threading.Condition()

    def start(self, member: int) -> Callable[[Tensor], Any]:
        """The Start of a member."""

        def start(tensor: Tensor) -> Any:
            assert tensor.is_contiguous()
            with self._changed:
                number = self.counts[member]
                self.counts[member] += 1
                if number == len(self.operations):
                    self.operations.append(Operation())
                operation = self.operations[number]
                operation.tensors[member] = tensor
                if len(operation.tensors) == self.size and not self._fails(number):
                    self._add(operation)
                self._changed.notify_all()
            return _Pending(self, number)

        return start

    def _fails(self, number: int) -> bool:
        return self.fails_at is not None and number >= self.fails_at

    def _add(self, operation: Operation) -> None:
        tensors = [operation.tensors[member] for member in self.order]
        assert len({(each.shape, each.dtype) for each in tensors}) == 1
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total)
        operation.is_over = True

    def wait(self, number: int) -> None:
        with self._changed:
            if self._fails(number):
                raise Lost(f"operation {number}")
            is_over = self._changed.wait_for(lambda: self.operations[number].is_over, WAIT_S)
            assert is_over, f"operation {number} waits for members: {self.counts}"

    def haunt(self) -> int:
        """Write what failed operations still write; returns how many tensors that were."""
        failed = [each for each in self.operations if not each.is_over]
        for operation in failed:
            for tensor in operation.tensors.values():
                tensor.fill_(123)
        return sum(len(each.tensors) for each in failed)


@dataclass(frozen=True)
class _Pending:
    column: Column
    number: int

    def wait(self) -> None:
        self.column.wait(self.number)


def together(act: Callable[[int], Any], members: int) -> list[Any]:
    """act(member) of all members at the same time."""
    with ThreadPoolExecutor(members) as pool:
        return [each.result() for each in [pool.submit(act, member) for member in range(members)]]


def bits_of(tensor: Tensor | None) -> bytes | None:
    """What two tensors have in common if they are the same bit for bit."""
    if tensor is None:
        return None
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())
