"""Checkpoints: what a job of replicas restores and saves, if it has a Checkpointer.

    checkpoints.restore()     the newest step of the nearest level, into the live state
    checkpoints.save(step)    after a step; the `every` of the levels decides
    checkpoints.keep(step)    before this replica gives up: its state is newer than any saved one
    checkpoints.give_way()    another replica may be the first one from now on

A save that fails ends nobody (R17): no replica needs the storage to train, and older steps are
safe. It is logged, and the next step that is due is saved again. From the second failure in a row
on, the log calls it an error.

Invariants: a step is saved only by a replica whose state is that of the step's beginning. A run
directory has one writer, so a replica that finds another one there leaves the step to it.
Not here: which replica saves (replicas), and when one gives up (driver).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from statehold.checkpoint.checkpointer import Checkpointer, give_way, leave_to_others
from statehold.checkpoint.save.handle import Save
from statehold.errors import OVERWRITTEN, RunBusyError, StateholdError, StepOrderError, UsageError
from statehold.resilience.protocol.messages import TORN

logger = logging.getLogger(__name__)

_PASSING = RunBusyError, StepOrderError  # of the run directory, and not of the state


class Checkpoints:
    """checkpointer: None saves and restores nothing. state: as save() and restore() take it.

    tear: called when a restore is cut off that may have changed some of the state.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, state: Mapping[str, Any], tear: Callable[[], None]
    ) -> None:
        self._checkpointer = checkpointer
        self._state = state
        self._tear = tear
        self._begun: list[Save] = []  # whose ends are not known yet
        self._failures = 0  # since a step was committed

    def restore(self, than: int = TORN) -> bool:
        """Whether the live state is that of a saved step now. than: a step that is older."""
        if self._checkpointer is None:
            return False
        if than != TORN and max(self._checkpointer.steps(), default=TORN) <= than:
            return False
        try:
            return self._checkpointer.restore(self._state) is not None
        except BaseException as error:  # Ctrl-C does not say whether anything was written
            if not isinstance(error, StateholdError) or OVERWRITTEN in error.facts:
                self._tear()
            raise

    def save(self, step: int) -> None:
        """Raises UsageError for a state that no try can save."""
        if self._checkpointer is None:
            return
        try:
            self._begin(self._checkpointer, step)
        except StateholdError as error:
            if isinstance(error, UsageError) and not isinstance(error, _PASSING):
                raise
            self._tell(step, error)

    def leave_to_others(self, step: int) -> None:
        """End this process if it was asked to leave: another member saves (R16)."""
        if self._checkpointer is not None:
            leave_to_others(self._checkpointer, step)

    def _begin(self, checkpointer: Checkpointer, step: int, *, force: bool = False) -> Save:
        """Raises why this step cannot be saved. That an earlier one has failed is logged."""
        failed = self._failed()
        while True:
            try:
                save = checkpointer.save(step, self._state, force=force)
                break
            except StateholdError as error:
                failed += self._failed()
                if not any(each.error is error for each in failed):
                    raise
        if not save.is_skipped:
            self._begun.append(save)
        return save

    def _failed(self) -> list[Save]:
        """The saves that have failed since the last call. Logs each with its own cause."""
        begun, self._begun, failed = self._begun, [], []
        for save in begun:
            if save.done("committed"):
                self._failures = 0
            elif save.error is None:
                self._begun.append(save)
            else:
                failed.append(save)
                self._tell(save.step, save.error)
        return failed

    def _tell(self, step: int, error: StateholdError) -> None:
        self._failures += 1
        again = f"; {self._failures} saves in a row have failed" if self._failures > 1 else ""
        level = logging.ERROR if again else logging.WARNING
        logger.log(level, "statehold: step %s is not saved: %s%s", step, _in_one_line(error), again)

    def keep(self, step: int) -> str | None:
        """Save the step whatever `every` says, and wait until it is committed.

        Returns what has kept it from being saved, in one line. It raises no error.
        """
        if self._checkpointer is None:
            return "there is no checkpointer"
        try:
            if step not in self._checkpointer.steps():
                self._begin(self._checkpointer, step, force=True).wait("committed")
        except StateholdError as error:
            return _in_one_line(error)
        return None

    def give_way(self) -> None:
        """Let the replica that saves from now on have the run directory. Finishes saves before."""
        if self._checkpointer is None:
            return
        try:
            give_way(self._checkpointer)
        except StateholdError as error:
            logger.warning("statehold: the run directory was not given up in order: %s", error)


def _in_one_line(error: StateholdError) -> str:
    facts = ", ".join(f"{name}: {value}" for name, value in error.facts.items())
    return f"{error.summary} ({facts})" if facts else error.summary
