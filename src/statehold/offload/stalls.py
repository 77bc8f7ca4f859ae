"""Waits for transfers, and logs which of them take long.

A call that hangs in the kernel, because a server is gone, cannot be cancelled, and it may still use
its memory. So an update waits for it. The log says what it waits for after STALL_S, and again each
time the wait has doubled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager

logger = logging.getLogger("statehold")

STALL_S = 60.0


class StallWatch:
    """What the threads of an optimizer do with its paths. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._doing: dict[str, float] = {}

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around one thing that is done: "reading subgroup 3 from /nvme0"."""
        with self._guard:
            self._doing[what] = time.perf_counter()
        try:
            yield
        finally:
            with self._guard:
                del self._doing[what]

    def wait_for_one(self, moving: Collection[Future[None]]) -> set[Future[None]]:
        """Wait until at least one of them is done; returns those that are."""
        pause_s = STALL_S
        while not (done := wait(moving, pause_s, FIRST_COMPLETED).done):
            pause_s *= 2
            self._warn()
        return done

    def wait_for_all(self, moving: Collection[Future[None]]) -> None:
        """Wait until all of them are done."""
        left = set(moving)
        while left:
            left -= self.wait_for_one(left)

    def _warn(self) -> None:
        now = time.perf_counter()
        with self._guard:
            doing = list(self._doing.items())
        for what, begin in doing:
            logger.warning(
                "an update waits: %s takes %.3g s so far. The path or device is slow or does not "
                "answer, or another process has the turn there",
                what, now - begin,
            )  # fmt: skip
