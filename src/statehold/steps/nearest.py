"""The steps of a run over all its levels: each file is read from the nearest place that has it.

Owns: which place serves which file of a step, and the reaction to a bad copy: it is not used again,
and the next place is asked.
Invariants: nothing is trusted because of its place. Documents are sealed and files have checksums,
so files of one step may come from different places. A step is damaged if no place has an intact
copy of one of its files. If a place cannot be read, that is unknown, and its error is raised: a
failing disk is no reason to set a step aside. All files of a restore belong to one save of the
step. A writer may save the step again, or retire it, meanwhile. A place that has changed since it
was read is skipped, and does not count as damage.
One loop begins again without a bad copy, for restores and subscribers.
Not here: which parts of a step are read (read_plan), what the ranks agree on (restore/call).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TypeVar

from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    MissingFileError,
    PeerLostError,
    StateholdError,
    StepNotFoundError,
    StorageError,
    no_such_step,
)
from statehold.format.entries import About, sha256
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME, SavedStep
from statehold.process.warn import logger
from statehold.steps.publish import GONE, missing_path
from statehold.steps.shelf import Ranges, Shelf, ShelfFile

T = TypeVar("T")

# A writer that cannot exchange names removes a step's name for a moment at each new save of it.
ELSEWHERE_MAX = 10


# What may be wrong with one copy, and not with another.
_OF_ONE_COPY = (StorageError, CorruptionError, StepNotFoundError)

_UNREADABLE = ""
_UNKNOWN = "unknown"  # the storage failed, which says nothing about the step


def is_of_storage(error: Exception) -> bool:
    """Whether the storage failed. False if a file is gone, because a writer may have removed it."""
    return isinstance(error, StorageError) and error.errno not in GONE


class Saves:
    """The saves that one restore has met, by the sha256 of their manifests. Not thread-safe.

    A writer may save a step again, or retire it, while it is read. A level that no longer has the
    opened save is not damaged, nor is a level that has another save.
    """

    def __init__(self) -> None:
        self._opened: dict[int, str] = {}
        # step, level -> the sum of the manifest there, or _UNREADABLE, or _UNKNOWN; a damaged one
        # has a sum, too.
        self._at: dict[tuple[int, str], str] = {}
        self._intact: dict[tuple[int, str], str] = {}  # the same, for valid manifests
        self._given_up: set[tuple[int, str]] = set()

    def opened(self, step: int) -> str:
        """The save that is open; "" if there is none."""
        return self._opened.get(step, "")

    def open(self, step: int, level: Shelf, manifest: bytes) -> bool:
        """The manifest of a step at a level was read: that save is open now, unless it was given
        up."""
        save = self._at[step, level.name] = sha256(manifest)
        if (step, save) in self._given_up:
            return False
        self._opened[step] = save
        return True

    def unread(self, step: int, level: Shelf, error: StateholdError) -> None:
        """The manifest of a step at a level could not be read."""
        self._at[step, level.name] = _UNKNOWN if is_of_storage(error) else _UNREADABLE

    def is_another(self, step: int, level: Shelf) -> bool:
        """Whether a level has another save of the step than the one that is open."""
        save = self._save_at(step, level)
        return save not in (_UNREADABLE, self._opened.get(step, save))

    def give_up(self, step: int) -> None:
        """The open save is damaged at every level: it is not opened again."""
        self._given_up.add((step, self.opened(step)))

    def has_given_up(self, step: int) -> bool:
        """Whether a save of this step was given up."""
        return any(each == step for each, _ in self._given_up)

    def has_another(self, step: int, levels: Iterable[Shelf]) -> bool:
        """Whether a level has a save of the step that is neither open nor given up."""
        saves = {self._save_at(step, level) for level in levels}
        return any(
            save not in (_UNREADABLE, self.opened(step)) and (step, save) not in self._given_up
            for save in saves
        )

    def has_changed(self, step: int, level: Shelf) -> bool:
        """Whether a level has lost the step since it was read, or has another save of it.

        If the storage failed, only a loss can be seen.
        """
        if not level.holds(step, MANIFEST_NAME):
            return False
        before = self._at.get((step, level.name), self.opened(step))
        try:
            is_there = step in level.steps()
            now = _read(step, level) if is_there else _UNREADABLE
            is_there = is_there and (now != _UNREADABLE or step in level.steps())
        except StorageError:
            return False  # unknown
        return not is_there or (before != _UNKNOWN and now not in (_UNREADABLE, before))

    def forget(self, step: int) -> None:
        """Nothing was read of a step; saves that were given up stay so."""
        self._opened.pop(step, None)
        self._at = {at: save for at, save in self._at.items() if at[0] != step}
        self._intact = {at: save for at, save in self._intact.items() if at[0] != step}

    def _save_at(self, step: int, level: Shelf) -> str:
        """The save that a level has, by a valid manifest; otherwise _UNREADABLE."""
        key = step, level.name
        if key not in self._intact:
            try:
                raw = level.manifest(step)
                self._at.setdefault(key, sha256(raw))
                Manifest.decode(raw, MANIFEST_NAME)
                self._intact[key] = sha256(raw)
            except (*_OF_ONE_COPY, FormatVersionError):
                self._intact[key] = _UNREADABLE
        return self._intact[key]


def _read(step: int, level: Shelf) -> str:
    try:
        return sha256(level.manifest(step))
    except _OF_ONE_COPY:
        return _UNREADABLE


class Next(IntEnum):
    """The next action of a restore after a failed read. Of several ranks' answers the highest
    counts."""

    GIVE_UP = 0
    OTHER_COPY = 1  # read the step again, without the bad copy
    OTHER_SAVE = 2  # read another save of the step from another level
    AGAIN = 3  # the step was saved again, or retired: list the steps again


class StepChanged(Exception):
    """The step is another save by now, or gone."""


class Nearest(Shelf):
    """All steps of the run directory `run`, for one restore; `places` with the nearest first. Not
    thread-safe."""

    def __init__(self, places: Sequence[Shelf], run: str) -> None:
        self._places = list(places)
        self.name = self.run = run
        self._bad: set[tuple[int, str, str]] = set()  # step, file, level
        self._unreadable: dict[tuple[int, str], StorageError] = {}
        self._served: dict[tuple[int, str], Shelf] = {}
        self._found: dict[str, set[int]] | None = None
        self._unread: StorageError | None = None
        self._unread_at = ""
        self._logged: set[str] = set()  # levels whose read errors were logged
        self._reported: set[tuple[int, str, str]] = set()  # bad copies that were logged
        self._elsewhere: Counter[tuple[int, str]] = Counter()  # how often a file was missing
        self.saves = Saves()

    def steps(self) -> list[int]:
        """The steps that are committed anywhere, oldest first.

        A level that cannot be read is skipped, unless all others are empty: that would be no steps
        at all.
        """
        self._found = None
        found = sorted(set().union(*self._steps_by_place().values()))
        if self._unread is not None and not found:
            if self.has_copies:
                hint = (
                    f"steps may be at level {self._unread_at}: try again when it can be read. To "
                    f"train from the start again, give level {self._unread_at} another place"
                )
                self._unread.hint = f"{self._unread.hint}; {hint}" if self._unread.hint else hint
            raise self._unread
        return found

    def path(self, step: int) -> str:
        """The name of a step's place, for messages and errors: at the nearest place."""
        return f"{self.run}/step-{step:012d}"

    def open(self, step: int, rank: int | None = None, world_size: int = 1) -> SavedStep:
        if step not in self.steps():
            raise no_such_step(step, self.run, self.steps())
        return super().open(step, rank, world_size)

    def said(self, step: int) -> About | None:
        """What a step says of itself; None if no place has a manifest that can be read."""
        found = self._steps_by_place()
        for place in self._places:
            if step in found[place.name] and place.holds(step, MANIFEST_NAME):
                with contextlib.suppress(*_OF_ONE_COPY, FormatVersionError):
                    raw = place.manifest(step)
                    return Manifest.said(raw, f"{place.path(step)}/{MANIFEST_NAME}")
        return None

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        """As of any shelf. Several threads may find files of an open step."""
        for place in self._having(step, name):
            try:
                path = place.find(step, name, nbytes, ranges)
            except (StorageError, CorruptionError, StepNotFoundError) as error:
                self._passed_over(step, name, place, error)
                continue
            self._served[step, name] = place
            return path
        raise self._missing(step, name)

    def open_file(self, step: int, name: str) -> ShelfFile:
        for place in self._having(step, name):
            self._served[step, name] = place
            return place.open_file(step, name)
        raise self._missing(step, name)

    def served(self, step: int) -> set[str]:
        """The names of the places from which files of a step were read."""
        return {place.name for (of, _), place in self._served.items() if of == step}

    @contextlib.contextmanager
    def protect(self, step: int) -> Iterator[None]:
        """Keep a step, at every place, while it is read."""
        with contextlib.ExitStack() as kept:
            for place in self._places:
                kept.enter_context(place.protect(step))
            yield

    @property
    def has_copies(self) -> bool:
        """Whether a step may be at several places."""
        return len(self._places) > 1

    def after(self, step: int, error: Exception) -> Next:
        """The action after `error` in reading a step here.

        Uses the error's fact "file", or its path. An error without a file that was read from here
        is not about a copy. OTHER_COPY also if the last copy is damaged and an earlier one could
        not be read; the next try then raises that error.
        """
        self._found = None
        if isinstance(error, StepNotFoundError) or self._has_changed(step, error):
            return Next.AGAIN
        if self._was_elsewhere(step, error):
            return Next.AGAIN
        if not self.has_copies or not isinstance(error, CorruptionError | StorageError):
            return Next.GIVE_UP
        return self._other(step, error)

    def from_any_copy(
        self,
        step: int,
        read: Callable[[], T],
        after: Callable[[int, Exception], Next] | None = None,
    ) -> T:
        """The result of `read`, which reads a step here, again without each copy that was bad.

        after: instead of after(), if other ranks have a say. Raises StepChanged, or as `read` does.
        """
        while True:
            try:
                return read()
            except PeerLostError:
                raise
            except Exception as error:
                self._name_copy(step, error)
                following = (after or self.after)(step, error)
                if following is Next.AGAIN:
                    raise StepChanged from error
                if following is Next.GIVE_UP:
                    raise
                if following is Next.OTHER_SAVE:  # it is damaged at every level
                    self.saves.give_up(step)
                    self._found = None

    def forget(self, step: int) -> None:
        """Begin a step again: nothing is known of its copies."""
        self._found = None
        self._bad = {at for at in self._bad if at[0] != step}
        self._unreadable = {at: why for at, why in self._unreadable.items() if at[0] != step}
        self._served = {at: place for at, place in self._served.items() if at[0] != step}
        self.saves.forget(step)

    def _name_copy(self, step: int, error: Exception) -> None:
        """A document is named before it is known which place serves it."""
        directory, name = os.path.split(str(getattr(error, "facts", {}).get("file", "")))
        place = self._served.get((step, name))
        if isinstance(error, StateholdError) and place and directory == self.path(step):
            error.with_fact("file", f"{place.path(step)}/{name}")

    def _has_changed(self, step: int, error: Exception) -> bool:
        """Whether a place that was asked for a step has another save of it now, or none."""
        asked = {place.name for (of, _), place in self._served.items() if of == step}
        asked |= {name for of, _, name in self._bad if of == step}
        if not asked:  # the first document was not read
            if is_of_storage(error):
                return False
            asked = {name for name, found in self._steps_by_place().items() if step in found}
            if not asked:
                return True
        return any(
            self.saves.has_changed(step, place) for place in self._places if place.name in asked
        )

    def _was_elsewhere(self, step: int, error: Exception) -> bool:
        """Whether a missing file exists: its step had another name for a moment.

        A file that is missing again and again is a bad copy.
        """
        name = os.path.basename(missing_path(error) or "")
        place = self._served.get((step, name))
        if place is None or self._elsewhere[step, name] >= ELSEWHERE_MAX:
            return False
        self._elsewhere[step, name] += 1
        return place.has_file(step, name)

    def _other(self, step: int, error: CorruptionError | StorageError) -> Next:
        """Whether another copy of the bad file, or another save, is left to try."""
        path = getattr(error, "path", "") or error.facts.get("file", "")
        name = os.path.basename(str(path))
        place = self._served.get((step, name))
        is_damaged = isinstance(error, CorruptionError)
        if place is not None:
            self._passed_over(step, name, place, error)
            if any(self._having(step, name)) or (is_damaged and (step, name) in self._unreadable):
                return Next.OTHER_COPY
        elif all(at[:2] != (step, name) for at in self._bad):
            return Next.GIVE_UP  # this rank asked for no copy of it
        if is_damaged and self.saves.has_another(step, self._having(step, MANIFEST_NAME)):
            return Next.OTHER_SAVE
        return Next.GIVE_UP

    # -- places ----------------------------------------------------------------------------

    def _steps_by_place(self) -> dict[str, set[int]]:
        if self._found is None:
            self._unread = None
            self._found = {place.name: self._listed(place) for place in self._places}
        return self._found

    def _listed(self, place: Shelf) -> set[int]:
        try:
            return set(place.steps())
        except StorageError as error:
            if place.name not in self._logged:
                logger.warning("cannot read level %s; continuing without it\n%s", place.name, error)
                self._logged.add(place.name)
            self._unread, self._unread_at = error, place.name
            return set()

    def _having(self, step: int, name: str) -> Iterator[Shelf]:
        """The places to ask for a file of a step, the nearest first.

        A place that replaces a bad copy must have the open save, also if that copy turned out to
        be bad just now.
        """
        found = self._steps_by_place()
        is_first = not self.saves.has_given_up(step)
        for place in self._places:
            if step not in found[place.name] or not place.holds(step, name):
                continue
            at = step, name, place.name
            may_serve = is_first or name == MANIFEST_NAME or not self.saves.is_another(step, place)
            if at not in self._bad and may_serve:
                yield place
            is_first = is_first and at not in self._bad

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        for place in self._having(step, name):
            try:
                raw = place.read(step, name, max_bytes)
            except StateholdError as error:
                if name == MANIFEST_NAME:
                    self.saves.unread(step, place, error)
                if not self.has_copies or not isinstance(error, _OF_ONE_COPY):
                    raise
                self._passed_over(step, name, place, error)
                continue
            if name == MANIFEST_NAME and not self.saves.open(step, place, raw):
                continue
            self._served[step, name] = place
            return raw
        raise self._missing(step, name)

    def _passed_over(self, step: int, name: str, place: Shelf, error: StateholdError) -> None:
        self._bad.add((step, name, place.name))
        self._served.pop((step, name), None)
        if self.saves.has_changed(step, place):
            logger.debug("step %d was saved again at level %s\n%s", step, place.name, error)
            return
        if isinstance(error, StorageError) and error.errno != errno.ENOENT:
            self._unreadable[step, name] = error
        if (step, name, place.name) not in self._reported:
            self._reported.add((step, name, place.name))
            logger.warning(
                "%s of step %d is not intact at level %s; trying other levels\n%s",
                name, step, place.name, error,
            )  # fmt: skip

    def _missing(self, step: int, name: str) -> StateholdError:
        if (step, name) in self._unreadable:
            return self._unreadable[step, name]
        asked = ", ".join(place.name for place in self._places[:8])
        facts = {"file": f"{self.path(step)}/{name}", "levels": asked}
        return MissingFileError("no level has an intact copy of a file of the step", facts=facts)
