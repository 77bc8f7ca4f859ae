"""A kept error must not keep the variables of the functions that it came through.

A traceback keeps the variables of every function that the error has left: an open file, whose space
does not come back, a native job, the tensors of a state. A handle, or the status of a level, may
keep an error as long as the process runs.
"""

from __future__ import annotations

import traceback


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
