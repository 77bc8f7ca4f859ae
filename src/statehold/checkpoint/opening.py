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
from typing import TYPE_CHECKING

from statehold.checkpoint.agent.companion import companion_of
from statehold.checkpoint.levels.levels import open_levels
from statehold.checkpoint.levels.opening import storage_of
from statehold.checkpoint.parts import Parts
from statehold.checkpoint.save.building import open_saving
from statehold.checkpoint.save.callbacks import Callbacks
from statehold.checkpoint.session import Session
from statehold.checkpoint.telemetry.watch import Watch, check_trace
from statehold.io.runtime import Runtime
from statehold.observe.background_log import BackgroundLog
from statehold.ranks.joining import join
from statehold.ranks.membership import ALONE

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.hosts.discovery import Exchange
    from statehold.checkpoint.levels.specs import Level
    from statehold.checkpoint.save.trainer import Trainer
    from statehold.options import Options
    from statehold.ranks.peers import Peers


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
) -> Parts:
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
        give_way=lambda: saving.pipeline.wait_staged(),  # no copy begins before there is one
        clock=opening.borrowed.clock,
        owned=owned,
    )
    companion = companion_of(specs, runtime, levels, log)
    owned.callback(companion.end)
    owned.callback(levels.promotions.close)
    clock = opening.borrowed.clock
    saving = open_saving(specs, runtime.options, levels, watch, log, clock, callbacks)
    owned.callback(saving.pipeline.close)
    return Parts(run, specs, opening.trainer, runtime, peers, watch, levels, companion, *saving)
