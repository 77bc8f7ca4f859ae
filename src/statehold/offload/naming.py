"""The name of an optimizer in its files: no two optimizers of a process have the same one.

Invariants: the names are counted, and that of an optimizer that has ended is free again. So a
program that makes its optimizers in the same order gives them the same names in every run.
"""

from __future__ import annotations

import threading
from itertools import count

_taken: set[int] = set()
_guard = threading.Lock()


class Name:
    """A name that no other optimizer has until free()."""

    def __init__(self) -> None:
        with _guard:
            self._number = next(number for number in count() if number not in _taken)
            _taken.add(self._number)

    def __str__(self) -> str:
        return f"offload.{self._number}"

    def free(self) -> None:
        """Let another optimizer have it."""
        with _guard:
            _taken.discard(self._number)
