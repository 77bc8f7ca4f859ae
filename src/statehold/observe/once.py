"""Notes that are logged once a process, such as why something is slower than it could be."""

from __future__ import annotations

import logging

logger = logging.getLogger("statehold")

_logged: set[str] = set()


def log_once(note: str, level: int = logging.WARNING) -> None:
    """Log `note`, unless it is empty or was logged before."""
    if note and note not in _logged:
        _logged.add(note)
        logger.log(level, "%s", note)
