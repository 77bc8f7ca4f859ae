"""The end of a script that closes nothing: open objects are closed before their threads end.

Invariants: an object that was remembered and not forgotten is ended once, when the main thread has
ended by itself, by an exception or by sys.exit. The end of a fork ends nothing of its parent. An
atexit handler would come too late: executors take no work by then, and a step that is committed at
the end could not be copied to its other levels.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

from statehold.errors import ClosedError


class Ends(Protocol):
    def _end(self) -> None:
        """Called when the program ends."""


PROGRAM_ENDS = "the program ends: its main thread has ended"
JOIN = "save before: let the main thread wait for others, and do not save in atexit handlers"

_open: weakref.WeakSet[Ends] = weakref.WeakSet()
_is_registered = False


def remember(one: Ends) -> None:
    """End `one` with the program. Raises ClosedError if that has ended."""
    global _is_registered
    if not _is_registered:
        # This registers as concurrent.futures does, and so runs before the end of that module.
        # Without it, concurrent.futures would still commit the saves under way.
        try:
            getattr(threading, "_register_atexit", lambda _: None)(end_all)
        except RuntimeError:
            raise ClosedError(PROGRAM_ENDS, hint=JOIN) from None
        _is_registered = True
    _open.add(one)


def forget(one: Ends) -> None:
    """`one` has ended by itself."""
    _open.discard(one)


def end_all() -> None:
    """End all that was remembered and not forgotten, as the end of the program does.

    An exception, such as that of Ctrl-C, comes out once all have ended.
    """
    with contextlib.ExitStack() as ends:
        for one in list(_open):
            ends.callback(one._end)
