"""Calls that a thread is inside of, which a signal's handler must not make once more.

A handler runs on the main thread, between any two instructions, while that thread may hold a lock.
A call that needs the same lock would wait for ever. So each call that takes locks begins with
enter() or note(), and a call that begins with enter() or refuse() inside of it raises an error.

Invariants: the stack of the thread is the only record. So nothing has to be undone, whatever
interrupts a call.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from statehold.errors import UsageError

_calls: dict[CodeType, str] = {}


def enter(what: str) -> None:
    """The calling function is `what`, and takes locks. Raises UsageError inside such a call."""
    frame = sys._getframe(1)
    _calls[frame.f_code] = what
    _refuse(frame.f_back, what, "")


def note(what: str) -> None:
    """The calling function is `what`, and takes locks. It may be part of another such call."""
    _calls[sys._getframe(1).f_code] = what


def refuse(what: str, among: str = "") -> None:
    """Raises UsageError inside a call that takes locks. among: only those that end with this."""
    _refuse(sys._getframe(1), what, among)


def _refuse(frame: FrameType | None, what: str, among: str) -> None:
    while frame is not None:
        outer = _calls.get(frame.f_code)
        if outer is not None and outer.endswith(among):
            raise UsageError(
                f"{what} was called inside {outer}, by the same thread",
                facts={"still safe": f"everything: {outer} goes on where it was interrupted"},
                hint="call leave_on() once, instead of saving in a signal handler; or let the "
                "handler set a flag, and look at it between two steps",
            )
        frame = frame.f_back
