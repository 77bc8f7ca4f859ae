"""Ends the state of an optimizer: at close(), when the optimizer is dropped, or with the program.

The collector may drop an optimizer inside any allocation, on any thread, while that thread holds
any lock. To wait for other threads there can be a deadlock. So dropping only leaves a word, and a
thread that waits for it ends the state.

Invariants: a state is ended once. A later optimizer of this process waits for dropped ones, so it
finds their memory and their folders free. A forked child ends nothing of its parent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from statehold.process.ending import forget, remember

_dropped: list[OptimizerKeeper] = []  # one operation at a time is atomic


class OptimizerKeeper:
    """Calls `end` for an `owner`, which `end` must not keep alive. end: may be called twice."""

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._end_state = end
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="statehold-keeper", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(owner, self._drop)
        self._finalizer.atexit = False
        remember(self)

    def close(self) -> None:
        """End the state. Idempotent."""
        if self._finalizer.detach() is not None:
            self._asked.put(False)
            forget(self)
            self._end_state()

    def wait(self) -> None:
        """Return once the state of a dropped owner has ended."""
        self._thread.join()

    def _drop(self) -> None:
        """Called by the collector."""
        _dropped.append(self)
        self._asked.put(True)

    def _serve(self) -> None:
        if self._asked.get():
            try:
                self._end_state()
            finally:
                forget(self)
                _dropped.remove(self)

    def _end(self) -> None:
        """The program ends."""
        self.close()
        if self in _dropped:
            self.wait()


def wait_for_dropped() -> None:
    """Wait for the state of optimizers that were dropped."""
    for each in list(_dropped):
        each.wait()
