"""Warnings that name the line of the user's code that led to them."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0] + "."


def warn_caller(text: str) -> None:
    """Issue a RuntimeWarning at the innermost call that came from outside this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
