"""The leftovers of dead jobs: memory, fetched files, half copies.

Invariants: reads, and changes nothing. Ignores files of other users, and follows no link. Says what
a live job uses, as far as the kernel knows.
Not here: removing them (the next save, prune, a person).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.agent.looking import LOG_NAME
from statehold.checkpoint.levels.near_files import PREFIX
from statehold.checkpoint.levels.remembered import FILE_NAME
from statehold.checkpoint.store.lock import is_saved_into
from statehold.cli.output import counted
from statehold.cli.places import bytes_of, leftovers_of
from statehold.process.host_memory import SHARED_MEMORY, home_path
from statehold.reading.sizes import sizes
from statehold.units import format_bytes

if TYPE_CHECKING:
    from statehold._core import Fs

_LINE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Leftover:
    """A leftover. is_waste: nobody needs it, as far as one can see."""

    name: str
    value: str
    means: str
    is_waste: bool = False


def left_behind(fs: Fs, path: str, shared: str = SHARED_MEMORY) -> Iterator[Leftover]:
    """The leftovers in the run `path`, if it is one, and in the memory of this host."""
    yield from _memory(home_path(shared))
    for folder in dict.fromkeys((shared, path)):
        yield from _near(folder)
    yield from _in_run(fs, path)


def _memory(home: str) -> Iterator[Leftover]:
    runs = [os.path.join(home, name) for name in _own_directories(home)]
    if not runs:
        return
    used = sum(is_saved_into(run) for run in runs)
    size = format_bytes(sizes(runs).bytes)
    yield Leftover(
        "memory of runs",
        f"{counted(len(runs), 'run')}, {used} in use, {size}",
        f"steps that stay until the host restarts, in {home}; statehold free RUN frees those of a "
        f"run",
    )


def _near(folder: str) -> Iterator[Leftover]:
    found = [name for name in _own_directories(folder) if name.startswith(PREFIX)]
    if found:
        size = format_bytes(sizes(os.path.join(folder, name) for name in found).bytes)
        means = "files of a restore that is under way or was killed; remove them if it was killed"
        yield Leftover("brought near", f"{size} in {folder}/{PREFIX}*", means, is_waste=True)


def _in_run(fs: Fs, path: str) -> Iterator[Leftover]:
    left = leftovers_of(fs, path)
    is_used = is_saved_into(path)
    halves = [each for each in left if each["kind"] == "partial"]
    if halves:
        ended = "from a save or copy that did not end; the next one removes it or continues it"
        means = "a job is at work" if is_used else ended
        yield Leftover("half steps", _sized(path, halves), means, is_waste=not is_used)
    names = [each for each in left if each["kind"] == "shared"]
    if names:
        ended = (
            "names of files of steps that a job kept for its next save; the next job clears them"
        )
        means = "a job is at work" if is_used else ended
        yield Leftover("shared files", _sized(path, names), means, is_waste=not is_used)
    aside = [each for each in left if each["kind"] == "corrupt"]
    if aside:
        yield Leftover(
            "set aside", _sized(path, aside), "damaged and set aside, for a person to inspect", True
        )
    if os.path.lexists(os.path.join(path, FILE_NAME)):
        means = "to list their steps: statehold ls RUN --levels"
        yield Leftover("levels", "noted in " + FILE_NAME, means)
    line = _last_line(os.path.join(path, LOG_NAME))
    if line:
        yield Leftover(
            "agent's log", line[:120], f"its last report after the death of a trainer: {LOG_NAME}"
        )


def _sized(run: str, found: list[dict[str, Any]]) -> str:
    return f"{len(found)}, {format_bytes(bytes_of(run, found))}"


def _own_directories(folder: str) -> list[str]:
    """The names of directories of this user; none if the parent cannot be read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                is_own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
                if is_own and entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
    return sorted(found)


def _last_line(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return ""
        raw = os.pread(fd, _LINE_BYTES_MAX, max(0, found.st_size - _LINE_BYTES_MAX))
    finally:
        os.close(fd)
    lines = raw.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
