"""An error that is kept must not keep what the functions held that it came through.

A traceback keeps the variables of every function that the error has left: an open file, whose
space does not come back, a native job, the tensors of a state. An error in a handle, or in the
status of a level, may be kept for as long as the process runs.
"""

from __future__ import annotations

import traceback

__all__ = ["let_go"]


def let_go(error: BaseException) -> None:
    """Clear the variables of the functions that have ended by `error`, and by what caused it.

    The traceback still says where the error came from. Functions that still run keep theirs.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]
