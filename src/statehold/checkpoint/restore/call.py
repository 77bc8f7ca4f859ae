"""One call of restore(), by all ranks together: from the levels of a run to a live state.

    ready?     no rank has an error to raise, and all have the same levels
    gate       no save still copies a byte of the state
    nearest    the steps of all levels; a run that has none begins with that of its parent
    restore    the requested step, or the newest intact one
    after      the levels and the cadence continue from that step; damaged steps are set aside

Not here: how one step gets into the state (restoring).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.alike import check_same, described
from statehold.checkpoint.levels.forking import fork_into
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.nearest import Nearest
from statehold.checkpoint.levels.specs import Level
from statehold.checkpoint.restore.choice import Choice
from statehold.checkpoint.restore.quarantine import set_aside
from statehold.checkpoint.restore.restoring import Restorer
from statehold.checkpoint.save.trainer import Trainer
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import CorruptionError
from statehold.format.selection import RestoreReport, Selection
from statehold.io.runtime import Runtime
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import led, together
from statehold.tensors.restore import check_takes_values


@dataclass(eq=False)
class RestoreCalls:
    """The parts that restore() uses.

    drain: ends the saves under way. claim: locks every directory that has a step, if this rank
        leads.
    parent: the run and the step that a run without steps begins from.
    report: the report of the last call.
    """

    specs: Sequence[Level]
    runtime: Runtime
    levels: Levels
    peers: Peers | None
    schedule: Schedule
    watch: Watch
    trainer: Trainer
    drain: Callable[[], None]
    claim: Callable[[int], bool]
    parent: tuple[str, int | None] | None = None
    report: RestoreReport | None = None

    def restore(self, state: Mapping[str, Any], choice: Choice, selection: Selection) -> int | None:
        """Load the step that is meant; returns its number, or None if the run has none."""
        self._wait_ready(state)
        nearest = self.levels.nearest(self.drain)
        if self.parent is not None and led(self.peers, partial(self._begin, nearest)):
            nearest = self.levels.nearest(self.drain)
        confirmed, failed = self._load(nearest, state, choice, selection)
        if self.report is None:
            together(self.peers, self.levels.check_there)
            return None
        restored = self.report.step
        self.schedule.turns.goes_on_from(restored)
        self.levels.restored(restored, nearest.served(restored))
        if failed:
            set_aside(self.levels, failed, confirmed, restored)
        return restored

    def _begin(self, nearest: Nearest) -> bool:
        """Rank 0: begin the run with the step of its parent, unless it has steps or saves one."""
        if self.parent is None or self.levels.near[0].is_prepared or nearest.steps():
            return False
        fork_into(self.levels, *self.parent)
        return True

    def _wait_ready(self, state: Mapping[str, Any]) -> None:
        of_rank_0 = led(self.peers, lambda: described(self.specs))

        def check() -> None:
            self.trainer.raise_failures()
            check_takes_values(state)
            check_same(self.specs, of_rank_0)

        together(self.peers, check)
        self.trainer.gate.wait()
        self.trainer.gate.join_streams()

    def _load(
        self, nearest: Nearest, state: Mapping[str, Any], choice: Choice, selection: Selection
    ) -> tuple[set[int], dict[int, CorruptionError]]:
        """The steps that are certainly damaged, and the steps that were skipped."""
        runtime = self.runtime
        with self.watch.restore() as watch:
            restorer = Restorer(
                nearest,
                runtime.engine,
                runtime.devices,
                self.peers,
                state,
                selection,
                watch,
                self.claim,
            )
            self.report, failed = restorer.chosen(choice)
            watch.end(self.report, failed)
        return restorer.confirmed, failed
