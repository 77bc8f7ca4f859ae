"""When Python looks for cyclic garbage.

A capture, and the document of a step, make some objects for each tensor. None of them is garbage,
and searching them takes longer than making them. Objects that survive such searches also cause a
search through all objects of the process, during which no thread runs Python.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_guard = threading.Lock()
_inside = 0
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no thread collects cyclic garbage. For milliseconds, never around a wait."""
    global _inside, _was_enabled
    with _guard:
        if _inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0 and _was_enabled:
                gc.enable()
