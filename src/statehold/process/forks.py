"""What a forked child lets go of: the sockets that threads of its parent serve.

A child has copies of them, but not the threads: a port would stay taken, and connections half open,
as long as a data loader's worker lives.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forgets", "forget_in_children"]


class Forgets(Protocol):
    """Something with sockets."""

    def forget(self) -> None:
        """Close them, in a child, which takes nothing away from the parent."""


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
