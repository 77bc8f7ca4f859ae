"""Which save of a step each level has, by the sha256 of the manifest.

A writer may save a step again, or retire it, while it is read. A level may still have an earlier
save of it.
Owns: the manifests that were read, and from which level; the comparison with the present ones.
Invariants: a level that no longer has the opened save is not damaged, nor is a level that has
another save. One object for one restore; not thread-safe.
Not here: which file is read from where (nearest), the next action of a restore (restoring).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Protocol

from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    StateholdError,
    StepNotFoundError,
    StorageError,
)
from statehold.format.entries import DOCUMENT_BYTES_MAX, sha256
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME

_FAILURES = (StorageError, CorruptionError, StepNotFoundError)
_UNREADABLE = ""
_UNKNOWN = "unknown"  # the storage failed, which says nothing about the step
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def is_of_storage(error: Exception) -> bool:
    """Whether the storage failed. False if a file is gone, because a writer may have removed it."""
    return isinstance(error, StorageError) and error.errno not in _GONE


class LevelReader(Protocol):
    """The interface of a level."""

    @property
    def name(self) -> str: ...
    def steps(self) -> list[int]: ...
    def holds(self, step: int, name: str) -> bool: ...
    def read(self, step: int, name: str, max_bytes: int) -> bytes: ...


class Saves:
    """The saves that one restore has met."""

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

    def open(self, step: int, level: LevelReader, manifest: bytes) -> bool:
        """The manifest of a step at a level was read: that save is open now, unless it was given
        up."""
        save = self._at[step, level.name] = sha256(manifest)
        if (step, save) in self._given_up:
            return False
        self._opened[step] = save
        return True

    def unread(self, step: int, level: LevelReader, error: StateholdError) -> None:
        """The manifest of a step at a level could not be read."""
        self._at[step, level.name] = _UNKNOWN if is_of_storage(error) else _UNREADABLE

    def is_another(self, step: int, level: LevelReader) -> bool:
        """Whether a level has another save of the step than the one that is open."""
        save = self._save_at(step, level)
        return save not in (_UNREADABLE, self._opened.get(step, save))

    def give_up(self, step: int) -> None:
        """The open save is damaged at every level: it is not opened again."""
        self._given_up.add((step, self.opened(step)))

    def has_given_up(self, step: int) -> bool:
        """Whether a save of this step was given up."""
        return any(each == step for each, _ in self._given_up)

    def has_another(self, step: int, levels: Iterable[LevelReader]) -> bool:
        """Whether a level has a save of the step that is neither open nor given up."""
        saves = {self._save_at(step, level) for level in levels}
        return any(
            save not in (_UNREADABLE, self.opened(step)) and (step, save) not in self._given_up
            for save in saves
        )

    def has_changed(self, step: int, level: LevelReader) -> bool:
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

    def _save_at(self, step: int, level: LevelReader) -> str:
        """The save that a level has, by a valid manifest; otherwise _UNREADABLE."""
        key = step, level.name
        if key not in self._intact:
            try:
                raw = level.read(step, MANIFEST_NAME, DOCUMENT_BYTES_MAX)
                self._at.setdefault(key, sha256(raw))
                Manifest.decode(raw, MANIFEST_NAME)
                self._intact[key] = sha256(raw)
            except (*_FAILURES, FormatVersionError):
                self._intact[key] = _UNREADABLE
        return self._intact[key]


def _read(step: int, level: LevelReader) -> str:
    try:
        return sha256(level.read(step, MANIFEST_NAME, DOCUMENT_BYTES_MAX))
    except _FAILURES:
        return _UNREADABLE
