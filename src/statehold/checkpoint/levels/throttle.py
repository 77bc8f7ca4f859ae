"""How fast a level is written: a limit in bytes a second, and the right of way of the training.

Invariants: a copy takes no more than the limit, whatever was not taken before it began; what it
loses to a short delay it catches up with. Whoever waits here is woken at once when it is to stop.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from statehold.errors import ClosedError

__all__ = ["Throttle", "give_way_to_training"]

BURST_S = 0.25
NICENESS = 10  # a tenth of the processor where the training wants all of it; never nothing


def give_way_to_training() -> None:
    """Let this thread, and those that it starts, run when others leave the processor to them."""
    with contextlib.suppress(OSError):  # a thread is a process to Linux; elsewhere nothing changes
        thread = threading.get_native_id()
        nice = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)


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

    def begin(self) -> None:
        """A copy begins: it is owed nothing of the time in which there was none."""
        self._free_s = max(self._free_s, self._clock())

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
