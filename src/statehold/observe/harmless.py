"""Code that only reports something must never make it fail: a committed save stays committed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

logger = logging.getLogger("statehold")

P = ParamSpec("P")


def harmless(report: Callable[P, None]) -> Callable[P, None]:
    """The same function, which raises nothing."""

    @functools.wraps(report)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            report(*args, **kwargs)
        except Exception:  # its cause is outside, in handlers or filters, which may hear of it
            with contextlib.suppress(Exception):
                logger.debug("a report failed", exc_info=True)

    return guarded
