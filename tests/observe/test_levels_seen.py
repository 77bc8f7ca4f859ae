"""Copies to other levels are seen: stages, figures, progress, lines; and those that fail, too."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from observe.conftest import Asked
from observe.exposition import samples_of
from observe.test_log import figures
from observe.test_metrics import of_run
from observe.test_trace import end, named, names, spans
from statehold.checkpoint.telemetry.watch import copied_text
from statehold.observe import background_log
from statehold.observe.counters import exposition
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.levels import FAR, HeldCopy, save, settle, status, two

NUMEL = 1 << 20


def content(step: int) -> dict[str, Any]:
    return {"w": torch.arange(NUMEL, dtype=torch.int32) + step}


def test_the_stages_of_a_copy_are_there_and_nest(copied: Path) -> None:
    events = json.loads((copied / "trace.json").read_text())["traceEvents"]
    of_level = spans(events, level="far")
    promote = named(events, "promote")
    (write,) = [each for each in spans(events) if each["args"].get("file")]
    assert names(of_level) == ["promote", "prepare", "plan", "commit", "retain"]
    assert promote["ts"] <= write["ts"] <= end(write) <= end(promote)
    assert write["name"] == "write"
    assert promote["args"]["bytes"] == write["args"]["bytes"] > NUMEL * 4
    assert 0 < write["args"]["read_s"] <= promote["args"]["seconds"]
    assert promote["args"]["step"] == 1


def test_a_report_shows_the_copies(copied: Path, ask: Asked) -> None:
    code, document = ask("report", copied / "run", "--trace", copied / "trace.json", "--json")
    assert code == 0
    (copy,) = document["copies"]
    assert (copy["step"], copy["level"], copy["rank"], copy["failed"]) == (1, "far", 0, False)
    assert copy["bytes_per_s"] == pytest.approx(copy["bytes"] / copy["seconds"])


def test_figures_of_each_level_are_counted(
    told: list[logging.LogRecord], request: pytest.FixtureRequest
) -> None:
    fs, run = SimFs(seed=1), f"/{request.node.name}"
    with checkpointer_on(fs, run, levels=two(), **SMALL) as ckpt:
        save(ckpt, 1, content(1))
        settle(ckpt)
        save(ckpt, 2, content(2))
        settle(ckpt)
    samples = samples_of(exposition())
    near, far = (of_run(samples, run, level=level) for level in ("near", "far"))
    assert near("level_newest_step") == far("level_newest_step") == 2
    assert near("level_committed_timestamp_seconds") > 1e9
    assert far("level_copy_seconds_count") == 2
    copies = figures(told, "copy")
    assert [(each["step"], each["level"]) for each in copies] == [(1, "far"), (2, "far")]
    assert far("level_copied_bytes_total") == sum(each["bytes"] for each in copies)


def test_a_copy_that_fails_is_counted_and_none_is_told(told: list[logging.LogRecord]) -> None:
    fs = SimFs(seed=1)
    with checkpointer_on(fs, "/failing copy", levels=two(), **SMALL) as ckpt:
        with HeldCopy(ckpt) as held:
            save(ckpt, 1, content(1))
            must(held.waiting.wait(DEADLINE_S))
            inside(ckpt).pipeline.drain()
            fs.fail_next("write_file", 5)  # of the copy's manifest: nothing else is under way
        settle(ckpt)
        failed = status(ckpt).error
        assert figures(told, "copy") == []
    assert failed is not None
    assert fs.fired["injected"] == 1
    far = of_run(samples_of(exposition()), "/failing copy", level="far")
    assert far("level_copies_failed_total") == 1
    assert far("level_newest_step") == 1  # close() tried again


class UntilProgress(logging.Handler):
    """Notes that a line about progress was written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "statehold", {}).get("event") == "progress":
            self.seen.set()


def test_a_long_copy_says_how_far_it_is(
    told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_log, "FIRST_S", 0.0)
    monkeypatch.setattr(background_log, "PAUSE_S_MIN", 0.0)
    until = UntilProgress()
    log = logging.getLogger("statehold")
    log.addHandler(until)
    try:
        with checkpointer_on(SimFs(seed=1), "/long", levels=two(), **SMALL) as ckpt:
            with HeldCopy(ckpt) as held:
                save(ckpt, 1, content(1))
                must(held.waiting.wait(DEADLINE_S))
                must(until.seen.wait(DEADLINE_S))
            settle(ckpt)
    finally:
        log.removeHandler(until)
    first = figures(told, "progress")[0]
    assert first["what"] == f"copying step 1 to level {FAR[1:]}"
    assert first["done_bytes"] <= NUMEL * 4


def test_the_line_of_a_copy_says_what_held_it_up() -> None:
    about = {"step": 7, "level": "objects", "bytes": 1 << 30, "seconds": 2.0}
    about |= {"linked_bytes": 0, "limited_s": 0.0}
    text = "step 7 is committed at level objects: 1 GiB in 2 s (512 MiB/s)"
    assert copied_text(about) == text
    assert copied_text({**about, "limited_s": 1.5}).startswith(f"{text}; it waited 1.5")
    assert (
        copied_text({**about, "linked_bytes": 1 << 20})
        == f"{text}; it shares 1 MiB with other steps"
    )
