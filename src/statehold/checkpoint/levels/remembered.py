"""levels.json in the run directory: the levels of the run, for people and commands.

Owns: the file (strict JSON, versioned): for each level its kind, its name and its place. The
leading rank writes it when it begins to save, whole or not at all. A run whose only level is its
own directory has no such file.
Invariants: the file is only a note. No save or restore reads it, and none fails because of it. A
copy to an object store reads that of the run's parent, to look for files that the store can copy
itself (object_place). The file holds no options of an object store, which might be secret, and
readers take none. Otherwise an address in another user's directory could learn this user's
credentials. The file is regular, bounded, and checked. A path in it is looked at and never created.
Not here: the steps at a level (cli).
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from statehold.checkpoint.levels.memory import directory_of
from statehold.checkpoint.levels.specs import NAME, Directory, Level, Memory, ObjectStore
from statehold.encoding.strictjson import Checker
from statehold.errors import CorruptionError, UsageError, shown
from statehold.io.objects.client import check_url
from statehold.steps.owners import read_note, write_note

FILE_NAME = "levels.json"
FORMAT = "statehold-levels"
VERSION = 1
LEVELS_MAX = 64
_DEPTH_MAX = 4
_HERE = "."
_WHERE = re.compile(r"[^\x00-\x1f\x7f]{1,4096}")
_HOST = re.compile(r"[^\x00-\x1f\x7f]{0,255}")
_KIND = re.compile(r"memory|directory|objects")
_SUMMARY = "the list of levels is not valid"
_HINT = "delete it; the next save writes a new one"


@dataclass(frozen=True, slots=True)
class Remembered:
    """A level.

    where: an absolute path, or a URL. host: that of memory, or of a disk that others do not see.
    per_host: several hosts have the level, and each of them a part of its steps.
    """

    kind: str
    name: str
    where: str
    host: str = ""
    per_host: bool = False


def remember(levels: Sequence[Level], run: str, apart: Collection[str] = ()) -> None:
    """Write the levels of a run, if it has more than the run directory.

    apart: the names of levels on several hosts. Raises OSError, and StorageError if there is no
        memory to name.
    """
    run = os.path.abspath(run)
    noted = [_noted(level, run, level.name in apart) for level in levels]
    path = os.path.join(run, FILE_NAME)
    if noted == [Remembered("directory", noted[0].name, _HERE)] and not os.path.lexists(path):
        return
    document = {"format": FORMAT, "version": VERSION, "levels": [asdict(each) for each in noted]}
    text = json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    write_note(run, FILE_NAME, text)


def _noted(level: Level, run: str, is_apart: bool) -> Remembered:
    if isinstance(level, ObjectStore):
        return Remembered("objects", level.name, level.url)
    path = directory_of(level, run)
    if isinstance(level, Memory):
        return Remembered("memory", level.name, path, socket.gethostname(), is_apart)
    if isinstance(level, Directory) and level.per_host:
        return Remembered("directory", level.name, path, socket.gethostname(), is_apart)
    # The run directory may be moved as a whole.
    return Remembered("directory", level.name, _HERE if path == run else path)


def recall(run: str) -> tuple[Remembered, ...]:
    """The levels of the run directory `run`, the nearest first; without a file, only itself.

    Raises CorruptionError for a file that cannot be used.
    """
    path = os.path.join(run, FILE_NAME)
    text = read_note(path, _SUMMARY, _HINT)
    if text is None:
        return (itself(run),)
    check = Checker(CorruptionError, _SUMMARY, path, _HINT)
    headed = check.headed(text, _DEPTH_MAX, FORMAT, (VERSION,))
    document = check.members(headed, "the file", ("format", "version", "levels"))
    found = check.array(document["levels"], "levels")
    if not 1 <= len(found) <= LEVELS_MAX:
        check.fail("levels", f"1 to {LEVELS_MAX}", str(len(found)))
    levels = tuple(_level(check, each, f"levels[{i}]", run) for i, each in enumerate(found))
    if len({level.name for level in levels}) < len(levels):
        check.fail("levels", "a name for each", "the same name twice")
    return levels


def itself(run: str) -> Remembered:
    """The run directory, as the only level."""
    return Remembered("directory", "directory", os.path.abspath(run))


def _level(check: Checker, value: Any, where: str, run: str) -> Remembered:
    found = check.members(value, where, ("kind", "name", "where", "host", "per_host"))
    kind = check.text(found["kind"], f"{where}.kind", _KIND, "memory, directory or objects")
    name = check.text(found["name"], f"{where}.name", NAME, "the name of a level")
    place = check.text(found["where"], f"{where}.where", _WHERE, "a path or a URL")
    host = check.text(found["host"], f"{where}.host", _HOST, "the name of a host")
    per_host = found["per_host"]
    if type(per_host) is not bool:
        check.fail(f"{where}.per_host", "true or false", shown(per_host))
    if kind == "objects":
        try:
            check_url(place)
        except UsageError:
            check.fail(f"{where}.where", "the URL of an object store", "something else")
    elif place == _HERE:
        place = os.path.abspath(run)
    elif not os.path.isabs(place):
        check.fail(f"{where}.where", "an absolute path", place[:80])
    return Remembered(kind, name, place, host, per_host)
