"""The profile of a storage: strict where it is read, believed where nothing else was said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from statehold.errors import CorruptionError
from statehold.io import mounts
from statehold.io.mounts import Mount, mount_of
from statehold.io.profile import (
    Profile,
    StorageRates,
    decode,
    find,
    path_for,
    rates_of,
    save,
    tuned,
)
from statehold.options import Options
from statehold.options.io import DEFAULTS, Io, Moving, settled
from statehold.units import MiB

MOVING = Moving(buffer_bytes=4 * MiB, queue_depth=7, backend="threads", copy_threads=3)


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    rates = StorageRates(write_bytes_per_s=10**9, read_bytes_per_s=3 * 10**9)
    when = "2026-11-21T15:00:00+00:00"
    return Profile(mount_of(str(tmp_path)), MOVING, when, ("because",), rates)


def test_round_trip(profile: Profile) -> None:
    assert decode(profile.encode(), "f") == profile


def test_a_profile_without_rates_is_one_all_the_same(profile: Profile) -> None:
    """Version 1, as studies wrote it before they said how fast the storage is."""
    document = json.loads(profile.encode())
    del document["rates"]
    document["version"] = 1
    assert decode(json.dumps(document).encode(), "f") == replace(profile, rates=None)
    unknown = replace(profile, rates=None)
    assert decode(unknown.encode(), "f") == unknown


def test_it_says_how_fast_the_storage_is(home: Path, tmp_path: Path, profile: Profile) -> None:
    assert rates_of(str(tmp_path)) is None
    save(profile, path_for(str(tmp_path)))
    assert rates_of(str(tmp_path)) == profile.rates
    path_for(str(tmp_path)).write_bytes(b"{}")
    assert rates_of(str(tmp_path)) is None


def test_it_is_found_by_storage(home: Path, tmp_path: Path, profile: Profile) -> None:
    run = str(tmp_path / "runs" / "not there yet")
    assert find("auto", run) is None
    file = path_for(run)
    assert home in file.parents
    save(profile, file)
    assert find("auto", run) == profile
    assert find(None, run) is None
    assert os.listdir(file.parent) == [file.name]


def test_a_file_may_be_named(home: Path, tmp_path: Path, profile: Profile) -> None:
    elsewhere = replace(profile, mount=Mount("other", "/other", "ext4"))
    file = tmp_path / "mine.json"
    save(elsewhere, file)
    assert find(file, str(tmp_path)) == elsewhere
    with pytest.raises(CorruptionError, match="cannot be read"):
        find(tmp_path / "none.json", str(tmp_path))


def test_a_profile_of_another_storage_is_none(home: Path, tmp_path: Path, profile: Profile) -> None:
    save(replace(profile, mount=Mount("other", "/", "ext4")), path_for(str(tmp_path)))
    with pytest.raises(CorruptionError, match="another storage"):
        find("auto", str(tmp_path))


Change = Callable[[dict[str, Any]], object]
BROKEN: dict[str, Change] = {
    "another version": lambda d: d.update(version=3),
    "a version of no rates with rates": lambda d: d.update(version=1),
    "a version of rates without them": lambda d: d.pop("rates"),
    "a rate of zero": lambda d: d["rates"].update(write_bytes_per_s=0),
    "a rate that is half": lambda d: d["rates"].update(read_bytes_per_s=0.5),
    "rates in words": lambda d: d.update(rates="fast"),
    "a version that is true": lambda d: d.update(version=True, format="x"),
    "another format": lambda d: d.update(format="statehold"),
    "a member more": lambda d: d.update(more=1),
    "a member less": lambda d: d.pop("why"),
    "a setting more": lambda d: d["settings"].update(keep=1),
    "a setting less": lambda d: d["settings"].pop("queue_depth"),
    "a buffer that cuts a block": lambda d: d["settings"].update(buffer_bytes=MiB + 1),
    "a small buffer": lambda d: d["settings"].update(buffer_bytes=4096),
    "a huge buffer": lambda d: d["settings"].update(buffer_bytes=1 << 40),
    "a buffer in words": lambda d: d["settings"].update(buffer_bytes="16MiB"),
    "no depth": lambda d: d["settings"].update(queue_depth=0),
    "half a thread": lambda d: d["settings"].update(copy_threads=1.5),
    "no such backend": lambda d: d["settings"].update(backend="auto"),
    "a storage without a name": lambda d: d["storage"].pop("device"),
    "reasons in one piece": lambda d: d.update(why="because"),
    "a reason with a newline": lambda d: d.update(why=["a\nb"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(profile: Profile, name: str) -> None:
    document = json.loads(profile.encode())
    BROKEN[name](document)
    with pytest.raises(CorruptionError) as caught:
        decode(json.dumps(document).encode(), "the file")
    assert caught.value.facts["file"] == "the file"


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100, b'{"format":NaN}'])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode(text, "the file")


def test_it_fills_what_is_open(home: Path, tmp_path: Path, profile: Profile) -> None:
    save(profile, path_for(str(tmp_path)))
    options, note = tuned(Options(), str(tmp_path))
    assert note == ""
    assert settled(options.io) == MOVING


def test_what_is_given_wins(home: Path, tmp_path: Path, profile: Profile) -> None:
    save(profile, path_for(str(tmp_path)))
    io = Io(buffer_bytes="16MiB", queue_depth=32, backend="auto", copy_threads=1)
    given = Options(io=io)
    assert tuned(given, str(tmp_path)) == (given, "")
    options, _ = tuned(Options(io=Io(queue_depth=32)), str(tmp_path))
    assert (options.io.queue_depth, options.io.buffer_bytes) == (32, 4 * MiB)
    none = Options(io=Io(profile=None))
    assert tuned(none, str(tmp_path)) == (none, "")


def test_io_uring_is_taken_where_it_is_allowed(tmp_path: Path, profile: Profile) -> None:
    file = tmp_path / "p.json"
    save(replace(profile, moving=replace(MOVING, backend="io_uring")), file)
    options, _ = tuned(Options(io=Io(profile=file)), str(tmp_path))
    assert options.io.backend == "auto"


def test_buffers_that_do_not_fit_are_left_out(tmp_path: Path, profile: Profile) -> None:
    file = tmp_path / "p.json"
    save(replace(profile, moving=replace(MOVING, buffer_bytes=64 * MiB)), file)
    options, note = tuned(Options(io=Io(profile=file), staging_bytes="64MiB"), str(tmp_path))
    assert note == ""
    assert settled(options.io) == replace(MOVING, buffer_bytes=DEFAULTS.buffer_bytes)


def test_a_broken_profile_changes_nothing(home: Path, tmp_path: Path) -> None:
    file = path_for(str(tmp_path))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{}")
    options, note = tuned(Options(), str(tmp_path))
    assert options == Options()
    assert "ignoring the profile" in note


def test_no_environment_variable_overrides_a_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    before = tuned(Options(), str(tmp_path))
    for field in (*Options.__slots__, *Io.__slots__):
        for prefix in ("", "STATEHOLD_", "STATEHOLD_IO_"):
            monkeypatch.setenv(f"{prefix}{field}".upper(), "1")
    assert tuned(Options(), str(tmp_path)) == before


MOUNTS = r"""
/dev/a / ext4 rw 0 0
/dev/b /data ext4 rw 0 0
server:/x /data/with\040space nfs4 rw 0 0
/dev/c /data xfs rw 0 0
none relative tmpfs rw 0 0
""".strip()


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("/database/x", "/dev/a"),
        ("/data", "/dev/c"),
        ("/data/deep/er", "/dev/c"),
        ("/data/with space/run", "server:/x"),
    ],
)
def test_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, device: str) -> None:
    table = tmp_path / "mounts"
    table.write_text(MOUNTS + "\n")
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    assert mount_of(path).device == device


def test_a_mount_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "none")
    assert mount_of("/") == mounts.UNKNOWN
