"""Checkpoints: what a job of replicas restores and saves, if it has a Checkpointer.

    checkpoints.restore()     the newest step of the nearest level, into the live state
    checkpoints.save(step)    after a step; the `every` of the levels decides
    checkpoints.keep(step)    before this replica gives up: its state is newer than any saved one
    checkpoints.give_way()    another replica may be the first one from now on

Invariants: a step is saved only by a replica whose state is that of the step's beginning. A run
directory has one writer, so a replica that finds another one there leaves the step to it.
Not here: which replica saves (replicas), and when one gives up (driver).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.errors import RunBusyError, StateholdError
from statehold.resilience.protocol.messages import TORN

logger = logging.getLogger(__name__)


class Checkpoints:
    """checkpointer: None saves and restores nothing. state: as save() and restore() take it."""

    def __init__(self, checkpointer: Checkpointer | None, state: Mapping[str, Any]) -> None:
        self._checkpointer = checkpointer
        self._state = state

    def restore(self, than: int = TORN) -> bool:
        """Whether the live state is that of a saved step now. than: a step that is older."""
        if self._checkpointer is None:
            return False
        if than != TORN and max(self._checkpointer.steps(), default=TORN) <= than:
            return False
        return self._checkpointer.restore(self._state) is not None

    def save(self, step: int) -> None:
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.save(step, self._state)
        except RunBusyError as busy:
            logger.warning("statehold: step %d is not saved: %s", step, busy.summary)

    def keep(self, step: int) -> str | None:
        """Save the step whatever `every` says, and wait until it is committed.

        Returns what has kept it from being saved, in one line. It raises no error.
        """
        if self._checkpointer is None:
            return "there is no checkpointer"
        try:
            if step not in self._checkpointer.steps():
                self._checkpointer.save(step, self._state, force=True).wait("committed")
        except StateholdError as error:
            facts = ", ".join(f"{name}: {value}" for name, value in error.facts.items())
            return f"{error.summary} ({facts})" if facts else error.summary
        return None

    def give_way(self) -> None:
        """Let the replica that saves from now on have the run directory. Finishes saves before."""
        if self._checkpointer is None:
            return
        try:
            self._checkpointer._give_way()
        except StateholdError as error:
            logger.warning("statehold: the run directory was not given up in order: %s", error)
