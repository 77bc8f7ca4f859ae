"""Parts of large transfers, moved by a bounded number of threads at once.

Holds: when a call returns or raises, none of its parts is under way any more: whoever gave the
memory may use it again. A fork has threads of its own.
Not here: how a part is moved (object_client, levels/remote).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

__all__ = ["Parallel", "Target"]

# Bytes of a file from an offset on, and the memory that they go to.
Target = tuple[int, memoryview]


class Parallel:
    """Moves parts of `part_bytes` with `threads` threads; thread-safe."""

    def __init__(self, threads: int, part_bytes: int, name: str) -> None:
        self._count = threads
        self._part_bytes = part_bytes
        self._name = name
        self._guard = threading.Lock()
        self._pid = 0
        self._threads: ThreadPoolExecutor | None = None

    def move(self, targets: Sequence[Target], move: Callable[[int, memoryview], None]) -> None:
        """Call `move` for each part of `targets`; raises what one of the calls has raised."""
        parts = [part for target in targets for part in self._cut(*target)]
        if len(parts) <= 1:  # without the way to another thread
            for begin, memory in parts:
                move(begin, memory)
            return
        threads = self._pool()
        moves = [threads.submit(move, begin, memory) for begin, memory in parts]
        try:
            for each in moves:
                each.result()
        finally:
            for each in moves:
                each.cancel()
            wait(moves)

    def close(self) -> None:
        """End the threads; the next use starts new ones."""
        with self._guard:
            threads, self._threads = self._threads, None
        if threads is not None and self._pid == os.getpid():
            threads.shutdown()

    def _cut(self, begin: int, memory: memoryview) -> list[Target]:
        flat, step = memory.cast("B"), self._part_bytes
        return [(begin + at, flat[at : at + step]) for at in range(0, len(flat), step)]

    def _pool(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._threads is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._threads = ThreadPoolExecutor(self._count, self._name)
            return self._threads
