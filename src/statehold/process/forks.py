"""What a forked child closes: its parent's sockets that threads serve, and its files with locks.

A child has copies of the sockets, but not the threads. While a data loader's worker lived, a port
would stay taken, and connections half open. What its parent had locked would outlive the parent.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgets(Protocol):
    """Something with descriptors."""

    def forget(self) -> None:
        """Close them in a child; the parent keeps its own."""


_open: weakref.WeakSet[Forgets] = weakref.WeakSet()
_hooks: list[bool] = []


def forget_in_children(owner: Forgets) -> None:
    """Call `owner.forget()` in every child that is forked while it lives."""
    if not _hooks:
        _hooks.append(True)
        os.register_at_fork(after_in_child=_forget_all)
    _open.add(owner)


def _forget_all() -> None:
    for owner in list(_open):
        owner.forget()
    _open.clear()
