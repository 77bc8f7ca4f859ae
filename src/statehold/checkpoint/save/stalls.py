"""Logs which storage a save waits for, if it waits long.

A call that hangs in the kernel, because a server is gone, cannot be cancelled, and it may still use
its memory. So a save stays with the level that has taken it, and later saves wait. This module logs
one warning for each such save, from a thread that waits for nobody.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from statehold.checkpoint.save.work import Work
from statehold.observe.background_log import BackgroundLog

STALL_S = 60.0


class Stalls:
    """Warns of saves that are not written after `after_s`."""

    def __init__(self, log: BackgroundLog, after_s: float = STALL_S) -> None:
        self._log = log
        self._after_s = after_s

    @contextlib.contextmanager
    def watching(self, work: Work) -> Iterator[None]:
        timer = threading.Timer(self._after_s, self._warn, (work,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the interpreter ends, or there are no threads
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warn(self, work: Work) -> None:
        self._log.warning(
            "step %d is not written at level %s after %g s: %s is slow or does not answer, here "
            "or on a rank that this one waits for. Later saves wait, too",
            work.save.step, work.place.name, self._after_s, work.place.store.root,
        )  # fmt: skip
