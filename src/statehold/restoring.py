"""Restoring: choose a step, match it with the live state, read it, and agree with the other ranks.

Alone, or on each of several ranks:
    candidates   rank 0 lists the committed steps, newest first
    match        the live state against the step; nothing is changed yet
    read         every wanted byte, verified, into place
    finish       the plain values
After `match` and after `read` the ranks agree: all go on, or none does. One damaged record on one
rank makes all ranks try the next older step; any other error on one rank is an error on all.

Holds: no rank changes a byte before all ranks have matched; a step counts as restored only when all
ranks have read and verified it.
Not here: matching (state/restore), which bytes (reads), the steps (store), messages (peers).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from statehold import _core
from statehold.errors import (
    CorruptionError,
    PeerFailedError,
    StateholdError,
    StateMismatchError,
    StepNotFoundError,
)
from statehold.reads import ReadPlan
from statehold.selection import RestoreReport, Selection
from statehold.state.restore import Restoration, mismatch, prepare

if TYPE_CHECKING:
    from statehold._core import Engine
    from statehold.peers import Peers
    from statehold.saved import SavedStep
    from statehold.state.device import Devices
    from statehold.store import Store

T = TypeVar("T")


class Restorer:
    """Restores into one live state. One object for one call of restore()."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        devices: Devices,
        peers: Peers | None,
        state: Mapping[str, Any],
        selection: Selection,
    ) -> None:
        self._store = store
        self._engine = engine
        self._devices = devices
        self._peers = peers
        self._rank = peers.rank if peers else 0
        self._ranks = peers.world_size if peers else 1
        self._state = state
        self._selection = selection

    def newest(self) -> tuple[RestoreReport | None, dict[int, CorruptionError]]:
        """Restore the newest intact step: what was restored, and the damaged steps passed over."""
        failed: dict[int, CorruptionError] = {}
        while True:
            remaining = [step for step in self._steps() if step not in failed]
            if not remaining:
                break
            try:
                return self.step(remaining[-1]), failed
            except CorruptionError as error:
                if remaining[-1] in self._store.steps():  # else it was retired meanwhile
                    failed[remaining[-1]] = error
        if failed:
            raise failed[max(failed)].with_fact("also damaged", listed(failed))
        return None, failed

    def step(self, step: int) -> RestoreReport:
        """Restore this step, or raise."""
        with self._store.protect(step):
            try:
                return self._restore(step)
            except (CorruptionError, StateMismatchError) as error:
                error.with_fact("step", step)
                others = [other for other in self._steps_here() if other != step]
                raise error.with_fact("other steps", listed(others)) from None
'''
