"""What an open Checkpointer holds, from the file system to the levels, and how all of it ends.

Invariants: nothing on the storage is changed before prepare_saving(), and only by one job; what was
opened is closed in the opposite order, whatever fails on the way.
Not here: what is done with it (checkpointer, pipeline, restoring).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from statehold import _core
from statehold.checkpoint.agent.starting import Agent, agent_for
from statehold.checkpoint.flushing import Countdown, flush
from statehold.checkpoint.keeper import make_way, others_of
from statehold.checkpoint.levels.hosts.meeting import Exchange, Hosts, HttpExchange
from statehold.checkpoint.levels.hosts.place import CopiesPlace, HostPlace
from statehold.checkpoint.levels.nearest import Nearest, ReadableLevel
from statehold.checkpoint.levels.object_place import ObjectPlace
from statehold.checkpoint.levels.opening import open_places, storage_of
from statehold.checkpoint.levels.owners import Identity
from statehold.checkpoint.levels.places import DirectoryPlace, Place
from statehold.checkpoint.levels.promoting import LevelStatus, Promoter, Promotions
from statehold.checkpoint.levels.remembered import remember
from statehold.checkpoint.levels.rhythm import Rhythm
from statehold.checkpoint.levels.specs import Level, ObjectStore
from statehold.checkpoint.save.across import Across
from statehold.checkpoint.save.handle import forked
from statehold.checkpoint.save.level_choice import LevelChoice
from statehold.checkpoint.save.pipeline import Pipeline
from statehold.checkpoint.save.publishing import Alone, Publisher, Together
from statehold.checkpoint.save.writes import manifest_bytes
from statehold.checkpoint.telemetry.watch import Watch, check_trace
from statehold.errors import (
    CorruptionError,
    RunBusyError,
    StateholdError,
    StorageError,
)
from statehold.format.saved import MANIFEST_NAME
from statehold.io.profile import tuned
from statehold.io.staging import Staging
from statehold.layout.claims import Claims
from statehold.layout.share import PlanCache
from statehold.observe.background_log import BackgroundLog, logger
from statehold.observe.once import say_once
from statehold.options import Options
from statehold.process.host_memory import ranks_on_host
from statehold.ranks.joining import join
from statehold.ranks.membership import ALONE

if TYPE_CHECKING:
    from statehold._core import Engine, File, Fs
    from statehold.checkpoint.telemetry.copies import LevelWatch
    from statehold.layout.plan import SavePlan
    from statehold.ranks.agreeing import Meeting
    from statehold.ranks.peers import Peers
    from statehold.tensors.devices import Devices


# How long a rank that ends by an error waits for others to bring the newest step to all levels.
STRAGGLERS_S = 10.0


class Session:
    """What an open Checkpointer holds: the file system, the engine, the store, the pipeline."""

    def __init__(
        self,
        run: str,
        levels: Sequence[Level],
        options: Options,
        borrowed_fs: Fs | None,
        borrowed_peers: Peers | None,
        borrowed_exchange: Exchange | None,
        owned: contextlib.ExitStack,
    ) -> None:
        """owned: closes what is opened here, in the opposite order; close() does, too."""
        self._owned = owned
        self._run = run
        self._levels = levels
        self._pid = os.getpid()
        self._is_prepared = self._has_saved = False
        self._flushes = 0
        check_trace(options.trace, run)
        self.peers = borrowed_peers or join(run, options)
        if self.peers is not None:
            owned.callback(self.peers.close)
        self.rank = self.peers.rank if self.peers else None
        self._owns_fs = borrowed_fs is None
        if borrowed_fs is None:  # a profile is of a real storage
            options, note = tuned(options, storage_of(levels, run))
            say_once(note)
        self.fs = borrowed_fs or _opened_fs(options, owned)
        self._identity = Identity(run)
        self.membership = self.peers.membership if self.peers else ALONE
        rank, ranks = self.membership.rank, self.membership.world
        self.places = open_places(
            levels,
            run,
            self.fs,
            options.buffer_size,
            reuse=options.reuse_files,
            membership=self.membership,
            identity=self._identity,
        )
        for place in reversed(self.places):
            owned.callback(_close_place, place)
        self.near = [place for place in self.places if isinstance(place, DirectoryPlace)]
        on_hosts = [place for place in self.places if isinstance(place, HostPlace)]
        exchange = borrowed_exchange or HttpExchange(run, options.address)
        self.hosts = Hosts(on_hosts, self.peers, exchange)
        owned.callback(self.hosts.close)
        self.store = self.near[0].store
        self.staging = Staging(self.fs, options, ranks_on_host(ranks))
        owned.callback(self.staging.close)
        log = BackgroundLog()
        self.watch = Watch(run, rank, ranks, options.trace, log)
        owned.callback(self.watch.close)
        self._agent: Agent | None = None
        owned.callback(self._say_goodbye)
        self.claims = Claims(self.membership)
        self.plans = PlanCache(self.membership)
        self.promotions = self._promotions(levels)
        owned.callback(self.promotions.close)
        watches = [self._watch_of(level) for level in levels]
        self.rhythm = Rhythm(levels, self.promotions, self.membership, options, watches)
        publisher = self._publisher(log)
        self._level_choice = LevelChoice(
            levels, self.near, self.promotions, self.peers, self.hosts, log
        )
        self.pipeline = Pipeline(self._level_choice, publisher, self.promotions, log)
        owned.callback(self.pipeline.close)
        self._noted: list[str] | None = None
        if self._owns_fs and self.store.leads:
            self._agent = agent_for(run, levels, options, log)

    def _promotions(self, levels: Sequence[Level]) -> Promotions:
        targets = list(zip(levels[1:], self.places[1:], strict=True))
        promoters = [
            Promoter(level, place, self.peers, self._give_way, self._watch_of(level))
            for level, place in [*targets, *self._copies(levels)]
        ]
        return Promotions(self.near[0], promoters, self.peers, self._watch_of(levels[0]))

    def _copies(self, levels: Sequence[Level]) -> list[tuple[Level, CopiesPlace]]:
        """The copies that hosts keep for each other, as levels that steps go to."""
        return [
            (replace(level, name=place.copies.name, every=every), place.copies)
            for level, place in zip(levels, self.places, strict=True)
            for every in [1 if place is self.places[0] else level.every]
            if self.peers is not None and isinstance(place, HostPlace) and place.wanted_copies
        ]

    def _publisher(self, log: BackgroundLog) -> Publisher:
        if self.peers is None:
            return Alone(self.promotions, self.rhythm, log)
        if any(isinstance(place, HostPlace) for place in self.places):
            return Across(self.peers, self.claims, self.promotions, self.rhythm, log)
        return Together(self.peers, self.claims, self.promotions, self.rhythm, log)

    @property
    def is_of_this_process(self) -> bool:
        """False in a fork: the threads that would do the work are not there."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        if not self.is_of_this_process:
            raise forked("this Checkpointer", self._pid)

    def prepare_saving(self) -> None:
        """Create the run directory; the rank that leads locks it and clears what a crash left."""
        self._has_saved = True
        if not self._is_prepared:
            try:
                self._prepare_first()
            except StorageError:
                if len(self.near) == 1:
                    raise
                # Saves go to the next level, and say why.
            if self.near[0].was_taken_over:
                self._take_over()
            self._is_prepared = True
        self._note_levels()
        self._keep_agent()

    def _prepare_first(self) -> None:
        others = others_of(self._run, self)
        try:
            self.near[0].prepare(self._token)
        except RunBusyError:
            if not make_way(others):
                raise
            self.near[0].prepare(self._token)

    @property
    def has_saved(self) -> bool:
        """Whether a save, or another change of the run, was asked for."""
        return self._has_saved

    def _keep_agent(self) -> None:
        """See that the agent is there; not where it could see but a part of each step."""
        if self._agent is None:
            return
        if self.hosts.are_apart:
            self.pipeline.ahead(self._agent.goodbye)
            self._agent = None
        elif self._agent.is_missing:
            self.pipeline.ahead(self._agent.start)

    def _note_levels(self) -> None:
        """For whoever looks at the run later; nothing depends on it. Until the ranks have met, each
        may be on a host of its own; the next save notes what is known then."""
        apart = [
            at.name
            for at in self.places
            if self.peers is not None and isinstance(at, HostPlace) and len(at.hosts) != 1
        ]
        if self._owns_fs and not self.rank and apart != self._noted:  # not on a simulated disk
            self._noted = apart
            try:
                if any(isinstance(place, ObjectPlace) for place in self.places):
                    self._identity.establish()
                remember(self._levels, self._run, apart)
            except (OSError, StateholdError) as error:
                logger.debug("who the run is, and its levels, are not noted in it: %s", error)

    def restored(self, step: int, served: Collection[str]) -> None:
        """`step` was restored from the levels named in `served`: see whose steps those are."""
        if self.rank or not self._owns_fs:
            return
        far = [each for each in self.places if isinstance(each, ObjectPlace)]
        with contextlib.suppress(StorageError, CorruptionError):  # the next copy asks again
            for place in far:
                if place.name in served:
                    has_steps = any(near.steps() for near in self.near)
                    place.owned.restored(step, has_steps=has_steps)

    @property
    def _token(self) -> str | None:
        return self.peers.token if self.peers else None

    def nearest(self) -> Nearest:
        """The steps of all levels, for one look at them. All ranks together, where a level lies on
        several hosts."""
        self.hosts.meet()
        if self.hosts.are_apart:
            self.pipeline.drain()  # what is published on some hosts, and not on others, is no step
        self.hosts.census()
        self.promotions.look()
        views: list[ReadableLevel] = [
            view
            for place in self.places
            for view in (place.views() if isinstance(place, HostPlace) else [place])
        ]
        return Nearest(views, os.path.realpath(self._run))

    def check_there(self) -> None:
        """Where no step was found: what cannot be a run is no run without steps. One level that
        could take saves is enough."""
        for place in reversed(self.near):
            try:
                place.store.check_there()
            except StorageError:
                if place is self.near[0]:
                    raise
            else:
                return

    @property
    def engine(self) -> Engine:
        """What moves the bytes of saves and restores."""
        return self.staging.engine

    @property
    def devices(self) -> Devices:
        """What copies between devices and the engine's buffers."""
        return self.staging.devices

    def make_room(self, plan: SavePlan) -> None:
        """Have staging memory for a save, unless it goes to memory, which stages little."""
        if not self.store.is_mapped:
            self.staging.fit(plan.file_bytes, self.pipeline.drain)

    def ready_file(self, plan: SavePlan, tree: Any) -> File | None:
        """The file of a save, where it is memory that is mapped already: then the state is copied
        straight into it. A file that has to be made is made in the background, and so is one for
        whose documents there is no room: the save goes to the next level then."""
        is_in_use = self.pipeline.uses(plan.step)  # its directory is in use
        if self.peers is not None or is_in_use or not self.store.has_ready(plan.file_name):
            return None
        try:
            self.store.begin(plan.step)
            if len(self.near) > 1:
                guess = partial(manifest_bytes, plan, tree)
                self.store.reserve(plan.step, None, MANIFEST_NAME, guess)
            file, _ = self.store.data_file(plan.step, plan.file_name, plan.file_bytes)
        except StorageError:  # the commit thread meets it, too, and knows what to do
            self.store.abandon(plan.step)
            return None
        return file

    def levels(self) -> list[LevelStatus]:
        """How all levels stand."""
        first, newest, error = self.near[0], None, self._level_choice.first_error
        try:
            newest = max(first.steps(), default=None)
        except StorageError as unread:
            error = error or unread
        interval = self.rhythm.interval(first.name)
        status = LevelStatus(first.name, newest, error=error, interval=interval)
        return [status, *self.promotions.status()]

    def told_of(self, step: int, place: DirectoryPlace) -> str:
        """Which levels have a step that was saved at `place`, for the log; asks no storage."""
        others = [each.name for each in self.promotions.status() if each.newest == step]
        names = dict.fromkeys([place.name, *others])
        return f"step {step} is committed at level{'s' * (len(names) > 1)} {', '.join(names)}"

    def check_order(self, step: int) -> None:
        """Refuse a save that would not become the newest step of all levels."""
        known = (self.pipeline.newest_step(), self.promotions.newest())
        newest = max((each for each in known if each is not None), default=None)
        # Where the first level is away, saves go to the next one; it is asked when it is back.
        self.near[0].check_order(step, newest, may_be_away=len(self.near) > 1)

    def claim(self, step: int) -> bool:
        """Make sure that nobody changes a step from now on: take the lock of each directory that
        has it, where this rank leads, and let this job's saves and copies end. False where another
        job has a lock, or the directory may not be written."""
        self.wait_idle(None)
        try:
            for place in self._leading(step):
                place.prepare(self._token)
        except (RunBusyError, StorageError):
            return False
        return True

    def quarantine(self, step: int) -> str:
        """Set a step aside in every directory that this rank leads in, after claim(); where it is
        now at the first level that had it."""
        kept = [place.quarantine(step) for place in self._leading(step)]
        return kept[0] if kept else self.store.path(step)

    def _leading(self, step: int) -> list[DirectoryPlace]:
        return [place for place in self.near if place.leads and step in place.store.steps()]

    def rewind(self, step: int) -> list[int]:
        """Give up what is newer than `step` at every level, where this rank leads."""
        first = self.near[0]
        first.prepare(self._token)
        given_up = set(first.rewind(step)) if first.leads else set()
        return sorted(given_up | self.promotions.rewind(step))

    def forget(self, steps: Collection[int]) -> None:
        """These are at no level any more. All ranks, with nothing under way."""
        for place in self.near:
            place.forget(steps)
            place.store.look_again()
        self.promotions.forget(steps)

    @property
    def has_copies(self) -> bool:
        """Whether steps go on from the first level."""
        return bool(self.promotions.status())

    def wait_idle(self, timeout_s: float | None) -> None:
        """Return once no save and no copy is under way. Raises WaitTimeout."""
        left = Countdown(timeout_s)
        self.pipeline.drain(left())
        self.promotions.wait(left())

    def flush(self, timeout_s: float | None, meet_s: float | None = None) -> None:
        """Bring the newest step to all levels. All ranks together."""
        self._flushes += 1
        look = self._look
        flush(self.peers, self.wait_idle, look, self.promotions, self._flushes, timeout_s, meet_s)

    def _look(self, meeting: Meeting) -> None:
        """See what is there, before it is decided what is copied."""
        self.hosts.census(meeting)
        self.promotions.look()

    def stop_copies(self) -> None:
        """Let copies to other levels end unfinished. Returns at once."""
        self.promotions.stop()

    def part(self, number: int, error: BaseException) -> None:
        """This rank ends because of `error`, and takes no part in the save `number`, should others
        come to that: they need not wait for it."""
        if self.peers is not None and self.peers.token is not None:
            self.pipeline.give_up(number, error)

    def _watch_of(self, level: Level) -> LevelWatch:
        is_far = isinstance(level, ObjectStore)
        return self.watch.level(level.name, moving="upload" if is_far else "write")

    def _give_way(self) -> None:
        self.pipeline.wait_staged()

    def close(self, *, flush: bool, alike: bool = True) -> None:
        """alike: all ranks come to this; else those that do not are not waited for long."""
        # Several ranks do alike, also where one of them could not prepare to save.
        has_saved = self._is_prepared if self.peers is None else self._has_saved
        try:
            if flush and has_saved and self.has_copies:
                with _logged("could not bring the newest step to all levels"):
                    self.flush(None, None if alike else STRAGGLERS_S)
        finally:  # whatever fails on the way
            self._owned.close()

    def _take_over(self) -> None:
        """An agent could not end its work: go on with it. On several ranks nobody else knows, and
        the next step makes up for it."""
        if self.peers is None:
            self.pipeline.ahead(self.promotions.catch_up)
        else:
            self.promotions.hurry()

    def _say_goodbye(self) -> None:
        """The agent is needed no more, unless a level lacks the newest step."""
        if self._agent is None:
            return
        newest: int | None = None
        with contextlib.suppress(StorageError):
            newest = self.store.newest()
        if newest is None or self.promotions.have(newest):
            self._agent.goodbye()
        else:
            self._agent.leave()


def _opened_fs(options: Options, owned: contextlib.ExitStack) -> Fs:
    fs = _core.open_fs(options.backend_choice, options.depth)
    owned.callback(fs.close)
    if options.backend_choice != "threads":  # else it was asked for
        say_once(fs.note and f"saving with threads instead of io_uring: {fs.note}")
    return fs


def _close_place(place: Place) -> None:
    with _logged("could not remove a retired step"):
        place.close()


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """At the end there is nobody left to raise to."""
    try:
        yield
    except StateholdError as error:
        logger.warning("%s\n%s", what, error)
