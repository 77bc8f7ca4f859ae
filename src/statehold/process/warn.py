"""The log; errors that are kept; warnings that name the line of the user's code that led to them.

Invariants: a kept error does not keep the variables of the functions that it came through. A
traceback keeps them: an open file, whose space does not come back, a native job, the tensors of a
state. A handle, or the status of a level, may keep an error as long as the process runs.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings

logger = logging.getLogger("statehold")


def let_go(error: BaseException) -> None:
    """Clear the variables of the functions that `error`, and its causes, have ended.

    The traceback still shows the origin of the error. Functions that still run keep their
    variables.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


_PACKAGE = __name__.partition(".")[0] + "."


def warn_caller(text: str) -> None:
    """Issue a RuntimeWarning at the innermost call that came from outside this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
