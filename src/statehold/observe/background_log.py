"""Log lines of background threads, written by a thread of their own; the progress of a transfer.

Invariants: only flush() blocks. Code that only reports something never makes it fail: a committed
save stays committed. Of a transfer nothing is logged for FIRST_S, and then at most a line a second,
and fewer for a long one, so a restore of hours writes a hundred lines and not ten thousand.

Not here: lines of the trainer's own thread, which writes them itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec

from statehold.process.warn import logger
from statehold.process.worker import Thread
from statehold.units import format_bytes, format_seconds

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

    def figures(self, text: Callable[[], str], figures: Mapping[str, object]) -> None:
        """A sentence for people, and the same for programs as the record's `statehold`. Nobody
        makes the sentence if nobody reads it."""
        if logger.isEnabledFor(logging.INFO):
            self._queue(logging.INFO, "%s", (text(),), {"statehold": figures})

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


# -- progress of a long transfer -------------------------------------------------------------------
FIRST_S = 5.0
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
_PAUSE_SHARE = 0.05  # of the time so far

Counts = Callable[[], tuple[int, int]]


class Progress:
    """Logs from time to time how far `what` is, from a thread of its own, until it is left.

    counts: bytes done and in all, from any thread. report: gets the same with every line.
    log: gets the lines, so that a line that blocks does not delay the end of the transfer.
    """

    def __init__(
        self,
        what: str,
        counts: Counts,
        report: Callable[[int, int], None] = lambda *_: None,
        log: BackgroundLog | None = None,
    ) -> None:
        self._log = log or BackgroundLog()
        self._what = what
        self._counts = counts
        self._report = report
        self._lasts = threading.Lock()  # until it ends; a Lock, as Ctrl-C may come
        self._lasts.acquire()
        self._begin_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="statehold-progress", daemon=True)

    def __enter__(self) -> None:
        with contextlib.suppress(RuntimeError):  # no more threads: then it logs nothing
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._lasts.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        pause_s, before = FIRST_S, -1
        while not self._lasts.acquire(timeout=pause_s):
            elapsed_s = time.perf_counter() - self._begin_s
            done, total = self._counts()
            self._say(min(done, total), total, elapsed_s)
            pause_s = pause_after(elapsed_s, pause_s, moved=done != before)
            before = done

    def _say(self, done: int, total: int, elapsed_s: float) -> None:
        figures = {"event": "progress", "what": self._what, "done_bytes": done,
                   "total_bytes": total, "elapsed_s": elapsed_s}  # fmt: skip
        self._log.figures(lambda: f"{self._what}: {progress_text(done, total, elapsed_s)}", figures)
        self._report(done, total)


@contextlib.contextmanager
def counted(
    what: str, total: int, report: Callable[[int, int], None] | None
) -> Iterator[Callable[[int], None]]:
    """What takes the bytes of each part of a transfer, for `report` and for the log."""
    so_far = [0]

    def done(nbytes: int) -> None:
        so_far[0] = min(so_far[0] + nbytes, total)  # some may be moved twice
        if report is not None:
            report(so_far[0], total)

    with Progress(what, lambda: (so_far[0], total)):
        yield done


def pause_after(elapsed_s: float, pause_s: float, *, moved: bool) -> float:
    """How long to be silent after a pause of `pause_s`: by the time since the beginning, and twice
    as long each time while nothing has moved."""
    least_s = max(elapsed_s * _PAUSE_SHARE, PAUSE_S_MIN)
    return min(least_s if moved else max(least_s, 2 * pause_s), PAUSE_S_MAX)


def progress_text(done: int, total: int, elapsed_s: float) -> str:
    """ "1.5 GiB of 4.5 GiB (33%), 300 MiB/s, 10.2 s left"."""
    if not total:
        return "nothing has moved yet"
    share = done / total
    rate = done / max(elapsed_s, 1e-9)
    left = f", {format_seconds((total - done) / rate)} left" if done else ""
    if done and done == total:
        left = ", waiting for the end"
    of = f"{format_bytes(done)} of {format_bytes(total)} ({share:.0%})"
    return f"{of}, {format_bytes(int(rate))}/s{left}"
