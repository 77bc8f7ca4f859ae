"""Which step is the last: the first step after all steps that some rank has passed.

    every rank, at each step     is_last(step)      no, at once; noted as seen
    every rank, once one is asked to leave
        freeze()                 the newest step it has seen; from now on a newer one waits
        decide(max over ranks)   newer steps than that are the last

Invariants: if all ranks ask for the same steps in the same order, they all get the same answers. A
rank has answered no for the steps that it had seen, which are at most the maximum. A newer step
waits for the maximum. So nothing is answered before it is decided, and on all ranks the answer is
no for all steps up to the maximum. Restoring and rewinding go back in steps, so places are counted
again after them.
Not here: how the ranks learn each other's steps (exchange).
"""

from __future__ import annotations

import threading

# How often the run was restored or rewound, and the step.
Position = tuple[int, int]


class LastStep:
    """The knowledge of one rank about the last step. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._era = 0
        self._seen: Position = (0, -1)
        self._is_frozen = False
        self._passed: Position | None = None

    @property
    def has_begun(self) -> bool:
        """Whether is_last() was called."""
        return self._seen[1] >= 0

    def begin_again(self) -> None:
        """The run is restored or rewound, on all ranks."""
        with self._changed:
            self._era += 1

    def is_last(self, step: int) -> bool:
        """Whether the save of `step` is the last one; waits while that is being decided."""
        with self._changed:
            here = self._era, step
            if not self._is_frozen:
                self._seen = max(self._seen, here)
                return False
            if here <= self._seen:
                return False
            self._changed.wait_for(lambda: self._passed is not None)
            return self._passed is not None and here > self._passed

    def freeze(self) -> Position:
        """The newest step that was asked for here; newer ones wait from now on."""
        with self._changed:
            self._is_frozen = True
            return self._seen

    def decide(self, passed: Position) -> None:
        """The newest step that was asked for on any rank; the first decision counts."""
        with self._changed:
            self._passed = self._passed or passed
            self._changed.notify_all()
