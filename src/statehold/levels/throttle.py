"""How fast a level is written: a limit in bytes a second, and the right of way of saves.

Holds: over any time longer than BURST_S no more than the limit passes, and what was lost to a short
delay is caught up with; whoever waits here is woken at once when it is to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from statehold.errors import ClosedError

__all__ = ["Throttle"]

BURST_S = 0.25


class Throttle:
    """Call it with a number of bytes ahead of moving them; it returns when they may pass.

    give_way: returns when no save needs the processors and the memory more. Raises ClosedError once
    stop() was called.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        give_way: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._give_way = give_way
        self._clock = clock
        self._stopped = threading.Event()
        self._free_s = 0.0  # when what has passed so far is paid for

    def __call__(self, nbytes: int) -> None:
        self._give_way()
        if self._bytes_per_s is not None:
            self._free_s = max(self._free_s, self._clock() - BURST_S)
            delay_s = self._free_s - self._clock()
            self._free_s += nbytes / self._bytes_per_s
            if delay_s > 0:
                self._stopped.wait(delay_s)
        if self._stopped.is_set():
            raise ClosedError("a copy to another level was stopped")

    def stop(self) -> None:
        """Let nothing pass any more."""
        self._stopped.set()
