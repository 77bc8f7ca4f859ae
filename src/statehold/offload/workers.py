"""Threads that run torch on one processor each, for many short operations on different tensors.

torch can spread one operation over threads of its own, which meet at its end. With operations of a
fraction of a millisecond that costs more than it gains, and where other threads want the processors
it costs a hundred times as much.

Invariants: there are as many threads as torch used for one operation when they were made. On all
other threads torch goes on as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# Elements of a strip at most: 28 bytes each. Python takes about 0.1 ms for a strip, and only one
# thread at a time runs Python. That is a tenth of the arithmetic of so many elements.
STRIP = 1 << 20

T = TypeVar("T")


class Workers:
    """`count` threads, each with memory for the gradients of a strip."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        begun = threading.Barrier(self.count + 1)
        self._own = threading.local()

        def begin() -> None:
            self._own.scratch = torch.empty(STRIP, dtype=torch.float32, device="cpu")
            torch.set_num_threads(1)  # on this thread, and on those that begin to use torch later
            begun.wait()

        self._pool = ThreadPoolExecutor(self.count, "statehold-update", begin)
        for _ in range(self.count):
            self._pool.submit(int)
        begun.wait()
        torch.set_num_threads(self.count)

    def run(self, call: Callable[[T], None], items: Iterable[T]) -> None:
        """Call `call` with each item. Returns when all calls have; raises an error of theirs."""
        futures = [self._pool.submit(call, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def scratch(self) -> torch.Tensor:
        """The memory of this thread, which is one of them: STRIP elements in float32."""
        scratch: torch.Tensor = self._own.scratch
        return scratch

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
