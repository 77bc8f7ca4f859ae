"""Where subgroups are written next, over paths whose speed and space change."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from statehold.errors import ChecksumError, StorageError, UsageError, storage_error
from statehold.offload.pipeline import Targets
from statehold.offload.store import SubgroupStore
from statehold.planners.placement import Moved
from statehold.units import MiB

SIZES = [MiB] * 64


@dataclass
class Files:
    """A path with a speed, and room for so many files."""

    directory: str
    speed: float
    room: int = 1000
    failure: int = errno.ENOSPC
    read: int = 0
    written: int = 0
    busy_s: float = 0.0
    made: list[int] = field(default_factory=list)

    def reserve(self, sizes: list[int]) -> None:
        if len(self.made) + len(sizes) > self.room:
            raise storage_error("allocate", self.failure, self.directory)
        self.made += sizes


class Paths:
    """As far as Targets know a SubgroupStore: every update reads and writes each subgroup once."""

    def __init__(self, *speeds: float) -> None:
        self.files = [Files(f"/path{index}", speed) for index, speed in enumerate(speeds)]
        self.now = 0.0
        self.targets = Targets(
            SIZES, cast(SubgroupStore, self), [1.0] * len(speeds), lambda: self.now
        )
        self.targets.reserve(2)
        self.lying = [self.targets[index] for index in range(len(SIZES))]

    def moved(self, path: int) -> Moved:
        files = self.files[path]
        return Moved(files.read, files.written, files.busy_s)

    def update(self) -> list[int]:
        """Returns the counts that it has placed by."""
        self.targets.renew()
        taken = [0.0] * len(self.files)
        for index, size in enumerate(SIZES):
            reads, writes = self.files[self.lying[index]], self.files[self.targets[index]]
            reads.read += size
            writes.written += size
            for files in (reads, writes):
                files.busy_s += size / 2 / files.speed
                taken[self.files.index(files)] += size / 2 / files.speed
            self.lying[index] = self.targets[index]
        self.now += max(taken)
        return list(self.targets.counts)

    def updates(self, count: int) -> list[list[int]]:
        return [self.update() for _ in range(count)]


def test_a_path_that_others_load_gets_less_for_as_long() -> None:
    paths = Paths(100.0 * MiB, 100.0 * MiB)
    assert paths.updates(3)[-1] == [32, 32]
    paths.files[1].speed = 50.0 * MiB
    assert paths.updates(10)[-1][1] in (20, 21, 22)
    paths.files[1].speed = 100.0 * MiB
    assert abs(paths.updates(12)[-1][1] - 32) <= 2


def test_a_path_whose_share_fell_to_nothing_comes_back() -> None:
    paths = Paths(100.0 * MiB, 100.0 * MiB)
    paths.files[1].speed = 0.5 * MiB
    assert paths.updates(12)[-1] == [64, 0]
    measured = paths.files[1].written
    seen = paths.updates(600)
    assert paths.files[1].written > measured  # it was tried again, and found slow
    tried = sum(counts[1] > 0 for counts in seen)
    assert 1 <= tried <= 20
    paths.files[1].speed = 100.0 * MiB
    assert abs(paths.updates(600)[-1][1] - 32) <= 2


def test_reading_alone_measures_nothing() -> None:
    """state_dict() reads all: a path that reads faster than it writes gets no more by that."""
    paths = Paths(100.0 * MiB, 100.0 * MiB)
    paths.updates(3)
    for _ in range(10):
        paths.targets.renew()
        paths.files[1].read += 64 * MiB
        paths.files[1].busy_s += 0.01
        paths.targets.skip()
        assert paths.update() == [32, 32]


def test_a_path_without_room_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    paths = Paths(100.0 * MiB, 100.0 * MiB)
    paths.files[0].room = len(paths.files[0].made)
    paths.files[1].speed = 25.0 * MiB
    with caplog.at_level(logging.WARNING, "statehold"):
        assert paths.updates(10)[-1] == [32, 32]
    (record,) = caplog.records
    assert "/path0, which is full" in record.getMessage()
    assert not paths.targets.given_up


def test_a_path_that_fails_when_it_should_get_more_is_given_up() -> None:
    paths = Paths(100.0 * MiB, 100.0 * MiB)
    paths.files[0].room, paths.files[0].failure = len(paths.files[0].made), errno.EIO
    paths.files[1].speed = 25.0 * MiB
    assert paths.updates(10)[-1] == [0, 64]
    assert list(paths.targets.given_up) == [0]


def test_a_path_is_given_up_once_and_the_last_one_never(caplog: pytest.LogCaptureFixture) -> None:
    targets = Paths(3.0 * MiB, 2.0 * MiB, 1.0 * MiB).targets
    lost = storage_error("write", errno.EIO, "/path1/file")
    with caplog.at_level(logging.WARNING, "statehold"):
        assert targets.give_up(1, lost, "writing subgroup 3 to /path1")
        assert targets.give_up(1, lost, "writing subgroup 4 to /path1")
        assert targets.counts == [32, 0, 32]
        assert targets.give_up(0, lost, "writing subgroup 5 to /path0")
    assert len(caplog.records) == 2
    assert "gives up its path /path1" in caplog.records[0].getMessage()
    assert {targets[index] for index in range(64)} == {2}
    last = storage_error("write", errno.EIO, "/path2/file")
    assert not targets.give_up(2, last, "writing subgroup 5 to /path2")
    assert "none is left" in str(last)
    assert targets.given_up.keys() == {0, 1}


@pytest.mark.parametrize(
    "error", [ChecksumError("bits"), StorageError("open", errno=errno.EMFILE), UsageError("bug")]
)
def test_what_is_no_fault_of_a_path_does_not_end_it(error: Any) -> None:
    targets = Paths(1.0, 1.0).targets
    assert not targets.give_up(0, error, "reading subgroup 3 from /path0")
    assert not targets.given_up
