"""The newest committed step of a run directory, which save() asks for at every call.

Invariants: once the run belongs to this job, nobody else commits there, and the answer takes no
listing of the directory. A listing takes longer with more steps, and the trainer waits for it.
Thread-safe, with a lock of its own: the trainer does not wait for a cleanup by another thread.
Not here: what a listing finds (store).
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Newest:
    """The newest step. look: lists the directory."""

    def __init__(self, look: Callable[[], int | None]) -> None:
        self._look = look
        self._guard = threading.Lock()
        self._is_ours = self._is_known = False
        self._step: int | None = None

    def take_over(self, is_ours: bool = True) -> None:
        """Whether only this job changes the newest step from now on."""
        self._is_ours = is_ours

    def get(self) -> int | None:
        """The newest step; None without one."""
        with self._guard:
            if not self._is_known:
                self._step = self._look()
                self._is_known = self._is_ours
            return self._step

    def committed(self, step: int) -> None:
        """Every rank: `step` was committed here."""
        with self._guard:
            if self._is_known:
                self._step = step if self._step is None else max(step, self._step)

    def retired(self, step: int) -> None:
        """`step` no longer counts."""
        if step == self._step:
            self.look_again()

    def look_again(self) -> None:
        """Every rank: steps may have been discarded, so the newest one is no longer known."""
        with self._guard:
            self._is_known = False
