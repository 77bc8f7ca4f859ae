"""A call to a store of pages that is under way, and its pages: one verdict for each, within a time.

Invariants: wait() returns at its time, whatever the storage does. After it has returned, nothing
touches the caller's memory any more, and no verdict changes.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from statehold.kv.page import Header
from statehold.process.worker import Flag


class PageVerdict(enum.Enum):
    """What became of a page."""

    HIT = "hit"  # get: its bytes are in the caller's memory
    MISS = "miss"  # get: it is not there
    BAD = "bad"  # get: its bytes on storage are damaged; it is removed
    STORED = "stored"  # put: all processes of the host find it now
    THERE = "there"  # put: it was there already
    DROPPED = "dropped"  # put: there was no room
    LATE = "late"  # the time has passed first


VERDICTS = tuple(each.value for each in PageVerdict)
# What all processes count together: pages by verdict, and the bytes of some.
BEHIND = ("behind_hit", "behind_sent", "behind_bad", "behind_failed")
COUNTED = (*VERDICTS, "hit_bytes", "stored_bytes", *BEHIND)


class PageBatch:
    """The verdicts on `count` pages of an identity.

    until: on the monotonic clock; None: no end. told: hears the verdicts once, when all are known,
    on any thread.
    """

    def __init__(
        self, count: int, until: float | None, identity: bytes,
        told: Callable[[list[PageVerdict | None]], None],
    ) -> None:  # fmt: skip
        self.count, self.until, self.identity = count, until, identity
        self._told, self._left = told, count
        self._verdicts: list[PageVerdict | None] = [None] * count
        self._guard = threading.Lock()
        self._done = Flag()

    def is_over(self, within_s: float = 0.0) -> bool:
        """Whether every page has its verdict, or the time has passed; waits at most so long."""
        left = self.seconds_left
        self._done.wait(within_s if left is None else min(within_s, left))
        return not self._left or self.seconds_left == 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until its time has passed; None: no end."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    def wait(self) -> list[PageVerdict]:
        """The verdicts, as soon as all are known, or when the time has passed."""
        if self._left:
            self._done.wait(self.seconds_left)
        self.settle(range(self.count), PageVerdict.LATE)
        return [verdict for verdict in self._verdicts if verdict is not None]

    def move(self, place: int, action: Callable[[], object]) -> bool:
        """Move the bytes of a page, unless it has its verdict. Returns whether that was done."""
        with self._guard:
            if self._verdicts[place] is not None:
                return False
            action()
            return True

    def settle(self, places: Iterable[int], verdict: PageVerdict) -> None:
        """The verdict on pages, unless they have one."""
        with self._guard:
            new = [place for place in places if self._verdicts[place] is None]
            for place in new:
                self._verdicts[place] = verdict
            self._left -= len(new)
            if new and not self._left:
                self._told(self._verdicts)
            if not self._left:
                self._done.set()


@dataclass(slots=True)
class MovingPage:
    """A page of a call. view: the caller's memory. index: of the page; before: of the one before
    it. slot: in memory; is_filled: it has the page. there, generation: of its slot in a file.
    header, verdict: once it was read."""

    batch: PageBatch
    place: int
    key: bytes
    view: memoryview
    index: int
    before: int = 0
    score: float = 0.0
    slot: int = -1
    is_filled: bool = False
    there: int = -1
    generation: int = 0
    header: Header | None = None
    verdict: PageVerdict = PageVerdict.BAD
