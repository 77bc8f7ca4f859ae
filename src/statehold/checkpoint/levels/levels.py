"""The levels of an open run: where its steps are, and how they get from one level to the next.

    places       every level, from the nearest on; `near` are those that are directories
    hosts        who is on which host, where each host has a level for itself
    promotions   the copies from the first level to the others
    notes        what the run says of itself, for whoever looks at it later

Invariants: nothing on the storage is changed before prepare(), and only by one job.
Not here: how levels are opened (building), what a level is (places), what a copy is (promoting).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from statehold.checkpoint.levels.hosts.place import HostPlace
from statehold.checkpoint.levels.nearest import Nearest, ReadableLevel
from statehold.checkpoint.levels.places import DirectoryPlace
from statehold.checkpoint.levels.promoting import LevelStatus
from statehold.errors import RunBusyError, StorageError

if TYPE_CHECKING:
    from statehold.checkpoint.levels.hosts.meeting import Hosts
    from statehold.checkpoint.levels.places import Place
    from statehold.checkpoint.levels.promoting import Promotions
    from statehold.checkpoint.levels.run_notes import RunNotes
    from statehold.checkpoint.store.store import Store
    from statehold.ranks.agreeing import Meeting
    from statehold.ranks.peers import Peers

__all__ = ["Levels"]


@dataclass(eq=False)
class Levels:
    """The levels of the run directory `run`. peers: None for a process that is alone."""

    run: str
    places: Sequence[Place]
    near: Sequence[DirectoryPlace]
    hosts: Hosts
    promotions: Promotions
    notes: RunNotes
    peers: Peers | None

    @property
    def store(self) -> Store:
        """The steps of the first level."""
        return self.near[0].store

    # -- reading ---------------------------------------------------------------------------

    def nearest(self, drain: Callable[[], None]) -> Nearest:
        """The steps of all levels, for one look at them. All ranks together, where a level lies on
        several hosts. `drain` ends the saves under way."""
        self.hosts.meet()
        if self.hosts.are_apart:
            drain()  # what is published on some hosts, and not on others, is no step
        self.hosts.census()
        self.promotions.look()
        views: list[ReadableLevel] = [
            view
            for place in self.places
            for view in (place.views() if isinstance(place, HostPlace) else [place])
        ]
        return Nearest(views, os.path.realpath(self.run))

    def check_there(self) -> None:
        """Where no step was found: a directory that cannot be a run is an error. One level that
        could take saves is enough."""
        for place in reversed(self.near):
            try:
                place.store.check_there()
            except StorageError:
                if place is self.near[0]:
                    raise
            else:
                return

    def restored(self, step: int, served: Collection[str]) -> None:
        """`step` was restored from the levels named in `served`: see whose steps those are."""
        self.notes.restored(step, served, self.near)

    def status(self, first: LevelStatus) -> list[LevelStatus]:
        """How all levels stand; `first` is what is known of the first one but for its steps."""
        newest, error = None, first.error
        try:
            newest = max(self.near[0].steps(), default=None)
        except StorageError as unread:
            error = error or unread
        return [replace(first, newest=newest, error=error), *self.promotions.status()]

    def having(self, step: int, place: DirectoryPlace) -> str:
        """Which levels have a step that was saved at `place`, for the log; asks no storage."""
        others = [each.name for each in self.promotions.status() if each.newest == step]
        names = dict.fromkeys([place.name, *others])
        return f"step {step} is committed at level{'s' * (len(names) > 1)} {', '.join(names)}"

    # -- saving ----------------------------------------------------------------------------

    def prepare(self, make_way: Callable[[], bool]) -> None:
        """Create the run directory, lock it and clear what a crash left, where this rank leads.
        make_way: ends what else in this process has the run, if it can."""
        try:
            try:
                self.near[0].prepare(self._token)
            except RunBusyError:
                if not make_way():
                    raise
                self.near[0].prepare(self._token)
        except StorageError:
            if len(self.near) == 1:
                raise
            # Saves go to the next level, and say why.

    @property
    def was_taken_over(self) -> bool:
        """Whether an agent had the run, which could not end its work."""
        return self.near[0].was_taken_over

    @property
    def has_copies(self) -> bool:
        """Whether steps go on from the first level."""
        return bool(self.promotions.status())

    def check_order(self, step: int, under_way: int | None) -> None:
        """Refuse a save that would not become the newest step of all levels. under_way: the newest
        step among the saves that have not ended."""
        known = (under_way, self.promotions.newest())
        newest = max((each for each in known if each is not None), default=None)
        # Where the first level is away, saves go to the next one; it is asked when it is back.
        self.near[0].check_order(step, newest, may_be_away=len(self.near) > 1)

    def look(self, meeting: Meeting) -> None:
        """See what is there, before it is decided what is copied."""
        self.hosts.census(meeting)
        self.promotions.look()

    # -- steps that go ---------------------------------------------------------------------

    def claim(self, step: int) -> bool:
        """With nothing under way: take the lock of each directory that has `step`, where this rank
        leads. False where another job has a lock, or the directory may not be written."""
        try:
            for place in self._leading(step):
                place.prepare(self._token)
        except (RunBusyError, StorageError):
            return False
        return True

    def quarantine(self, step: int) -> str:
        """Set a damaged step aside in every directory that this rank leads in, after claim(); where
        it is now at the first level that had it."""
        kept = [place.quarantine(step) for place in self._leading(step)]
        return kept[0] if kept else self.store.path(step)

    def rewind(self, step: int) -> list[int]:
        """Discard what is newer than `step` at every level, where this rank leads."""
        first = self.near[0]
        first.prepare(self._token)
        discarded = set(first.rewind(step)) if first.leads else set()
        return sorted(discarded | self.promotions.rewind(step))

    def forget(self, steps: Collection[int]) -> None:
        """These are at no level any more. All ranks, with nothing under way."""
        for place in self.near:
            place.forget(steps)
            place.store.look_again()
        self.promotions.forget(steps)

    def lacks_newest(self) -> bool:
        """Whether a level lacks the newest step of the first one."""
        newest: int | None = None
        with contextlib.suppress(StorageError):
            newest = self.store.newest()
        return newest is not None and not self.promotions.have(newest)

    def _leading(self, step: int) -> list[DirectoryPlace]:
        return [place for place in self.near if place.leads and step in place.store.steps()]

    @property
    def _token(self) -> str | None:
        return self.peers.token if self.peers else None
