"""Transfers, and parts of large ones, made by a bounded number of threads at once.

Invariants: when a call returns or raises, none of its work is under way any more, so the caller may
use its memory again. A fork has threads of its own.
Not here: how a part is moved (client, checkpoint/levels/hosts/remote).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

# Bytes of a file from an offset on, and their destination in memory.
Target = tuple[int, memoryview]


T = TypeVar("T")


class Parallel:
    """Up to `threads` calls at once. Thread-safe, but a call must not wait for others of its
    own."""

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._name = name
        self._guard = threading.Lock()
        self._pid = 0
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of the calls, in order; raises the first exception of a call."""
        if len(calls) <= 1:  # without the cost of another thread
            return [call() for call in calls]
        threads = self._pool()
        running = [threads.submit(call) for call in calls]
        try:
            return [each.result() for each in running]
        finally:
            for each in running:
                each.cancel()
            wait(running)

    def move(
        self, targets: Sequence[Target], part_bytes: int, move: Callable[[int, memoryview], None]
    ) -> None:
        """Call `move` for each part of `targets`, of `part_bytes` at most."""
        self(
            [
                partial(move, begin + at, flat[at : at + part_bytes])
                for begin, memory in targets
                for flat in [memory.cast("B")]
                for at in range(0, len(flat), part_bytes)
            ]
        )

    def close(self) -> None:
        """End the threads; the next use starts new ones."""
        with self._guard:
            threads, self._threads = self._threads, None
        if threads is not None and self._pid == os.getpid():
            threads.shutdown()

    def _pool(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._threads is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._threads = ThreadPoolExecutor(self._count, self._name)
            return self._threads
