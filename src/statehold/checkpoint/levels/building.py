"""Opens the levels of a run: their places, their hosts, and the copies between them.

Invariants: everything is closed in the opposite order of opening, even after an error.
Not here: the use of the levels (levels), the place of a level (opening).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from statehold.checkpoint.levels.hosts.discovery import Exchange, Hosts, HttpExchange
from statehold.checkpoint.levels.hosts.place import CopiesPlace, HostPlace
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.levels.opening import open_places
from statehold.checkpoint.levels.owners import Identity
from statehold.checkpoint.levels.places import DirectoryPlace, Place
from statehold.checkpoint.levels.promoting import Promoter, Promotions
from statehold.checkpoint.levels.run_notes import RunNotes
from statehold.checkpoint.levels.specs import Level, ObjectStore
from statehold.checkpoint.telemetry.copies import LevelWatch
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import StateholdError
from statehold.io.runtime import Runtime
from statehold.observe.background_log import logger
from statehold.ranks.membership import ALONE
from statehold.ranks.peers import Peers


def open_levels(
    run: str,
    specs: Sequence[Level],
    runtime: Runtime,
    peers: Peers | None,
    exchange: Exchange | None,
    watch: Watch,
    give_way: Callable[[], None],
    clock: Callable[[], float],
    owned: contextlib.ExitStack,
) -> Levels:
    """The levels of `run`, from `specs`.

    give_way: returns when no save needs the processors and the memory more than a copy.
    clock: when a level is due for a step.
    owned: closes the places and the hosts. The caller closes the promotions before them.
    """
    writes = runtime.has_own_fs and (peers is None or peers.membership.leads)
    identity = Identity(run, draws=writes)
    places = _places(run, specs, runtime, peers, identity, owned)
    near = [place for place in places if isinstance(place, DirectoryPlace)]
    on_hosts = [place for place in places if isinstance(place, HostPlace)]
    hosts = Hosts(on_hosts, peers, exchange or HttpExchange(run, runtime.options.io.address))
    owned.callback(hosts.close)
    targets = [*zip(specs[1:], places[1:], strict=True), *_copies(specs, places, peers)]
    promoters = [
        Promoter(spec, place, peers, give_way, watch_of(spec, watch), clock)
        for spec, place in targets
    ]
    promotions = Promotions(near[0], promoters, peers, watch_of(specs[0], watch))
    notes = RunNotes(run, specs, places, identity, is_alone=peers is None, writes=writes)
    return Levels(run, places, near, hosts, promotions, notes, peers)


def watch_of(spec: Level, watch: Watch) -> LevelWatch:
    """The watch of a level."""
    return watch.level(spec.name, moving="upload" if isinstance(spec, ObjectStore) else "write")


def _places(
    run: str,
    specs: Sequence[Level],
    runtime: Runtime,
    peers: Peers | None,
    identity: Identity,
    owned: contextlib.ExitStack,
) -> list[Place]:
    options = runtime.options
    places = open_places(
        specs,
        run,
        runtime.fs,
        options.io.buffer_size,
        reuse=options.io.reuse_files,
        membership=peers.membership if peers else ALONE,
        identity=identity,
    )
    for place in reversed(places):
        owned.callback(_close, place)
    return places


def _copies(
    specs: Sequence[Level], places: Sequence[Place], peers: Peers | None
) -> list[tuple[Level, CopiesPlace]]:
    """The copies that hosts keep for each other, as levels that get steps."""
    return [
        (replace(spec, name=place.copies.name, every=every), place.copies)
        for spec, place in zip(specs, places, strict=True)
        for every in [1 if place is places[0] else spec.every]
        if peers is not None and isinstance(place, HostPlace) and place.wanted_copies
    ]


def _close(place: Place) -> None:
    try:
        place.close()
    except StateholdError as error:  # at the end no caller is left to get the error
        logger.warning("could not remove a retired step\n%s", error)
