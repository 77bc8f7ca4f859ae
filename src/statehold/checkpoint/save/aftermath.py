"""The work after a commit: it may fail, and the step stays committed.

Invariants: once a step is published, no error makes its save a failed one. A later error is logged,
together with what is safe, and the rest of the work continues.
Not here: the commit itself (checkpoint/store/publish), the work after it (pipeline, publishing).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from statehold.errors import StateholdError
from statehold.observe.background_log import BackgroundLog


@contextlib.contextmanager
def after_commit(log: BackgroundLog, step: int, doing: str) -> Iterator[None]:
    """Run work that follows the commit of `step`; log its error instead of raising it.

    doing: completes "could not ..." in the log.
    """
    try:
        yield
    except BaseException as error:
        log.error("step %d is committed and safe; could not %s\n%s", step, doing, _text(error))


def _text(error: BaseException) -> str:
    """The error, with its traceback if it is not one of statehold's own."""
    if isinstance(error, StateholdError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
