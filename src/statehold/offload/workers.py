"""Threads that run torch on one processor each, for many short operations on different tensors.

torch can spread one operation over threads of its own, which meet at its end. With operations of a
fraction of a millisecond that costs more than it gains, and where other threads want the processors
it costs a hundred times as much.

Invariants: there are as many threads as torch used for one operation when they were made. On all
other threads torch goes on as it was.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from statehold.process.worker import Crew, Task

# Elements of a strip at most: 28 bytes each. Python takes about 0.1 ms for a strip, and only one
# thread at a time runs Python. That is a tenth of the arithmetic of so many elements.
STRIP = 1 << 20

T = TypeVar("T")


class Workers:
    """`count` threads, each with memory for the gradients of a strip."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        begun = queue.SimpleQueue[None]()
        self._own = threading.local()

        def begin() -> None:
            torch.set_num_threads(1)  # on this thread, and on those that begin to use torch later
            begun.put(None)

        self._pool = Crew("statehold-update", self.count, begin)
        for _ in range(self.count):
            begun.get()
        torch.set_num_threads(self.count)

    def run(self, call: Callable[[T], None], items: Iterable[T]) -> None:
        """Call `call` with each item. Returns when all calls have; raises an error of theirs."""
        tasks = list[Task[None]]()
        try:
            for item in items:
                tasks.append(self._pool.submit(call, item))
        finally:
            errors = [task.error() for task in tasks]
        for error in errors:
            if error is not None:
                raise error

    def scratch(self) -> torch.Tensor:
        """The memory of this thread, which is one of them: STRIP elements in float32."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = torch.empty(STRIP, dtype=torch.float32, device="cpu")
        scratch: torch.Tensor = self._own.scratch
        return scratch

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
