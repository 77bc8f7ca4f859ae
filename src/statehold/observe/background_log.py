"""Log lines of background threads, written by a thread of their own.

Invariants: only flush() blocks. Code that only reports something never makes it fail: a committed
save stays committed.

Not here: lines of the trainer's own thread, which writes them itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import ParamSpec

from statehold.process.worker import Thread

logger = logging.getLogger("statehold")

# -- the log ---------------------------------------------------------------------------------------
# A handler may block as long as it likes: standard error can be a pipe that nobody reads. A thread
# that logs then waits, and the thread that commits steps must not. So this only queues the lines,
# in order. A thread writes them, and ends when there are no more. The thread is not a daemon, so
# the interpreter waits for it at exit, as it would for a print(). If more than LINES_MAX lines
# wait, the oldest are dropped.


LINES_MAX = 1000

Line = tuple[int, str, tuple[object, ...], Mapping[str, object] | None]


class BackgroundLog:
    """The log of background threads. Only flush() blocks."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a signal's handler may log inside it
        self._waiting: deque[Line] = deque(maxlen=LINES_MAX)
        self._writer: Thread | None = None
        self._warned: set[tuple[object, ...]] = set()

    def info(self, text: str, *values: object) -> None:
        self._queue(logging.INFO, text, values)

    def figures(self, text: str, figures: Mapping[str, object]) -> None:
        """A sentence for people, and the same for programs as the record's `statehold`."""
        self._queue(logging.INFO, "%s", (text,), {"statehold": figures})

    def warning(self, text: str, *values: object) -> None:
        self._queue(logging.WARNING, text, values)

    def warn_once(self, text: str, *values: object) -> None:
        """A warning that comes once with these values."""
        if (text, *values) not in self._warned:
            self._warned.add((text, *values))
            self.warning(text, *values)

    def error(self, text: str, *values: object) -> None:
        self._queue(logging.ERROR, text, values)

    def flush(self) -> None:
        """Return once every line so far is written."""
        writer = self._writer
        if writer is not None:
            writer.join()

    def _queue(
        self,
        level: int,
        text: str,
        values: tuple[object, ...],
        extra: Mapping[str, object] | None = None,
    ) -> None:
        if not logger.isEnabledFor(level):
            return
        with self._guard:
            self._waiting.append((level, text, values, extra))
            if self._writer is None:
                writer = Thread(self._write, "statehold-log", daemon=False)
                with contextlib.suppress(RuntimeError):  # no threads left: a later line starts one
                    writer.start()
                    self._writer = writer

    def _write(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._writer = None
                    return
                level, text, values, extra = self._waiting.popleft()
            with contextlib.suppress(Exception):  # a filter failed: other lines still count
                logger.log(level, text, *values, extra=extra)


# -- once a process --------------------------------------------------------------------------------
# A note says, for example, why something is slower than it could be.


_logged: set[str] = set()


def log_once(note: str, level: int = logging.WARNING) -> None:
    """Log `note`, unless it is empty or was logged before."""
    if note and note not in _logged:
        _logged.add(note)
        logger.log(level, "%s", note)


# -- reports that fail nothing ---------------------------------------------------------------------


P = ParamSpec("P")


def harmless(report: Callable[P, None]) -> Callable[P, None]:
    """The same function, which raises nothing."""

    @functools.wraps(report)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            report(*args, **kwargs)
        except Exception:  # its cause is outside, in handlers or filters, which may hear of it
            with contextlib.suppress(Exception):
                logger.debug("a report failed", exc_info=True)

    return guarded
