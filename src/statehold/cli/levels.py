"""All levels of a run, for commands: where the steps are, and the state of each copy.

Owns: which levels are read. Directories and memory are always read. An object store is read only
with `--levels`, because the run directory may belong to somebody else, and reading costs network.
Invariants: a level that is unreachable or unreadable is reported, and hides no other. Nothing is
created or changed. Files that are fetched for verification are removed again. Of a level that
several hosts have, this host's part is shown, and next to it the files that it keeps for others
(`NAME.copies`). If a step is not complete there, it is "part", not damaged.
Not here: which levels a run has (levels/remembered), what is damage (checking), tables (ls, page).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from statehold._core import Fs
from statehold.checkpoint.levels.hosts.census import writer_of
from statehold.checkpoint.levels.memory import COPIES_SUFFIX
from statehold.checkpoint.levels.remembered import Remembered, itself, recall
from statehold.cli.output import note
from statehold.cli.places import describe, unreadable
from statehold.cli.said import said
from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    StateholdError,
    StepNotFoundError,
    UsageError,
)
from statehold.format.entries import sha256
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.io.mounts import mount_of
from statehold.io.profile import rates_of
from statehold.steps.copying import CopyPart, part_of
from statehold.steps.objects import ObjectSteps
from statehold.steps.owners import other_owner
from statehold.steps.publish import directory_id, is_directory, look_beside_a_writer
from statehold.steps.shelf import DirectoryShelf

FETCH_BYTES = 64 << 20

Document = dict[str, Any]


@dataclass
class FoundLevel:
    """A level as it was found. state: "there", "not there", "not asked" or "unreadable". held: the
    steps there."""

    entry: Remembered
    state: str = "there"
    error: str = ""
    place: InDirectory | InObjects | None = None
    held: dict[int, Document] = field(default_factory=dict)

    @property
    def readable(self) -> list[int]:
        """The steps that are neither damaged nor of a newer format."""
        return [n for n, copy in self.held.items() if copy["state"] in ("committed", "part")]

    def document(self) -> Document:
        """The level in the output of --json."""
        entry = self.entry
        about: Document = {"file_system": None, "free_bytes": None, "limit_bytes_per_s": None,
                           "read_limit_bytes_per_s": None}  # fmt: skip
        if self.place is not None:
            about |= self.place.about()
        in_memory = entry.kind == "directory" and about["file_system"] in ("tmpfs", "ramfs")
        return {
            "name": entry.name,
            "kind": "memory" if in_memory else entry.kind,
            "path": entry.where,
            "host": entry.host or None,
            "per_host": entry.per_host,
            "state": self.state,
            "error": self.error or None,
            "steps": sorted(self.held),
            "bytes": sum(each["bytes"] for each in self.held.values()),
            **about,
        }


def levels_of(fs: Fs, run: str, *, far: bool, options: Mapping[str, Any] = {}) -> list[FoundLevel]:
    """The levels of a run, the nearest first, and their steps. far: also read object stores, with
    `options`."""
    try:
        remembered = recall(run)
    except CorruptionError as error:
        note("cannot look at the other levels: ", error)
        remembered = (itself(run),)
    found = list[FoundLevel]()
    for entry in remembered:
        owner = other_owner(entry.where, run) if entry.kind != "objects" else None
        if owner is None:
            found += _all_of(fs, entry, far, options)
        else:
            found.append(FoundLevel(entry, "not there", f"its steps belong to the run {owner}"))
    return found


def _all_of(fs: Fs, entry: Remembered, far: bool, options: Mapping[str, Any]) -> list[FoundLevel]:
    """A level; if several hosts have it, also the files that this host keeps for the others."""
    own = _looked_at(fs, entry, far, options)
    beside = os.path.realpath(entry.where) + COPIES_SUFFIX
    if not entry.per_host:
        return [own]
    found = [own]
    if os.path.isdir(beside):
        kept = replace(entry, name=f"{entry.name}.copies", where=beside)
        found.append(_looked_at(fs, kept, far, options))
    for step in steps_of(found):
        _count_ranks([copy for _, copy in copies_of(found, step)])
    return found


def _count_ranks(here: Sequence[Document]) -> None:
    """The number of ranks whose files of a step this host has: its own and copies of one save."""
    sound = [copy for copy in here if copy["state"] == "committed"]
    for save in {(copy["created"], copy["world_size"]) for copy in sound}:
        same = [copy for copy in sound if (copy["created"], copy["world_size"]) == save]
        names = [name for copy in same for name in _names(copy["path"])]
        ranks = {writer[0] for writer in map(writer_of, names) if writer}
        for copy in same:
            copy["ranks_here"] = len(ranks)
            copy["state"] = "part" if len(ranks) < save[1] else "committed"


def _names(directory: str) -> list[str]:
    """The contents of the directory of a step; nothing if the step was retired meanwhile."""
    is_there = partial(directory_id, directory)
    return look_beside_a_writer(partial(os.listdir, directory), is_there, directory) or []


def _looked_at(fs: Fs, entry: Remembered, far: bool, options: Mapping[str, Any]) -> FoundLevel:
    level = FoundLevel(entry)
    try:
        if entry.kind == "objects" and not far:
            level.state = "not asked"
        elif not _is_there(entry):
            level.state = "not there"
            if entry.host not in ("", socket.gethostname()):
                level.error = f"memory of host {entry.host}"
        else:
            place = _held(fs, entry, options)
            found = {step: place.describe(step) for step in place.steps()}
            level.held = {step: copy for step, copy in found.items() if copy is not None}
            level.place = place
    except (StateholdError, OSError) as error:
        level.state, level.error = "unreadable", str(error)
    return level


def _held(fs: Fs, entry: Remembered, options: Mapping[str, Any]) -> InDirectory | InObjects:
    is_far = entry.kind == "objects"
    return InObjects(entry.where, options=options) if is_far else InDirectory(fs, entry)


def _is_there(entry: Remembered) -> bool:
    """Only an existing directory is a store, because opening would create it."""
    parts = urlsplit(entry.where) if entry.kind == "objects" else None
    if parts is None or parts.scheme == "file":
        return is_directory(unquote(parts.path) if parts else entry.where)
    return True


def far_options(words: Sequence[str]) -> dict[str, str]:
    """--option KEY=VALUE, as options of an object store. Raises UsageError."""
    pairs = [word.partition("=") for word in words]
    for key, separator, _ in pairs:
        if not (key and separator):
            raise UsageError("an option is KEY=VALUE", facts={"got": key[:80]})
    return {key: value for key, _, value in pairs}


def steps_of(levels: Sequence[FoundLevel]) -> list[int]:
    """The steps that any of the levels has, oldest first."""
    return sorted({step for level in levels for step in level.held})


def copies_of(levels: Sequence[FoundLevel], step: int) -> list[tuple[FoundLevel, Document]]:
    """The copies of a step, the nearest first."""
    return [(level, level.held[step]) for level in levels if step in level.held]


class InDirectory(DirectoryShelf):
    """The steps of a level that is a directory."""

    def __init__(self, fs: Fs, entry: Remembered) -> None:
        super().__init__(fs, os.path.realpath(entry.where), entry.name)
        self._path = entry.where
        self._is_part = entry.per_host

    def describe(self, step: int) -> Document | None:
        return describe(self, step, is_part=self._is_part)

    @contextlib.contextmanager
    def near(self, step: int) -> Iterator[str]:
        yield self.where(step)

    def about(self) -> Document:
        space, rates = os.statvfs(self._path), rates_of(self._path)
        return {
            "file_system": mount_of(self._path).kind,
            "free_bytes": space.f_bavail * space.f_frsize,
            "limit_bytes_per_s": rates.write_bytes_per_s if rates else None,
            "read_limit_bytes_per_s": rates.read_bytes_per_s if rates else None,
        }


class InObjects(ObjectSteps):
    """For an object store, compare sizes with those in the step, which costs no data."""

    def describe(self, step: int) -> Document | None:
        found: Document = {"step": step, "path": self.path(step), "state": "committed",
                           "bytes": 0, "files": 0}  # fmt: skip
        try:
            whole = look_beside_a_writer(
                lambda: self._whole(step), lambda: self._save_of(step), found["path"]
            )
            if whole is None:
                return None
            part, manifest = whole, Manifest.decode(whole.manifest, found["path"])
        except (CorruptionError, FormatVersionError) as error:
            return {**found, **unreadable(error)}
        documents = len(part.manifest) + sum(len(raw) for _, raw in part.records)
        return {
            **found,
            "bytes": part.nbytes + documents,
            "files": len(part.files) + len(part.records) + 1,
            **said(manifest),
        }

    @contextlib.contextmanager
    def near(self, step: int) -> Iterator[str]:
        """Download the whole step into a temporary directory, and verify it like all others."""
        folder = tempfile.mkdtemp(prefix=".statehold-verify-")
        try:
            part = self._part(step)
            for name, raw in (*part.records, (MANIFEST_NAME, part.manifest)):
                with open(os.path.join(folder, name), "wb") as out:
                    out.write(raw)
            for file in part.files:
                self._fetch(step, file.name, file.bytes, os.path.join(folder, file.name))
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def about(self) -> Document:
        return {}

    def _whole(self, step: int) -> CopyPart:
        """The files of a step, once they have the right sizes."""
        part = self._part(step)
        for file in part.files:
            size = self.size(step, file.name)
            if size != file.bytes:
                facts = {"file": file.name, "expected": file.bytes, "got": size}
                raise CorruptionError("a file differs from what was committed", facts=facts)
        return part

    def _save_of(self, step: int) -> str | None:
        """The save of a step; None if it was retired, "" if that cannot be read."""
        try:
            return sha256(self.manifest(step))
        except StepNotFoundError:
            return None
        except CorruptionError:
            return ""

    def _part(self, step: int) -> CopyPart:
        return part_of(self, step, lambda saved, _: range(saved))

    def _fetch(self, step: int, name: str, nbytes: int, path: str) -> None:
        memory = memoryview(bytearray(min(FETCH_BYTES, nbytes)))
        file = self.open_file(step, name)
        with open(path, "wb") as out:
            for begin in range(0, nbytes, FETCH_BYTES):
                piece = memory[: min(FETCH_BYTES, nbytes - begin)]
                file.read_into(piece, begin)
                out.write(piece)
