"""What is said once a process: why bytes may move more slowly than they could."""

from __future__ import annotations

import logging

__all__ = ["say_once"]

logger = logging.getLogger("statehold")

_said: set[str] = set()


def say_once(note: str) -> None:
    """A warning, if there is something to say and nobody has said it."""
    if note and note not in _said:
        _said.add(note)
        logger.warning("%s", note)
