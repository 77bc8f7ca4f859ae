"""The end of a script that closes nothing: what is open is closed before its threads are gone.

Invariants: whoever was remembered and not forgotten is ended once, when the main thread has ended,
by itself, by an exception or by sys.exit. A fork that ends ends nothing of its parent's. An atexit
handler would come too late: executors take no work by then, and a step that is committed at the end
could not go on to its other levels.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["forget", "remember"]


class Ends(Protocol):
    def _end(self) -> None:
        """The program ends."""


_open: weakref.WeakSet[Ends] = weakref.WeakSet()
_is_registered = False


def remember(one: Ends) -> None:
    """End it with the program."""
    global _is_registered
    _open.add(one)
    if not _is_registered:
        _is_registered = True
        # As concurrent.futures does, before whose own end this runs; without it the saves under
        # way are still committed, by that.
        getattr(threading, "_register_atexit", lambda _: None)(_end_all)


def forget(one: Ends) -> None:
    """It has ended by itself."""
    _open.discard(one)


def _end_all() -> None:
    for one in list(_open):
        one._end()
