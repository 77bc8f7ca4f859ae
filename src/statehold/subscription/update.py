"""Update: a newer step, verified in spare memory, that waits to be put into place.

Invariants: no live tensor changes before apply(). If that returns, all of them have the step.
Not here: where the step comes from (subscribe), the copies (copying).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from statehold.errors import UsageError


@dataclass(eq=False)
class Update:
    """A newer step of a run, read and verified, that is not in place yet.

    Attributes:
        step: its number.
        changed_bytes: of the tensors, in whole pieces: how many bytes differ.
        read_bytes: how many bytes were read to get them, documents included.
        read_s: how many seconds it took to read and verify them.
        committed_s: when the step was committed, in seconds since 1970, by the clock of its file
            system.
        apply_s: how many seconds apply() took; None before.
    """

    step: int
    changed_bytes: int
    read_bytes: int
    read_s: float
    committed_s: float
    _put: Callable[[], None] = field(repr=False)
    apply_s: float | None = None
    _in_place_s: float | None = field(default=None, repr=False)
    _is_over: bool = field(default=False, repr=False)

    @property
    def lag_s(self) -> float:
        """Seconds from the commit of the step until it was in place, or until now."""
        until_s = time.time() if self._in_place_s is None else self._in_place_s
        return max(0.0, until_s - self.committed_s)

    @property
    def is_over(self) -> bool:
        """Whether apply() or skip() was called."""
        return self._is_over

    def apply(self) -> None:
        """Change the tensors, in place: before, they have one whole step, and after it this one.

        Call it on the thread that uses the tensors, or while nobody uses them. Only memory is
        copied. If copying raises, the tensors may be of both steps. The next update then reads
        everything.

        Raises:
            UsageError: this update was applied or skipped already, or a tensor was changed since
                wait() returned it. Then no tensor is updated, and the next update has everything.
            ClosedError: the subscription was closed.
        """
        self._end()
        begun_s = time.perf_counter()
        self._put()
        self.apply_s = time.perf_counter() - begun_s
        self._in_place_s = time.time()

    def skip(self) -> None:
        """Keep the tensors as they are. The next update has the changes of this one, too."""
        self._end()

    def _end(self) -> None:
        if self._is_over:
            raise UsageError(
                "this update was applied or skipped already", facts={"step": self.step}
            )
        self._is_over = True
