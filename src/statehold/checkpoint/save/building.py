"""Builds the saving side of a session: claims of the ranks, cadence, level choice, pipeline.

Not here: one call of save() (call), how the levels are opened (levels/levels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.levels import Levels, watch_of
from statehold.checkpoint.levels.places import last_saved_s
from statehold.checkpoint.levels.specs import Level
from statehold.checkpoint.save.across import publisher_of
from statehold.checkpoint.save.callbacks import Callbacks
from statehold.checkpoint.save.level_choice import LevelChoice
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.checkpoint.telemetry.watch import Watch
from statehold.layout.claims import Claims
from statehold.observe.background_log import BackgroundLog
from statehold.options import Options
from statehold.ranks.membership import ALONE


class Saving(NamedTuple):
    """The parts that take a save from the call to the committed step."""

    claims: Claims
    schedule: Schedule
    level_choice: LevelChoice
    pipeline: Pipeline


def open_saving(
    specs: Sequence[Level],
    options: Options,
    levels: Levels,
    watch: Watch,
    log: BackgroundLog,
    clock: Callable[[], float],
    callbacks: Callbacks,
) -> Saving:
    """The saving side of a session. The caller closes its pipeline. clock: when a save is due."""
    peers, promotions = levels.peers, levels.promotions
    membership = peers.membership if peers else ALONE
    claims = Claims(membership)
    watches = [watch_of(spec, watch) for spec in specs]
    saved_s = partial(last_saved_s, levels.near[0])
    schedule = Schedule(specs, promotions.promoters, membership, options, watches, saved_s, clock)
    publisher = publisher_of(peers, levels, claims, schedule, log)
    choice = LevelChoice(specs, levels.near, promotions, peers, levels.hosts, log)
    return Saving(claims, schedule, choice, Pipeline(choice, publisher, promotions, log, callbacks))
