"""The levels of an open run: the places of its steps, and the copies from one level to the next.

    places       every level, the nearest first; `near` are those that are directories
    hosts        which rank is on which host; None if no level is one of each host
    promotions   the copies from the first level to the others
    notes        the run's notes about itself, for people and commands

Invariants: nothing on the storage changes before prepare(), and only one job changes it. Everything
is closed in the opposite order of opening, even after an error.

Not here: what a user says of a level (specs), the work of a level (steps/target), the copies
(promoting), the files of the notes (remembered, steps/owners).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from statehold.checkpoint.levels.opening import open_places
from statehold.checkpoint.levels.promoting import LevelStatus, Promoter, Promotions, readable
from statehold.checkpoint.levels.remembered import remember
from statehold.checkpoint.levels.specs import Level, ObjectStore
from statehold.checkpoint.telemetry.watch import LevelWatch, Watch
from statehold.errors import CorruptionError, RunBusyError, StateholdError, StorageError
from statehold.format.entries import Origin
from statehold.io.runtime import Runtime
from statehold.options.io import settled
from statehold.process.warn import logger
from statehold.ranks.membership import ALONE
from statehold.ranks.peers import Peers
from statehold.ranks.rounds import Round
from statehold.steps.nearest import Nearest
from statehold.steps.owners import Identity
from statehold.steps.store import Store
from statehold.steps.target import DirectoryPlace, Target

if TYPE_CHECKING:
    from statehold.checkpoint.levels.hosts.discovery import Exchange, Hosts


# -- the levels ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Levels:
    """The levels of the run directory `run`. peers: None for a process that is alone.

    began_from: the step of another run that this job has restored into a run without steps.
    """

    run: str
    places: Sequence[Target]
    near: Sequence[DirectoryPlace]
    hosts: Hosts | None
    promotions: Promotions
    notes: RunNotes
    peers: Peers | None
    began_from: Origin | None = None

    def __post_init__(self) -> None:
        self.store: Store = self.near[0].store  # the steps of the first level

    # -- reading ---------------------------------------------------------------------------

    def nearest(self, drain: Callable[[], None]) -> Nearest:
        """The steps of all levels, for one look at them.

        All ranks call this together if a level lies on several hosts. `drain` ends the saves under
        way.
        """
        if self.hosts is not None:
            self.hosts.discover()
            if self.hosts.are_apart:
                drain()  # a step that only some hosts have published does not count
            self.hosts.census()
        for each in self.promotions.promoters:
            each.look()
        shelves = [shelf for place in self.places for shelf in place.shelves()]
        return Nearest(shelves, os.path.realpath(self.run))

    def check_there(self) -> None:
        """If no step was found: raise for a directory that cannot be a run.

        One level that could take saves is enough.
        """
        for place in reversed(self.near):
            try:
                place.store.check_there()
            except StorageError:
                if place is self.near[0]:
                    raise
            else:
                return

    def restored(self, step: int, served: Collection[str]) -> None:
        """`step` was restored from the levels named in `served`: find out which run owns it."""
        self.near[0].store.intact = step
        self.notes.restored(step, served)

    def status(self, first: LevelStatus) -> list[LevelStatus]:
        """The status of all levels; `first` is that of the first one, except for its steps."""
        newest, error = None, first.error
        try:
            newest = max(self.near[0].steps(), default=None)
        except StorageError as unread:
            error = error or unread
        return [replace(first, newest=newest, error=error), *self.promotions.status()]

    def having(self, step: int, place: DirectoryPlace) -> str:
        """The levels that have a step that was saved at `place`, for the log; asks no storage."""
        others = [each.name for each in self.promotions.status() if each.newest == step]
        names = dict.fromkeys([place.name, *others])
        return f"step {step} is committed at level{'s' * (len(names) > 1)} {', '.join(names)}"

    # -- saving ----------------------------------------------------------------------------

    def prepare(self, make_way: Callable[[], bool]) -> None:
        """Create the run directory, lock it and clear leftovers of a crash, if this rank leads.

        make_way: ends other users of the run in this process, if it can.
        """
        had_id = self.notes.has_id
        try:
            try:
                self.near[0].prepare(self.peers)
            except RunBusyError:
                if not make_way():
                    raise
                self.near[0].prepare(self.peers)
        except StorageError:
            if len(self.near) == 1:
                raise
            # Saves go to the next level, and log why.
        self.notes.write()
        if self.notes.has_id and not had_id:
            # With an id, the run has no part in the levels of others.
            for each in self.promotions.promoters:
                each.look()

    def look(self, within: Round) -> None:
        """Look which steps exist, before copies are decided."""
        if self.hosts is not None:
            self.hosts.census(within)
        for each in self.promotions.promoters:
            each.look()

    # -- steps that go ---------------------------------------------------------------------

    def claim(self, step: int) -> bool:
        """With nothing under way: lock each directory that has `step`, if this rank leads.

        A store has no lock: who has the run may write there. False if another job has a lock, or
        the directory may not be written.
        """
        try:
            for place in self._leading(step):
                (place if isinstance(place, DirectoryPlace) else self.near[0]).prepare(self.peers)
        except (RunBusyError, StorageError):
            return False
        return True

    def quarantine(self, step: int, is_claimed: bool) -> str:
        """Set a damaged step aside at every level that this rank leads, after claim().

        Returns its new place at the first level that had it; the old one if it has to stay there,
        because another job may change it, or the level cannot: the state is still restored.
        """
        kept = []
        for place in self._leading(step):
            kept.append(place.path(step))
            try:
                kept[-1] = place.quarantine(step) if is_claimed else kept[-1]
            except StateholdError as error:
                logger.warning("step %d stays at level %s\n%s", step, place.name, error)
        return next(iter(kept), self.store.path(step))

    @contextlib.contextmanager
    def protected(self, step: int) -> Iterator[None]:
        """Keep a step from being retired at any level."""
        with contextlib.ExitStack() as kept:
            for place in self.places:
                kept.enter_context(place.protect(step))
            yield

    def whole(self, steps: Sequence[int]) -> list[int]:
        """Those of `steps` of which a level has all files, as far as it can tell without a
        transfer."""
        left = set(steps)
        for place in self.places:
            for step in left.intersection(readable(place)):
                with contextlib.suppress(StorageError):
                    left -= {step} if place.is_whole(step) else set()
        return [step for step in steps if step not in left]

    def prepare_all(self) -> None:
        """Lock and list what rewind() changes; raises if a level is unreachable or used."""
        for place in self._rewound():
            place.prepare(self.peers)
        for each in self.near:
            each.store.check_there()

    def rewind(self, step: int) -> list[int]:
        """Discard the steps newer than `step` at each level that this rank leads; after
        prepare_all(). The nearest level is the last one: until then a restore takes its step."""
        return sorted({newer for place in self._rewound() for newer in place.rewind(step)})

    def _rewound(self) -> list[Target]:
        """The levels that this rank leads. A farther one without steps may be another run's."""
        leading = [place for place in reversed(self.places) if place.leads]
        return [place for place in leading if place.steps() or place is self.near[0]]

    def forget(self, steps: Collection[int]) -> None:
        """These steps are at no level any more. All ranks call this, with nothing under way."""
        for place in self.near:
            place.forget(steps)
            place.store.known_newest.look_again()
        self.promotions.forget(steps)

    def lacks_newest(self) -> bool:
        """Whether a level lacks the newest step of the first one."""
        newest: int | None = None
        with contextlib.suppress(StorageError):
            newest = self.store.newest()
        return newest is not None and not self.promotions.have(newest)

    def _leading(self, step: int) -> list[Target]:
        """The levels that have the step, and that this rank leads. A level that does not answer is
        passed over: the step may be whole there."""
        near = [each for each in self.near if each.leads and step in readable(each.store)]
        stores = (place for place in self.places if place not in self.near and place.leads)
        return [*near, *(place for place in stores if step in readable(place))]


# -- opening them ----------------------------------------------------------------------------------


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
    places = open_places(
        specs,
        run,
        runtime.fs,
        settled(runtime.options.io).buffer_bytes,
        reuse=runtime.options.io.reuse_files,
        membership=peers.membership if peers else ALONE,
        identity=identity,
    )
    for place in reversed(places):
        owned.callback(_close, place)
    near = [place for place in places if isinstance(place, DirectoryPlace)]
    hosts = _hosts(run, places, peers, exchange, runtime.options.io.address)
    if hosts is not None:
        owned.callback(hosts.close)
    targets = [*zip(specs[1:], places[1:], strict=True), *_copies(specs, places, peers)]
    promoters = [
        Promoter(spec, place, peers, give_way, watch_of(spec, watch), clock)
        for spec, place in targets
    ]
    promotions = Promotions(near[0], promoters, peers, watch_of(specs[0], watch))
    notes = RunNotes(run, specs, places, identity, is_alone=peers is None, writes=writes)
    return Levels(run, places, near, hosts, promotions, notes, peers)


def _hosts(
    run: str,
    places: Sequence[Target],
    peers: Peers | None,
    exchange: Exchange | None,
    address: str | None,
) -> Hosts | None:
    """What the levels that each host has for itself have in common; None without such a level."""
    if not any(place.is_of_hosts for place in places):
        return None
    # Without hosts, none of it is loaded.
    from statehold.checkpoint.levels.hosts.discovery import Hosts, WireExchange
    from statehold.checkpoint.levels.hosts.place import HostPlace

    on_hosts = [place for place in places if isinstance(place, HostPlace)]
    return Hosts(on_hosts, peers, exchange or WireExchange(run, address))


def watch_of(spec: Level, watch: Watch) -> LevelWatch:
    """The watch of a level."""
    return watch.level(spec.name, moving="upload" if isinstance(spec, ObjectStore) else "write")


def _copies(
    specs: Sequence[Level], places: Sequence[Target], peers: Peers | None
) -> list[tuple[Level, Target]]:
    """The copies that hosts keep for each other, as levels that get steps."""
    return [
        (replace(spec, name=copies.name, every=every), copies)
        for spec, place in zip(specs, places, strict=True)
        for every in [1 if place is places[0] else spec.every]
        for copies in place.beside(peers)
    ]


def _close(place: Target) -> None:
    try:
        place.close()
    except StateholdError as error:  # at the end no caller is left to get the error
        logger.warning("could not remove a retired step\n%s", error)


# -- the notes of a run ----------------------------------------------------------------------------


class RunNotes:
    """The notes of a run in its directory: its levels, and its id.

    Only rank 0 writes them, and only if the run is on a real file system. No save and no restore
    depends on a note, and none fails because of one.

    is_alone: no level can be on several hosts. writes: whether this rank writes the notes. stay:
    nothing of them changes once they are written.
    """

    def __init__(
        self,
        run: str,
        specs: Sequence[Level],
        places: Sequence[Target],
        identity: Identity,
        *,
        is_alone: bool,
        writes: bool,
    ) -> None:
        self._run, self._specs, self._places, self._identity = run, specs, places, identity
        self._is_alone = is_alone
        self._writes = writes
        self.stay = not writes or (is_alone and all(place.owned is None for place in places))
        self._noted: list[str] | None = None

    @property
    def has_id(self) -> bool:
        return self._identity.own is not None

    def write(self) -> None:
        """Note the levels; again if somebody has removed the notes with the run directory.

        Until the ranks have met, each of them may be on a host of its own. The next save notes what
        is known then.
        """
        apart = [at.name for at in self._places if at.may_be_apart and not self._is_alone]
        if not self._writes or (apart == self._noted and self._identity.is_noted):
            return
        self._noted = apart
        try:
            if any(place.owned is not None for place in self._places):
                self._identity.establish()
            remember(self._specs, self._run, apart)
        except (OSError, StateholdError) as error:
            logger.debug(
                "cannot write the id and the levels of the run into its directory: %s", error
            )

    def restored(self, step: int, served: Collection[str]) -> None:
        """`step` was restored from the levels named in `served`: find out which run owns it."""
        if not self._writes:
            return
        with contextlib.suppress(StorageError, CorruptionError):  # the next copy asks again
            for place in self._places:
                if place.owned is not None and place.name in served:
                    has_steps = any(each.steps() for each in self._places if _is_ours(each))
                    place.owned.restored(step, has_steps=has_steps)


def _is_ours(place: Target) -> bool:
    """Whether a level is of this run, as long as the run has no id: no other one is named there."""
    return place.owned is None or place.owned.owner() is None
