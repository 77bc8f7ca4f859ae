"""Opens a session: finds the other ranks, opens or borrows a runtime, and builds the parts on it.

Invariants: after any error, `owned` closes everything in the opposite order of opening: the
pipeline, the copies, the agent, the hosts, the places, the trace, the runtime, the other ranks.
Not here: the work of a session (session), how levels are opened (levels/building).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statehold.checkpoint.agent.companion import Companion
from statehold.checkpoint.agent.starting import Agent, agent_for
from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.building import open_levels, watch_of
from statehold.checkpoint.levels.opening import storage_of
from statehold.checkpoint.parts import Parts
from statehold.checkpoint.save.across import publisher_of
from statehold.checkpoint.save.level_choice import LevelChoice
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.checkpoint.session import Session
from statehold.checkpoint.telemetry.watch import Watch, check_trace
from statehold.io.runtime import Runtime
from statehold.layout.claims import Claims
from statehold.observe.background_log import BackgroundLog
from statehold.process.host_memory import ranks_on_host
from statehold.ranks.joining import join
from statehold.ranks.membership import ALONE

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.hosts.meeting import Exchange
    from statehold.checkpoint.levels.levels import Levels
    from statehold.checkpoint.levels.specs import Level
    from statehold.checkpoint.save.call import Calls
    from statehold.options import Options
    from statehold.ranks.peers import Peers

__all__ = ["Borrowed", "Opening", "open_session"]


@dataclass(slots=True)
class Borrowed:
    """What a session gets instead of opening its own, and leaves open, except for the peers."""

    runtime: Runtime | None = None
    fs: Fs | None = None
    peers: Peers | None = None
    exchange: Exchange | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments for opening a session."""

    run: str
    specs: Sequence[Level]
    options: Options
    borrowed: Borrowed
    calls: Calls


def open_session(opening: Opening, owned: contextlib.ExitStack) -> Session:
    """A session of this process's membership. owned: closes it, if the caller must."""
    check_trace(opening.options.trace, opening.run)
    peers = opening.borrowed.peers or join(opening.run, opening.options)
    if peers is not None:
        owned.callback(peers.close)
    runtime = _runtime(opening, peers, owned)
    return Session(_parts(opening, runtime, peers, owned), owned)


def _runtime(opening: Opening, peers: Peers | None, owned: contextlib.ExitStack) -> Runtime:
    sharing = ranks_on_host((peers.membership if peers else ALONE).world)
    runtime = opening.borrowed.runtime
    if runtime is not None:
        runtime.share_with(sharing)
        return runtime
    storage = storage_of(opening.specs, opening.run)
    runtime = Runtime(opening.options, storage, sharing=sharing, fs=opening.borrowed.fs)
    owned.callback(runtime.close)
    return runtime


def _parts(
    opening: Opening, runtime: Runtime, peers: Peers | None, owned: contextlib.ExitStack
) -> Parts:
    run, specs, membership = opening.run, opening.specs, peers.membership if peers else ALONE
    log = BackgroundLog()
    watch = Watch(run, membership.rank, membership.world, opening.options.trace, log)
    owned.callback(watch.close)
    levels = open_levels(
        run,
        specs,
        runtime,
        peers,
        opening.borrowed.exchange,
        watch,
        give_way=lambda: pipeline.wait_staged(),  # no copy begins before there is one
        owned=owned,
    )
    companion = Companion(_agent(opening, runtime, levels, log), levels)
    owned.callback(companion.end)
    owned.callback(levels.promotions.close)
    claims = Claims(membership)
    watches = [watch_of(spec, watch) for spec in specs]
    schedule = Schedule(specs, levels.promotions.promoters, membership, runtime.options, watches)
    publisher = publisher_of(peers, levels, claims, schedule, log)
    choice = LevelChoice(specs, levels.near, levels.promotions, peers, levels.hosts, log)
    pipeline = Pipeline(choice, publisher, levels.promotions, log)
    owned.callback(pipeline.close)
    return Parts(
        run, specs, opening.calls, runtime, peers, watch, levels, companion, claims, schedule,
        choice, pipeline,
    )  # fmt: skip


def _agent(opening: Opening, runtime: Runtime, levels: Levels, log: BackgroundLog) -> Agent | None:
    """The agent of the run, not started yet.

    None if another rank leads, or on a disk from the caller.
    """
    if not (runtime.has_own_fs and levels.store.leads):
        return None
    return agent_for(opening.run, opening.specs, runtime.options, log)
