"""Whether only tracebacks of old errors still hold an object.

After a failed cell, a notebook keeps the error. Its traceback keeps the variables of every function
that the error has left. An object that nothing else holds is not in use.

This counts references as the cyclic collector does. An object, and everything that leads to it, is
unused if its references come only from each other and from tracebacks. An object that a running
function, a module or native code holds is in use. If the question cannot be decided soon, the
object counts as in use.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from types import FrameType, ModuleType, TracebackType
from typing import Any

HOLDERS_MAX = 300
# The references to an item of a list while it is counted: the list's, and the argument's.
_OWN_REFERENCES = 2


def is_only_in_tracebacks(target: weakref.ref[Any]) -> bool:
    """Whether only tracebacks of errors keep the object alive. True if it is gone."""
    value = target()
    if value is None:
        return True
    found, tracebacks = [value], list[TracebackType]()
    del value
    begin = 0
    while begin < len(found):
        end = len(found)
        more = _holders(found, begin, tracebacks)
        if more is None or len(found) + len(more) > HOLDERS_MAX:
            return False
        found += more
        del more
        begin = end
    return not _are_held_elsewhere(found, tracebacks)


def _holders(found: list[Any], begin: int, tracebacks: list[TracebackType]) -> list[Any] | None:
    """The referrers of the objects from `begin` on, without tracebacks; None: one of them is in
    use."""
    ours = {id(found), id(tracebacks), *map(id, found), *map(id, tracebacks)}
    running = _running_functions()
    more: list[Any] = []
    for holder in gc.get_referrers(*found[begin:]):
        if id(holder) in ours or _is_own_frame(holder):
            continue
        if isinstance(holder, TracebackType):
            tracebacks.append(holder)
        elif id(holder) in running or _is_lasting(holder):
            return None
        else:
            more.append(holder)
    return more


def _is_own_frame(holder: object) -> bool:
    return isinstance(holder, FrameType) and holder.f_globals is globals()


def _running_functions() -> set[int]:
    """Their frames, if the collector sees frames as holders of their variables. From Python 3.11 on
    it does not see the variables of a running function, which then count as held elsewhere."""
    ids: set[int] = set()
    if sys.version_info >= (3, 11):
        return ids
    newest: FrameType | None
    frame: FrameType | None
    for newest in sys._current_frames().values():
        frame = newest
        while frame is not None:
            ids.add(id(frame))
            frame = frame.f_back
    newest = frame = None  # one of them is this function's own
    return ids


def _is_lasting(holder: object) -> bool:
    """Whether it lives as long as the program: a module, its variables, a class."""
    is_namespace = type(holder) is dict and "__builtins__" in holder
    return is_namespace or isinstance(holder, ModuleType | type)


def _are_held_elsewhere(found: list[Any], tracebacks: list[TracebackType]) -> bool:
    """Whether an object has more references than those from the others and from tracebacks."""
    known = {id(each) for each in found}
    holders: tuple[Any, ...] = (*found, *tracebacks)
    inside = Counter(
        id(held) for holder in holders for held in gc.get_referents(holder) if id(held) in known
    )
    del holders
    return any(
        sys.getrefcount(found[index]) - _OWN_REFERENCES > inside[id(found[index])]
        for index in range(len(found))
    )
