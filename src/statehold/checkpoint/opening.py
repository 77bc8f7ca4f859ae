"""Opens a session: finds the other ranks, opens or borrows a runtime, and builds the parts on it.

Invariants: after any error, `owned` closes everything in the opposite order of opening: the
pipeline, the copies, the agent, the hosts, the places, the trace, the runtime, the other ranks.

Not here: the work of a session (session), how levels are opened (levels/levels).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from statehold.checkpoint.agent.starting import companion_of
from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.levels import open_levels, watch_of
from statehold.checkpoint.levels.opening import storage_of
from statehold.checkpoint.levels.specs import Level
from statehold.checkpoint.save.call import Saver
from statehold.checkpoint.save.handle import Callbacks
from statehold.checkpoint.save.level_choice import LevelChoice
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.checkpoint.save.publishing import publisher_of
from statehold.checkpoint.session import Session
from statehold.checkpoint.telemetry.watch import Watch, check_trace
from statehold.io.runtime import Runtime
from statehold.layout.claims import Claims
from statehold.observe.background_log import BackgroundLog
from statehold.options import Options
from statehold.ranks.joining import join
from statehold.ranks.membership import ALONE
from statehold.steps.target import last_saved_s

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.hosts.discovery import Exchange
    from statehold.checkpoint.save.gate import Trainer
    from statehold.ranks.peers import Peers


# -- the session -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Borrowed:
    """Parts that a session gets instead of opening its own. It closes only the peers.

    clock: tells when a save and a level are due. The product gives nothing but a runtime and peers;
        a test may give each of these.
    """

    runtime: Runtime | None = None
    fs: Fs | None = None
    peers: Peers | None = None
    exchange: Exchange | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments for opening a session."""

    run: str
    specs: Sequence[Level]
    options: Options
    borrowed: Borrowed
    trainer: Trainer


def open_session(opening: Opening, owned: contextlib.ExitStack) -> Session:
    """A session of this process's membership. owned: closes it, if the caller must."""
    check_trace(opening.options.trace, opening.run)
    peers = opening.borrowed.peers or join(opening.run, opening.options)
    if peers is not None:
        owned.callback(peers.close)
    runtime = _runtime(opening, peers, owned)
    return Session(_parts(opening, runtime, peers, owned), owned)


def _runtime(opening: Opening, peers: Peers | None, owned: contextlib.ExitStack) -> Runtime:
    world = (peers.membership if peers else ALONE).world
    runtime = opening.borrowed.runtime
    if runtime is not None:
        runtime.serve(world)
        return runtime
    storage = storage_of(opening.specs, opening.run)
    runtime = Runtime(opening.options, storage, world=world, fs=opening.borrowed.fs)
    owned.callback(runtime.close)
    return runtime


def _parts(
    opening: Opening, runtime: Runtime, peers: Peers | None, owned: contextlib.ExitStack
) -> Saver:
    run, specs, membership = opening.run, opening.specs, peers.membership if peers else ALONE
    log = BackgroundLog()
    watch = Watch(run, membership.rank, membership.world, opening.options.trace, log)
    owned.callback(watch.close)
    callbacks = Callbacks(opening.options.callbacks, log)
    owned.callback(callbacks.close)  # once the run is free
    levels = open_levels(
        run,
        specs,
        runtime,
        peers,
        opening.borrowed.exchange,
        watch,
        give_way=lambda: pipeline.wait_staged(),  # no copy begins before there is one
        clock=opening.borrowed.clock,
        owned=owned,
    )
    companion = companion_of(specs, runtime, levels, log)
    owned.callback(companion.end)
    owned.callback(levels.promotions.close)
    clock = opening.borrowed.clock
    promotions, claims = levels.promotions, Claims(membership)
    watches = [watch_of(spec, watch) for spec in specs]
    saved_s = partial(last_saved_s, levels.near[0])
    options = runtime.options
    schedule = Schedule(specs, promotions.promoters, membership, options, watches, saved_s, clock)
    publisher = publisher_of(peers, levels, claims, schedule, log)
    choice = LevelChoice(specs, levels.near, promotions, peers, levels.hosts, log)
    # A collective that waits longer than that for a rank fails the save anyway, as does its commit.
    device_s = options.peer_timeout_s
    pipeline = Pipeline(choice, publisher, promotions, log, callbacks, device_s)
    owned.callback(pipeline.close)
    return Saver(
        run, specs, opening.trainer, runtime, peers, watch, levels, companion, claims, schedule,
        choice, pipeline,
    )  # fmt: skip
