"""The path that each subgroup goes to when it is written next.

It follows the measured bandwidths. A path that has no subgroups is measured again after a while,
with one subgroup. A path that fails is given up: it gets no more writes until the optimizer ends.

Invariants: a subgroup always has a target that is not given up, so the last path never is. A new
placement is taken only when its space is there, because a path that is full would be given up.
Thread-safe.
Not here: which placement is best (planners/placement), moving the bytes (pipeline, store).
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence

from statehold.errors import (
    MissingFileError,
    NoSpaceError,
    StateholdError,
    StorageError,
    TruncatedFileError,
)
from statehold.offload.store import SubgroupStore
from statehold.planners import placement

logger = logging.getLogger("statehold")

# The process is short of something, whatever the path.
OWN_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Targets:
    """Of subgroups with these `sizes`, on the paths of `store`.

    bandwidths: of each path, in any unit; they decide the first placement.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        store: SubgroupStore,
        bandwidths: Sequence[float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sizes, self._store, self._clock = sizes, store, clock
        self._guard = threading.RLock()
        self.given_up: dict[int, str] = {}  # paths, and why
        self._weights = list(bandwidths)
        self._measured: list[float | None] = [None] * len(bandwidths)
        self._seen = [placement.Moved()] * len(bandwidths)
        self._measured_at = [clock()] * len(bandwidths)
        self.counts = placement.shares(len(sizes), bandwidths) if bandwidths else []
        self._most = list(self.counts)  # subgroups for which a path has files
        self._paths = placement.in_turns(self.counts)
        self._may_grow = True

    def __getitem__(self, subgroup: int) -> int:
        return self._paths[subgroup]

    def reserve(self, more: int) -> None:
        """Make the files of this placement, and `more` on each path for what is under way.

        These are of the largest size, so a file may take any subgroup and no space is lacking.
        """
        for path, files in enumerate(self._store.files):
            sizes = [
                size for size, each in zip(self._sizes, self._paths, strict=True) if each == path
            ]
            files.reserve(sizes + [max(self._sizes)] * min(more, len(sizes)))

    def renew(self) -> None:
        """Place subgroups by the bandwidths of late, if that pays. No transfer is under way."""
        self._measure()
        with self._guard:
            usable = [path for path in range(len(self.counts)) if path not in self.given_up]
            if len(usable) < 2 or not self._may_grow:
                return
            if all(self._measured[path] for path in usable if self.counts[path]):
                idle = self._to_measure_again(usable)
                if idle is not None:
                    self._measured[idle], self._seen[idle] = None, self._store.moved(idle)
                    self._take(placement.with_one_on(idle, self.counts))
                    return
                self._weights = [
                    (self._measured[path] or 0.0) if path in usable else 0.0
                    for path in range(len(self.counts))
                ]
                self._take(placement.replaced(self.counts, self._weights))

    def skip(self) -> None:
        """Do not count what was moved since renew(), because it was not read and written alike."""
        self._seen = [self._store.moved(path) for path in range(len(self.counts))]

    def give_up(self, path: int, error: StateholdError, what: str) -> bool:
        """Write no more to a path on which `what` has failed: "writing subgroup 3 to /nvme0".

        False if that is no way out: the path is not at fault, or it is the last one. Then the error
        says so.
        """
        if not isinstance(error, StorageError | MissingFileError | TruncatedFileError):
            return False
        if getattr(error, "errno", 0) in OWN_ERRNOS:
            return False
        directory = self._store.files[path].directory
        with self._guard:
            if path in self.given_up:
                return True
            if len(self.given_up) + 1 == len(self.counts):
                error.with_fact("other paths", "none is left, so this one is not given up")
                return False
            self.given_up[path] = f"{what} failed: {_in_short(error)}"
            self._weights[path] = 0.0
            self.counts = placement.shares(len(self._sizes), self._weights)
            self._paths = placement.in_turns(self.counts)
        logger.warning(
            "an optimizer gives up its path %s: %s. Its other paths take the subgroups from now "
            "on. Committed steps are safe",
            directory, self.given_up[path],
        )  # fmt: skip
        return True

    def _measure(self) -> None:
        for path in range(len(self.counts)):
            moved = self._store.moved(path)
            late = placement.bandwidth(moved - self._seen[path])
            if late is not None:
                before = self._measured[path]
                self._measured[path] = placement.averaged(before, late)
                self._seen[path], self._measured_at[path] = moved, self._clock()

    def _to_measure_again(self, usable: Sequence[int]) -> int | None:
        """A path without subgroups whose bandwidth may have changed."""
        now, nbytes = self._clock(), max(self._sizes)
        for path in usable:
            if self.counts[path] == 0 and placement.is_worth_measuring(
                self._measured[path], nbytes, now - self._measured_at[path]
            ):
                return path
        return None

    def _take(self, counts: list[int]) -> None:
        """Take a placement, if there is space for the files that it needs in addition."""
        for path, count in enumerate(counts):
            more = count - self._most[path]
            if more <= 0:
                continue
            try:
                self._store.files[path].reserve([max(self._sizes)] * more)
            except NoSpaceError as error:
                self._may_grow = False
                logger.warning(
                    "an optimizer would be faster with more of its state on %s, which is full "
                    "(%s). Its subgroups stay where they are",
                    self._store.files[path].directory, _in_short(error),
                )  # fmt: skip
                return
            except StorageError as error:
                if not self.give_up(path, error, "making files"):
                    raise
                return
            self._most[path] = count
        if counts != self.counts:
            self.counts, self._paths = counts, placement.in_turns(counts)


def _in_short(error: StateholdError) -> str:
    return f"{error.summary}: {error.facts['errno']}" if "errno" in error.facts else error.summary
