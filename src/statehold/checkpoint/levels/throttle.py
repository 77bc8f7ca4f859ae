"""The speed of copies to a level: a limit in bytes a second, and the priority of the training.

Invariants: a copy never exceeds the limit, even if earlier time was unused. It makes up for short
delays. A waiting thread is woken at once when the copy is to stop.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from statehold.errors import ClosedError

BURST_S = 0.25
NICENESS = 10  # a tenth of the processor if the training wants all of it; never nothing


def give_way_to_training() -> None:
    """Give this thread, and those that it starts, only the processor time that others leave."""
    with contextlib.suppress(OSError):  # a thread is a process to Linux; elsewhere nothing changes
        thread = threading.get_native_id()
        nice = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)


class Throttle:
    """Call it with a number of bytes before they are moved; it returns when they may pass.

    give_way: returns when no save needs the processors and the memory more; may be replaced at any
        time. Raises ClosedError after stop().
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        give_way: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self.give_way = give_way
        self._clock = clock
        self._stopped = threading.Event()
        self._free_s = 0.0  # when the bytes that have passed so far are paid for

    def begin(self) -> None:
        """A copy begins; unused time before it does not count."""
        self._free_s = max(self._free_s, self._clock())

    def __call__(self, nbytes: int) -> None:
        self.give_way()
        if self._bytes_per_s is not None:
            self._free_s = max(self._free_s, self._clock() - BURST_S)
            delay_s = self._free_s - self._clock()
            self._free_s += nbytes / self._bytes_per_s
            if delay_s > 0:
                self._stopped.wait(delay_s)
        if self._stopped.is_set():
            raise ClosedError("a copy to another level was stopped")

    def stop(self) -> None:
        """Let no more bytes pass."""
        self._stopped.set()
