"""The parts of a session, and those that save() and restore() use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from statehold.checkpoint.agent.companion import Companion
from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.specs import Level
from statehold.checkpoint.restore.call import RestoreCalls
from statehold.checkpoint.save.call import Saver
from statehold.checkpoint.save.level_choice import LevelChoice
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.checkpoint.save.sharing import Sharing
from statehold.checkpoint.save.trainer import Trainer
from statehold.checkpoint.telemetry.watch import Watch
from statehold.io.runtime import Runtime
from statehold.layout.claims import Claims
from statehold.layout.share import PlanCache
from statehold.ranks.membership import ALONE, Membership
from statehold.ranks.peers import Peers


@dataclass(eq=False, frozen=True)
class Parts:
    """The result of opening.

    peers: None for a process that is alone. trainer: of the Checkpointer, which may have had other
        sessions. All parts except `runtime` and `trainer` end with the session.
    """

    run: str
    specs: Sequence[Level]
    trainer: Trainer
    runtime: Runtime
    peers: Peers | None
    watch: Watch
    levels: Levels
    companion: Companion
    claims: Claims
    schedule: Schedule
    level_choice: LevelChoice
    pipeline: Pipeline

    @property
    def membership(self) -> Membership:
        return self.peers.membership if self.peers else ALONE

    @property
    def rank(self) -> int | None:
        """None for a process that is alone."""
        return self.peers.rank if self.peers else None

    @cached_property
    def sharing(self) -> Sharing:
        return Sharing(self.levels.near[0], self.runtime, self.peers)

    def saver(self, prepare: Callable[[], None]) -> Saver:
        """The parts that a call of save() uses. prepare: makes the run directory ready."""
        return Saver(
            rank=self.rank,
            world=self.membership.world,
            runtime=self.runtime,
            levels=self.levels,
            claims=self.claims,
            plans=PlanCache(self.membership),
            schedule=self.schedule,
            pipeline=self.pipeline,
            watch=self.watch,
            trainer=self.trainer,
            prepare=prepare,
            sharing=self.sharing,
        )

    def restores(self, claim: Callable[[int], bool]) -> RestoreCalls:
        """The parts that a call of restore() uses. claim: makes sure that nobody else changes a
        step."""
        return RestoreCalls(
            specs=self.specs,
            runtime=self.runtime,
            levels=self.levels,
            peers=self.peers,
            schedule=self.schedule,
            watch=self.watch,
            trainer=self.trainer,
            drain=self.pipeline.drain,
            claim=claim,
            parent=self.runtime.options.origin,
            goes_on=self.sharing.goes_on,
        )
