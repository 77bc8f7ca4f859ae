"""The progress of a long transfer, in the log: bytes done, total, speed, time left.

Invariants: silent for FIRST_S. Then it logs at most a line a second, and fewer for a long transfer,
so a restore of hours writes a hundred lines and not ten thousand. Never raises into the transfer.
Not here: the transfer, and the count of its bytes (the callers).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from statehold.observe.background_log import BackgroundLog
from statehold.units import format_bytes, format_seconds

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
        text = f"{self._what}: {progress_text(done, total, elapsed_s)}"
        self._log.figures(text, figures)
        self._report(done, total)


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
