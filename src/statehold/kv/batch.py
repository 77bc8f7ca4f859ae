"""A call to a store of pages that is under way: one verdict for each page, within a time.

Invariants: wait() returns at its time, whatever the storage does. After it has returned, nothing
touches the caller's memory any more, and no verdict changes.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable


class PageVerdict(enum.Enum):
    """What became of a page."""

    HIT = "hit"  # get: its bytes are in the caller's memory. put: it was there
    MISS = "miss"  # get: it is not there
    LATE = "late"  # the time has passed first
    BAD = "bad"  # get: its bytes on storage are damaged; it is removed
    STORED = "stored"  # put: it is there now, for all processes of the host
    DROPPED = "dropped"  # put: there was no room


class PageBatch:
    """The verdicts on `count` pages. until: on the monotonic clock."""

    def __init__(self, count: int, until: float) -> None:
        self.count, self.until = count, until
        self._verdicts: list[PageVerdict | None] = [None] * count
        self._left = count
        self._guard = threading.Lock()
        self._done = threading.Event()
        if not count:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether every page has its verdict."""
        return self._done.is_set()

    def wait(self) -> list[PageVerdict]:
        """The verdicts, as soon as all are known, or when the time has passed."""
        self._done.wait(max(0.0, self.until - time.monotonic()))
        with self._guard:
            for place, verdict in enumerate(self._verdicts):
                if verdict is None:
                    self._settle(place, PageVerdict.LATE)
            return [verdict for verdict in self._verdicts if verdict is not None]

    def move(self, place: int, action: Callable[[], object]) -> bool:
        """Move the bytes of a page, unless it has its verdict. Returns whether that was done."""
        with self._guard:
            if self._verdicts[place] is not None:
                return False
            action()
            return True

    def settle(self, place: int, verdict: PageVerdict) -> bool:
        """The verdict on a page. Returns False if it has another one."""
        with self._guard:
            if self._verdicts[place] is not None:
                return False
            self._settle(place, verdict)
            return True

    def _settle(self, place: int, verdict: PageVerdict) -> None:
        self._verdicts[place] = verdict
        self._left -= 1
        if not self._left:
            self._done.set()
