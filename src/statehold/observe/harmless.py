"""Code that only reports something must never make it fail: a committed save stays committed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

logger = logging.getLogger("statehold")

P = ParamSpec("P")


def harmless(tell: Callable[P, None]) -> Callable[P, None]:
    """The same function, which raises nothing."""

    @functools.wraps(tell)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            tell(*args, **kwargs)
        except Exception:  # its cause is outside, in handlers or filters, which may hear of it
            with contextlib.suppress(Exception):
                logger.debug("could not tell what happened", exc_info=True)

    return guarded
