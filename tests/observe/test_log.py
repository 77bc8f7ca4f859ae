"""Lines in the log: one for a committed save and for a restore, never too early, never harmful."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold.checkpoint.save.handle import Passage
from statehold.checkpoint.telemetry.watch import UNWATCHED
from statehold.io.segments import Reading
from statehold.observe import background_log
from statehold.observe.background_log import Progress, pause_after, progress_text
from statehold.units import GiB, MiB
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.in_memory import SimFs, checkpointer_on
from support.training import Training


def figures(records: list[logging.LogRecord], event: str) -> list[dict[str, Any]]:
    found = [getattr(record, "statehold", {"event": None}) for record in records]
    return [each for each in found if each["event"] == event]


def test_a_line_for_each_save_and_each_restore(
    tmp_path: Path, told: list[logging.LogRecord]
) -> None:
    training = Training()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        saves = [ckpt.save(step, training.state) for step in (1, 2)]
        saves[1].wait("committed", DEADLINE_S)
        ckpt.restore(training.state)
    lines = [record.getMessage() for record in told if record.levelname == "INFO"]
    assert len(lines) == 3
    said = figures(told, "save")
    assert [each["step"] for each in said] == [1, 2]
    for each, save in zip(said, saves, strict=True):
        assert each["committed_s"] == save.stats.committed_s
        assert each["blocked_s"] == save.stats.blocked_s > 0
        assert each["written_bytes"] == save.stats.written_bytes
    (restore,) = figures(told, "restore")
    assert restore["step"] == 2
    assert restore["read_bytes"] == saves[1].stats.written_bytes
    assert json.loads(json.dumps([*said, restore])) == [*said, restore]
    assert "step 2 committed: " in lines[1]
    assert "step 2 restored: " in lines[2]


@pytest.mark.parametrize("is_first", ["returned", "committed"])
def test_a_save_is_told_of_once_and_when_all_is_known(
    told: list[logging.LogRecord], is_first: str
) -> None:
    """A small save may be committed before save() returns."""
    save = Passage(1, time.perf_counter())
    events = [save.returned, lambda: save.reach("committed")]
    if is_first == "committed":
        events.reverse()
    events[0]()
    assert figures(told, "save") == []
    events[1]()
    events[0]()  # again, as both threads may come to it at once
    UNWATCHED.log.flush()
    (said,) = figures(told, "save")
    assert said["blocked_s"] > 0
    assert said["committed_s"] > 0


def test_nothing_is_said_before_the_commit(tmp_path: Path, told: list[logging.LogRecord]) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(1, {"values": list(range(100))})
        reached = holdup.waiting.wait(DEADLINE_S)
        assert reached
        assert not any(record.levelname == "INFO" for record in told)
        holdup.release()
        save.wait("committed", DEADLINE_S)
    assert len(figures(told, "save")) == 1


def test_a_failed_save_is_no_committed_one(tmp_path: Path, told: list[logging.LogRecord]) -> None:
    fs = SimFs(1)
    ckpt = checkpointer_on(fs, "/run", **SMALL)
    fs.fail_next("rename", 5)
    with pytest.raises(statehold.errors.StorageError):
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
    ckpt.close()
    assert fs.fired["injected"] == 1
    assert figures(told, "save") == []
    assert not any("committed" in record.getMessage() for record in told)


def test_a_filter_that_raises_fails_no_save(tmp_path: Path) -> None:
    class Broken(logging.Filter):
        called = 0

        def filter(self, _record: logging.LogRecord) -> bool:
            self.called += 1
            raise RuntimeError("broken")

    broken, logger = Broken(), logging.getLogger("statehold")
    logger.addFilter(broken)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
            ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
            got = ckpt.restore({"x": 0})
            assert got == 1
        assert broken.called >= 2
    finally:
        logger.removeFilter(broken)
        logger.setLevel(level)


# -- progress ------------------------------------------------------------------------------


def test_a_long_restore_says_how_far_it_is(
    tmp_path: Path, told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that is held up until two lines are there."""
    monkeypatch.setattr(background_log, "FIRST_S", 0.0)
    monkeypatch.setattr(background_log, "PAUSE_S_MIN", 0.0)
    twice, count = threading.Event(), 0

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            nonlocal count
            count += getattr(record, "statehold", {}).get("event") == "progress"
            if count >= 2:
                twice.set()

    counting = Counting()
    logging.getLogger("statehold").addHandler(counting)
    try:
        with statehold.Checkpointer(
            tmp_path / "run", trace=tmp_path / "trace.json", **SMALL
        ) as ckpt:
            training = Training()
            ckpt.save(1, training.state).wait("committed", DEADLINE_S)
            finish = Reading.finish

            def held(reading: Reading, fill: Any) -> None:
                must(twice.wait(DEADLINE_S))
                finish(reading, fill)

            monkeypatch.setattr(Reading, "finish", held)
            ckpt.restore(training.state)
    finally:
        logging.getLogger("statehold").removeHandler(counting)
    said = figures(told, "progress")
    assert twice.is_set()
    assert len(said) >= 2
    assert all(0 <= each["done_bytes"] <= each["total_bytes"] > 0 for each in said)
    assert "restoring step 1: " in next(
        record.getMessage() for record in told if "restoring" in record.getMessage()
    )
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    levels = [each["args"] for each in trace if each["ph"] == "C"]
    assert len(levels) == len(said)
    assert levels[0].keys() == {"done", "total"}


def test_a_short_restore_says_nothing(told: list[logging.LogRecord]) -> None:
    def never() -> tuple[int, int]:
        raise AssertionError("asked")

    with Progress("restoring step 1", never):
        pass
    assert told == []


def test_at_most_a_line_a_second_and_fewer_of_what_is_long() -> None:
    assert pause_after(5.0, 5.0, moved=True) == 1.0
    assert pause_after(100.0, 9.0, moved=True) == 5.0
    assert pause_after(1e6, 9.0, moved=True) == 60.0
    at_s, lines = background_log.FIRST_S, 0
    while at_s < 3600:
        at_s, lines = at_s + pause_after(at_s, 1.0, moved=True), lines + 1
    assert 50 < lines < 150


def test_what_stands_still_is_told_ever_more_rarely() -> None:
    """A store that is down: the bytes are sent, and the end does not come."""
    pauses = [1.0]
    while pauses[-1] < background_log.PAUSE_S_MAX:
        pauses.append(pause_after(sum(pauses), pauses[-1], moved=False))
    assert len(pauses) < 9
    assert "waiting for the end" in progress_text(GiB, GiB, 5.0)


def test_what_a_line_says() -> None:
    assert progress_text(512 * MiB, 2 * GiB, 4.0) == (
        "512 MiB of 2 GiB (25%), 128 MiB/s, 12 s left"
    )
    assert progress_text(0, GiB, 5.0) == "0 B of 1 GiB (0%), 0 B/s"
    # Where a store does not answer, a copy waits before it knows what it has to do.
    assert progress_text(0, 0, 5.0) == "nothing has moved yet"
