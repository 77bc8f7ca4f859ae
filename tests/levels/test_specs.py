"""What a user may say of levels, when a step is due, how fast a copy is, where memory lives."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold import Directory, Memory, ObjectStore
from statehold.checkpoint.cadence.every import Cadence, Every, parse_every
from statehold.checkpoint.levels.memory import memory_root
from statehold.checkpoint.levels.promoting import BURST_S, Throttle
from statehold.checkpoint.levels.specs import Level, check_levels
from statehold.errors import ClosedError, StorageError, UsageError
from statehold.process.host_memory import home as make_home
from statehold.process.host_memory import home_path
from support.faults import DEADLINE_S, SMALL, must

# -- what may be said ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, Every(steps=1)),
        (10, Every(steps=10)),
        ("90s", Every(seconds=90)),
        ("1.5 min", Every(seconds=90)),
        (" 2h ", Every(seconds=7200)),
        ("1d", Every(seconds=86_400)),
        ("auto", Every()),
    ],
)
def test_a_cadence_is_a_number_of_steps_or_a_time(value: Any, expected: Every) -> None:
    assert parse_every(value) == expected


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "", "10", "0s", "5 m", "-1s", "Auto", None])
def test_what_is_no_cadence(value: Any) -> None:
    with pytest.raises(UsageError, match="not a valid value of every=") as caught:
        Directory(every=value)
    assert caught.value.facts["got"] == repr(value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Directory(keep=0), "keep must be a number of steps"),
        (lambda: Directory(keep=True), "keep must be a number of steps"),
        (lambda: Memory(keep=None), "cannot keep all steps"),
        (lambda: Directory(bytes_per_s=0), "at least one byte a second"),
        (lambda: Directory(bytes_per_s="5 parsecs"), "a number and a unit"),
        (lambda: Directory(name=""), "the name of a level must be"),
        (lambda: Directory(name="a/b"), "the name of a level must be"),
        (lambda: ObjectStore("bucket/prefix"), "must be a URL"),
        (lambda: ObjectStore("s3://"), "not the URL of an object store"),
        (lambda: check_levels([]), "must not be empty"),
        (lambda: check_levels(["/scratch"]), "a level must be a Memory"),
        (lambda: check_levels([Level()]), "a level must be a Memory"),
        (lambda: check_levels(Memory()), "levels must be a list"),
        (lambda: check_levels([ObjectStore("s3://b/p")]), "the first level must be"),
        (
            lambda: check_levels([Directory(), Directory(path="/x")]),
            "two levels have the same name",
        ),
        (lambda: check_levels([Directory(), Memory()]), "it must be the first"),
        (
            lambda: check_levels([Memory(), Memory(name="more")]),
            "there can be only one Memory level",
        ),
        (
            lambda: statehold.Checkpointer("x", levels=[Memory()], keep=2),
            "each level has a keep= of its own",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_two_levels_in_one_directory_are_refused(tmp_path: Path) -> None:
    levels = [Directory(), Directory(path=tmp_path / "other" / ".." / "run", name="again")]
    ckpt = statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL)
    with pytest.raises(UsageError, match="two levels use the same directory"):
        ckpt.steps()


def test_a_rate_is_in_bytes() -> None:
    assert Directory(bytes_per_s="5MB").rate == 5_000_000
    assert Directory().rate is None


# -- when ------------------------------------------------------------------------------------------


def due(cadence: Cadence, steps: range) -> list[int]:
    """The steps that are taken, one a second."""
    found = []
    for step in steps:
        if cadence.is_due(step, float(step)):
            cadence.taken(step, float(step))
            found.append(step)
    return found


def test_each_tenth_step_and_the_first_of_a_run() -> None:
    assert due(Cadence(Every(steps=10), None, 0.0), range(1, 35)) == [1, 10, 20, 30]
    assert due(Cadence(Every(steps=10), 17, 0.0), range(18, 35)) == [20, 30]
    assert due(Cadence(Every(steps=10), None, 0.0), range(7, 60, 7)) == [7, 14, 21, 35, 42, 56]


def test_each_so_many_seconds() -> None:
    assert due(Cadence(Every(seconds=10.0), None, 0.0), range(1, 35)) == [10, 20, 30]


def test_what_could_not_be_taken_stays_due() -> None:
    cadence = Cadence(Every(steps=10), 10, 0.0)
    assert [step for step in range(11, 25) if cadence.is_due(step, 0.0)] == list(range(20, 25))


@pytest.mark.parametrize("every", [Every(steps=10), Every(seconds=100.0)])
def test_what_failed_is_due_again_at_once(every: Every) -> None:
    cadence = Cadence(every, None, 0.0)
    cadence.taken(10, 100.0)
    assert not cadence.is_due(11, 101.0)
    cadence.given_up(None)
    assert cadence.is_due(11, 101.0)


def test_a_step_saved_again_is_due_and_an_older_one_never() -> None:
    cadence = Cadence(Every(steps=10), 10, 0.0)
    assert cadence.is_due(10, 0.0)
    assert not cadence.is_due(9, 0.0)


# -- how fast --------------------------------------------------------------------------------------


class FakeTime:
    """A clock, and the flag that a throttle waits for: waiting is what makes time pass."""

    is_set = False

    def __init__(self) -> None:
        self.now_s = 1000.0

    def clock(self) -> float:
        return self.now_s

    def wait(self, timeout: float) -> bool:
        self.now_s += timeout
        return False


def throttled(rate: int | None) -> tuple[Throttle, FakeTime]:
    fake = FakeTime()
    throttle = Throttle(rate, clock=fake.clock)
    throttle.stopped = fake  # type: ignore[assignment]
    return throttle, fake


@pytest.mark.parametrize("work_s", [0.0, 0.003, 0.008])
def test_the_limit_holds_over_any_window(work_s: float) -> None:
    """Blocks of 100 kB at 10 MB/s are 10 ms apart, whatever moving one takes."""
    throttle, fake = throttled(10_000_000)
    at = []
    for _ in range(2000):
        throttle(100_000)
        at.append(fake.now_s)
        fake.now_s += work_s
    for begin, end in ((0, 1999), (0, 700), (450, 1450), (1300, 1999)):
        rate = 100_000 * (end - begin) / (at[end] - at[begin])
        assert rate == pytest.approx(10_000_000, rel=0.05), (begin, end)


def test_a_short_delay_is_caught_up_with_and_a_long_one_is_not() -> None:
    throttle, fake = throttled(10_000_000)
    begin = fake.now_s
    for index in range(1000):
        fake.now_s += 0.1 if index % 100 == 0 else 0.0  # a stall within the burst
        throttle(100_000)
    assert fake.now_s - begin == pytest.approx(10.0, rel=0.05)
    fake.now_s += 3600.0
    begin = fake.now_s
    for _ in range(1000):
        throttle(100_000)
    assert fake.now_s - begin == pytest.approx(10.0 - BURST_S, rel=0.05)


def test_a_copy_is_owed_nothing_of_the_time_before_it() -> None:
    throttle, fake = throttled(10_000_000)
    for _ in range(3):
        fake.now_s += 3600.0
        begin = fake.now_s
        throttle.begin()
        for _ in range(100):
            throttle(100_000)
        assert fake.now_s - begin == pytest.approx(1.0, rel=0.02)


def test_without_a_limit_nothing_waits() -> None:
    throttle, fake = throttled(None)
    for _ in range(10):
        throttle(1 << 40)
    assert fake.now_s == 1000.0


def test_stop_wakes_who_waits() -> None:
    throttle, waits = Throttle(1), threading.Event()
    throttle(3600)  # the next one is an hour away
    errors = []

    def wait() -> None:
        waits.set()
        try:
            throttle(1)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    must(waits.wait(DEADLINE_S))
    throttle.stop()
    thread.join(DEADLINE_S)
    assert len(errors) == 1
    with pytest.raises(ClosedError):
        throttle(0)


# -- where memory lives ----------------------------------------------------------------------------


def home(base: Path) -> Path:
    return Path(home_path(str(base)))


def test_memory_is_private_found_again_and_of_one_run(tmp_path: Path) -> None:
    first = memory_root("/runs/a", str(tmp_path))
    assert not home(tmp_path).exists()
    make_home(str(tmp_path))
    assert memory_root("/runs/a", str(tmp_path)) == first
    assert memory_root("/runs/./a/", str(tmp_path)) == first
    assert memory_root("/runs/b", str(tmp_path)) != first
    assert Path(first).parent == home(tmp_path)
    assert home(tmp_path).stat().st_mode & 0o777 == 0o700


def test_a_run_reached_through_a_link_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    roots = {memory_root(str(tmp_path / name), str(tmp_path)) for name in ("run", "link")}
    assert len(roots) == 1


def link_elsewhere(at: Path) -> None:
    (at.parent / "mine").mkdir(0o700)
    at.symlink_to(at.parent / "mine")


def open_to_others(at: Path) -> None:
    at.mkdir()
    at.chmod(0o770)


def of_another_user(at: Path) -> None:
    at.mkdir(0o700)
    os.chown(at, 12345, 12345)


def a_dangling_link(at: Path) -> None:
    at.symlink_to(at.parent / "nowhere")


@pytest.mark.parametrize(
    "attack",
    [
        link_elsewhere,
        a_dangling_link,
        open_to_others,
        lambda at: at.write_text(""),
        pytest.param(
            of_another_user,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root"),
        ),
    ],
)
def test_what_somebody_else_has_put_there_is_refused(tmp_path: Path, attack: Any) -> None:
    attack(home(tmp_path))
    before = sorted(each.name for each in tmp_path.rglob("*"))
    for use in (partial(memory_root, "/runs/a"), make_home):
        with pytest.raises(StorageError, match="does not belong to this user alone") as caught:
            use(str(tmp_path))
        assert caught.value.path == str(home(tmp_path))
    assert sorted(each.name for each in tmp_path.rglob("*")) == before


def test_a_base_that_is_not_there_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="memory level"):
        make_home(str(tmp_path / "none"))
