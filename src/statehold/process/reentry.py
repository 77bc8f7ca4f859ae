"""Calls that a thread is inside of, which a signal's handler must not make once more.

A handler runs on the main thread, between any two instructions, while that thread may hold a lock.
A call that needs the same lock would wait for ever. So each call that takes locks begins with
enter() or note(). A call that begins with enter() or refuse() raises an error if a handler makes it
inside of such a call.

Invariants: the stack of the thread is the only record. So nothing has to be undone, whatever
interrupts a call.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType

from statehold.errors import UsageError

_calls: dict[CodeType, str] = {}


def enter(what: str) -> None:
    """The calling function is `what`, and takes locks.

    Raises UsageError if a handler makes it inside such a call.
    """
    frame = sys._getframe(1)
    _calls[frame.f_code] = what
    refuse(what, within=frame.f_back)


def note(what: str) -> None:
    """The calling function is `what`, and takes locks. It may be part of another such call."""
    _calls[sys._getframe(1).f_code] = what


def refuse(what: str, among: str = "", within: FrameType | None = None) -> None:
    """Raises UsageError if a handler makes the call inside one that takes locks. among: only those
    that end with this. within: where the call was made; None: by the caller."""
    frame: FrameType | None = within or sys._getframe(1)
    inner: list[CodeType] = []  # what runs inside of `frame`
    while frame is not None:
        outer = _calls.get(frame.f_code)
        if outer is not None and outer.endswith(among) and _handlers().intersection(inner):
            raise UsageError(
                f"{what} was called inside {outer}, by a signal's handler",
                facts={"still safe": f"everything: {outer} goes on where it was interrupted"},
                hint="call leave_on() once, instead of saving in a signal handler; or let the "
                "handler set a flag, and look at it between two steps",
            )
        inner.append(frame.f_code)
        frame = frame.f_back


def _handlers() -> set[CodeType]:
    """The code of the program's handlers. What it calls inside one of our calls otherwise, as the
    state_dict() of an object in the state, comes at a moment at which no lock is held."""
    found = map(signal.getsignal, signal.valid_signals())
    return {code for each in found if callable(each) and (code := _code_of(each)) is not None}


def _code_of(handler: Callable[..., object]) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", None)
    if function is None:
        function = getattr(type(handler).__call__, "__func__", type(handler).__call__)
    return getattr(function, "__code__", None)
