"""The profile of a storage: the fastest settings that `statehold bench io` has measured on it.

Owns: the file (strict JSON, versioned), its place, and whether a Checkpointer uses it.
Invariants: a profile is advice. A profile that is broken, of another version, or of another storage
is ignored with a note. It never makes anything fail that works without it.
Not here: the measurement (cli/study).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from statehold.encoding.strictjson import Checker
from statehold.errors import CorruptionError, StateholdError
from statehold.io.mounts import Mount, mount_of
from statehold.options import Options
from statehold.options.io import BUFFER_BYTES_MIN, Moving
from statehold.process.whole_files import replace_file
from statehold.units import GiB, format_bytes

FORMAT = "statehold-io-profile"
VERSION = 2
# Version 1 has no rates.
VERSIONS = (1, VERSION)
_RATE_MAX = 1 << 60
_BYTES_MAX = 64 * 1024
_DEPTH_MAX = 4
_THREADS_MAX = 4096
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,1000}")
_BACKEND = re.compile(r"io_uring|threads")
_SUMMARY = "the profile is not valid"
_HINT = "delete it, or measure again: statehold bench io PATH"


@dataclass(frozen=True, slots=True)
class StorageRates:
    """The highest rates of the storage, in bytes a second, of any strategy of the study: writing
    until durable, and reading data that no memory holds."""

    write_bytes_per_s: int
    read_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The best settings for the storage `mount`, when they were measured, why they are the best,
    and the rates of that storage if the profile has them."""

    mount: Mount
    moving: Moving
    measured: str
    why: tuple[str, ...] = ()
    rates: StorageRates | None = None

    def encode(self) -> bytes:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "storage": asdict(self.mount),
            "settings": asdict(self.moving),
            "rates": None if self.rates is None else asdict(self.rates),
            "measured": self.measured,
            "why": list(self.why),
        }
        return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"


def decode(text: bytes, file: str) -> Profile:
    """A profile from its file. Raises CorruptionError that names the problem."""
    check = Checker(CorruptionError, _SUMMARY, file, _HINT)
    document = check.headed(text, _DEPTH_MAX, FORMAT, VERSIONS)
    names = ("format", "version", "storage", "settings", "measured", "why")
    has_rates = document["version"] != 1
    check.members(document, "the file", (*names, "rates") if has_rates else names)
    why = [
        check.text(line, "why", _TEXT, "one line of text")
        for line in check.array(document["why"], "why")
    ]
    return Profile(
        mount=_mount(check, document["storage"]),
        moving=_moving(check, document["settings"]),
        measured=check.text(document["measured"], "measured", _TEXT, "a time"),
        why=tuple(why),
        rates=_rates(check, document.get("rates")),
    )


def _mount(check: Checker, value: Any) -> Mount:
    found = check.members(value, "storage", ("device", "point", "kind"))
    return Mount(**{k: check.text(v, f"storage.{k}", _TEXT, "a name") for k, v in found.items()})


def _moving(check: Checker, value: Any) -> Moving:
    where = "settings"
    found = check.members(value, where, ("buffer_bytes", "queue_depth", "backend", "copy_threads"))
    at = f"{where}.buffer_bytes"
    buffer_bytes = check.integer(found["buffer_bytes"], at, BUFFER_BYTES_MIN, GiB)
    if buffer_bytes % BUFFER_BYTES_MIN:
        check.fail(at, "a multiple of 1 MiB", str(buffer_bytes))
    most = _THREADS_MAX
    return Moving(
        buffer_bytes=buffer_bytes,
        queue_depth=check.integer(found["queue_depth"], f"{where}.queue_depth", 1, most),
        backend=check.text(found["backend"], f"{where}.backend", _BACKEND, "io_uring or threads"),
        copy_threads=check.integer(found["copy_threads"], f"{where}.copy_threads", 1, most),
    )


def _rates(check: Checker, value: Any) -> StorageRates | None:
    if value is None:
        return None
    found = check.members(value, "rates", ("write_bytes_per_s", "read_bytes_per_s"))
    return StorageRates(
        **{k: check.integer(v, f"rates.{k}", 1, _RATE_MAX) for k, v in found.items()}
    )


# -- where it lies ---------------------------------------------------------------------------------


def path_for(path: str) -> Path:
    """The place of the profile of the storage that `path` lies on."""
    home = os.path.expanduser("~")
    return Path(home, ".config", "statehold", "io", f"{mount_of(path).key}.json")


def save(profile: Profile, file: Path) -> None:
    """Write a profile; a reader sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, profile.encode())


def find(chosen: str | os.PathLike[str] | None, path: str) -> Profile | None:
    """The profile that Io.profile = `chosen` means for a run at `path`, or None.

    Raises CorruptionError for a profile that cannot be used.
    """
    if chosen is None:
        return None
    is_auto = chosen == "auto"
    file = path_for(path) if is_auto else Path(chosen)
    text = _read(file, is_needed=not is_auto)
    if text is None:
        return None
    profile = decode(text, str(file))
    here = mount_of(path)
    if is_auto and profile.mount != here:
        facts = {"file": str(file), "expected": here.device, "got": profile.mount.device}
        raise CorruptionError("the profile is of another storage", facts=facts, hint=_HINT)
    return profile


def _read(file: Path, *, is_needed: bool) -> bytes | None:
    try:
        with open(file, "rb") as opened:
            return opened.read(_BYTES_MAX)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not is_needed:
            return None
        facts = {"file": str(file), "why": os.strerror(error.errno or 0)}
        raise CorruptionError("the profile cannot be read", facts=facts) from error


def tuned(options: Options, path: str) -> tuple[Options, str]:
    """The options of a run at `path`, with values of its profile instead of None. Also a note about
    an ignored profile, or ""."""
    try:
        profile = find(options.io.profile, path)
    except StateholdError as error:
        return options, f"ignoring the profile of the storage: {error}"
    return (options.filled(believed(profile.moving)), "") if profile else (options, "")


def rates_of(path: str) -> StorageRates | None:
    """The rates of the storage that `path` lies on, if its profile has them."""
    try:
        profile = find("auto", path)
    except StateholdError:
        return None
    return profile.rates if profile else None


def believed(moving: Moving) -> Moving:
    """Take io_uring only if it is allowed: the kernel's configuration may have changed."""
    backend = "auto" if moving.backend == "io_uring" else moving.backend
    return replace(moving, backend=backend)


def described(moving: Moving) -> str:
    """The settings in words."""
    threads = f"{moving.copy_threads} copy thread{'s' * (moving.copy_threads != 1)}"
    size = format_bytes(moving.buffer_bytes)
    return f"buffers of {size}, {moving.queue_depth} in flight, {moving.backend}, {threads}"
