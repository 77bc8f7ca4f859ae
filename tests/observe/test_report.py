"""`statehold report`: what is in its data and on its page, and that the page is well-formed."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from observe.conftest import Asked, Seen
from observe.hostile import HOSTILE, hostile_run, hostile_trace
from statehold.cli import main
from statehold.cli.page import Markup, tag
from statehold.cli.report import costs_of, percentile
from statehold.cli.traces import MARKS_MAX, read_traces
from statehold.format.entries import About
from statehold.io import profile as profiles
from statehold.io.mounts import mount_of
from statehold.io.profile import Profile, StorageRates
from statehold.options.io import Moving
from statehold.units import MiB
from support.runs import arrays_of, write_step

VOID = {"meta", "rect", "line"}


class Strict(HTMLParser):
    """Refuses elements that are not closed in order; keeps texts, elements and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes), (name, attributes)
        self.elements.append((name, dict(attributes)))
        if name != "meta":
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def page_of(tmp_path: Path, *words: object, code: int = 0) -> tuple[str, Strict]:
    path = tmp_path / "report.html"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ended = main(["report", *map(str, words), "-o", str(path)])
    assert said.getvalue() == f"{path}\n"
    assert ended == code
    text = path.read_text("utf-8")
    return text, Strict(text)


def test_the_page_says_what_the_run_holds(seen: Seen, tmp_path: Path) -> None:
    _, page = page_of(tmp_path, seen.run, "--trace", seen.trace)
    assert page.texts[0] == "run - statehold report"
    assert {"statehold", "run"} <= set(page.texts)
    assert any(text.startswith(f"{seen.run}, on ") for text in page.texts)
    for text in (
        "Steps",
        "What saving cost",
        "Timeline",
        "Saves",
        "Restores",
        "Levels",
        "In step 3",
        "not verified",
    ):
        assert text in page.texts, text
    assert "model.embed.weight" in page.texts
    assert not {"Damage", "Failures"} & set(page.texts)


def test_verify_says_intact_and_where_not(
    run: Path,
    tmp_path: Path,
    ask: Asked,
) -> None:
    _, page = page_of(tmp_path, run, "--verify")
    assert "2 steps intact" in page.texts
    data = run / "step-000000000001" / "rank-00000-of-00001.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(bytes(raw))
    _, page = page_of(tmp_path, run, code=0)
    assert "not verified" in page.texts
    _, page = page_of(tmp_path, run, "--verify", code=1)
    assert "1 damaged" in page.texts
    assert {"Damage", "checksum", data.name} <= set(page.texts)
    code, told = ask("report", run, "--verify")
    assert code == 1
    assert [step["state"] for step in told["steps"]] == ["damaged", "committed"]
    assert [step["integrity"]["intact"] for step in told["steps"]] == [False, True]


def test_metrics_have_columns_and_lines(tmp_path: Path) -> None:
    """The values are the largest that are finite. The names include one that is also a column."""
    values = {"loss": (3.0, 1.5, 2.0), "step": (-1e308, 0.0, 1e308), "<b>": (7.0, 7.0, 7.0)}
    for number in range(3):
        about = About({name: of[number] for name, of in values.items()})
        write_step(tmp_path / "run", number + 1, {}, about)
    text, _ = page_of(tmp_path, tmp_path / "run")
    assert text.count("<figure") == 3
    assert "3^" in text
    assert "1.5*" in text
    assert "nan" not in text
    assert "<b>" not in text


def test_the_data_as_json(seen: Seen, ask: Asked) -> None:
    code, told = ask("report", seen.run, "--trace", seen.trace, "--limit", "1 MB")
    assert code == 0
    assert [step["step"] for step in told["steps"]] == [2, 3]
    assert [save["step"] for save in told["saves"]] == [1, 2, 3]
    assert [each["step"] for each in told["restores"]] == [3]
    for save in told["saves"]:
        assert 0 < save["staged_s"] <= save["written_s"] <= save["committed_s"]
        assert save["bytes_per_s"] == pytest.approx(save["written_bytes"] / save["committed_s"])
        assert not save["failed"]
    assert told["limit_bytes_per_s"] == 10**6
    (level,) = told["levels"]
    assert (level["steps"], level["path"]) == ([2, 3], str(seen.run))
    assert level["bytes"] == sum(step["bytes"] for step in told["steps"])
    assert told["left_out_events"] == 0


def save_of(step: int, begin_s: float, **facts: Any) -> dict[str, Any]:
    """A save as a report has it."""
    known = {"blocked_s": 0.01, "gate_s": 0.0, "committed_s": 1.0, "failed": False}
    return {"step": step, "begin_us": int(begin_s * 1e6), **known, **facts}


def test_what_saving_cost() -> None:
    saves = [save_of(step, 10.0 * step, blocked_s=0.1, gate_s=0.4) for step in range(5)]
    saves[1] |= {"failed": True, "committed_s": None}
    found = costs_of(saves)
    assert found is not None
    assert (found["saves"], found["failed"], found["window_s"]) == (5, 1, 40.0)
    assert found["blocked_share"] == pytest.approx(4 * 0.5 / 40)
    assert found["gate_s"] == {"median": 0.4, "p99": 0.4, "max": 0.4}
    assert costs_of([]) is None
    alone = costs_of(saves[1:2])
    assert alone is not None
    assert (alone["blocked_share"], alone["committed_s"]) == (None, None)
    at_once = costs_of([save_of(1, 5.0), save_of(2, 5.0)])
    assert at_once is not None
    assert at_once["blocked_share"] is None
    always = costs_of([save_of(1, 5.0, blocked_s=9.0), save_of(2, 6.0)])
    assert always is not None
    assert always["blocked_share"] == 1.0


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (1000, 990)]
)
def test_a_percentile_is_one_of_the_values(count: int, expected: int) -> None:
    assert percentile(list(range(count, 0, -1)), 0.99) == expected


def test_the_page_says_what_saving_cost(seen: Seen, tmp_path: Path, ask: Asked) -> None:
    _, told = ask("report", seen.run, "--trace", seen.trace)
    assert told["costs"]["saves"] == 3
    blocked = sum(save["blocked_s"] + save["gate_s"] for save in told["saves"][:-1])
    assert told["costs"]["blocked_share"] == pytest.approx(blocked / told["costs"]["window_s"])
    _, page = page_of(tmp_path, seen.run, "--trace", seen.trace)
    share = f"{told['costs']['blocked_share']:.2%}"
    assert {"training blocked", share, "durable after", "99th percentile"} <= set(page.texts)
    _, page = page_of(tmp_path, seen.run)
    assert "training blocked" not in page.texts
    assert ask("report", seen.run)[1]["costs"] is None


def failing(seen: Seen, tmp_path: Path) -> Path:
    """The trace of `seen`, but the save of step 2 has failed."""
    document = json.loads(seen.trace.read_text())
    for event in document["traceEvents"]:
        if event["name"] == "save" and event["id"] == "save 2":
            event["name"] = "failed save"
            if event["ph"] == "b":
                event["args"] |= {"event": "failed save", "committed_s": None}
    path = tmp_path / "failing.json"
    path.write_text(json.dumps(document))
    return path


def test_failures_come_first(run: Path, seen: Seen, tmp_path: Path) -> None:
    (run / "step-000000000002" / "manifest.json").write_text("{")
    _, page = page_of(tmp_path, run, "--trace", failing(seen, tmp_path), code=1)
    titles = [text for text in page.texts if text in SECTIONS]
    assert titles == SECTIONS
    assert {"save failed", "1 failed", "1 damaged"} <= set(page.texts)


SECTIONS = ["Failures", "Damage", "What saving cost", "Steps", "Timeline", "Saves", "Levels"]


def test_long_tables_are_folded(tmp_path: Path) -> None:
    for step in range(1, 41):
        write_step(tmp_path / "run", step, arrays_of())
    _, page = page_of(tmp_path, tmp_path / "run")
    names = [name for name, _ in page.elements]
    assert names.count("details") == names.count("summary") == 1
    assert "28 older steps" in page.texts
    first, others = (page.texts.index(text) for text in ("Steps", "28 older steps"))
    shown = [int(text) for text in page.texts[first:others] if text in map(str, range(13, 41))]
    assert shown[0] == 40
    assert set(shown) >= set(range(29, 41))
    assert "1" in page.texts[others:]


def test_ranks_of_a_save_are_one_row(seen: Seen, tmp_path: Path, ask: Asked) -> None:
    document = json.loads(seen.trace.read_text())
    for event in document["traceEvents"]:
        event["pid"] = 1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document))
    _, alone = ask("report", seen.run, "--trace", seen.trace)
    _, both = ask("report", seen.run, "--trace", seen.trace, other)
    assert [save["ranks"] for save in both["saves"]] == [2, 2, 2]
    for one, two in zip(alone["saves"], both["saves"], strict=True):
        assert two["written_bytes"] == 2 * one["written_bytes"]
        assert two["committed_s"] == one["committed_s"]
    _, page = page_of(tmp_path, seen.run, "--trace", seen.trace, other, "--limit", "1 GB")
    assert {"of limit", "3"} <= set(page.texts)
    assert {"rank 0 · engine", "rank 1 · engine"} <= set(page.texts)


def test_what_was_reached_is_compared_with_the_profile(
    seen: Seen, copied: Path, tmp_path: Path, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    moving = Moving(buffer_bytes=MiB, queue_depth=4, backend="threads", copy_threads=1)
    rates = StorageRates(write_bytes_per_s=2 * 10**9, read_bytes_per_s=3 * 10**9)
    found = Profile(mount_of(str(seen.run)), moving, "today", (), rates)
    profiles.save(found, profiles.path_for(str(seen.run)))
    _, told = ask("report", seen.run, "--trace", seen.trace)
    assert told["limit_bytes_per_s"] == 2 * 10**9
    (level,) = told["levels"]
    assert level["read_limit_bytes_per_s"] == 3 * 10**9
    _, page = page_of(tmp_path, seen.run, "--trace", seen.trace)
    assert page.texts.count("of limit") == 2  # saves, and restores
    _, page = page_of(tmp_path, copied / "run", "--trace", copied / "trace.json")
    assert page.texts.count("of limit") == 2  # saves, and copies
    assert "1.86 GiB/s, reading 2.79 GiB/s" in page.texts


def test_several_ranks_a_golden_run_and_an_empty_one(
    shared: Path,
    golden: Path,
    tmp_path: Path,
) -> None:
    _, page = page_of(tmp_path, shared)
    assert "In step 7" in page.texts
    page_of(tmp_path, golden, "--verify")
    (tmp_path / "empty").mkdir()
    _, page = page_of(tmp_path, tmp_path / "empty", "--verify")
    assert "No step is committed in this run." in page.texts
    assert "not verified" in page.texts


def test_a_damaged_manifest_is_on_the_page(run: Path, tmp_path: Path) -> None:
    (run / "step-000000000002" / "manifest.json").write_text("{")
    _, page = page_of(tmp_path, run, code=1)
    assert {"1 damaged", "Damage", "manifest", "In step 1"} <= set(page.texts)


# -- what must not get in ------------------------------------------------------------------


def test_the_page_needs_nothing_else(seen: Seen, tmp_path: Path) -> None:
    text, page = page_of(tmp_path, seen.run, "--trace", seen.trace, "--verify")
    allowed = text.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
    assert re.findall(r"(?i)https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=", allowed) == []
    policy = next(a["content"] for n, a in page.elements if "http-equiv" in a) or ""
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert sum(name == "script" for name, _ in page.elements) == 1


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run, trace = hostile_run(tmp_path), hostile_trace(tmp_path)
    _, clean = page_of(tmp_path, hostile_run(tmp_path / "other"), "--verify", code=1)
    _, page = page_of(tmp_path, run, "--trace", trace, "--verify", code=1)
    for name in HOSTILE[:-1]:
        assert name in page.texts, name
    assert {name for name, _ in page.elements} - {"button", "output", "ul", "li", "text"} <= {
        name for name, _ in clean.elements
    }
    events = {a for _, attributes in page.elements for a in attributes if a.startswith("on")}
    assert events == set()
    assert not any("\u202e" in text or "\x1b" in text for text in page.texts)
    assert any(text.startswith(f"{run}, on ") for text in page.texts)


def test_text_cannot_become_markup() -> None:
    made = tag("td", "<b>", Markup("<i></i>"), 3, title="\"'<>&", data_x=None)
    assert made == '<td title="&quot;&#x27;&lt;&gt;&amp;">&lt;b&gt;<i></i>3</td>'


# -- traces --------------------------------------------------------------------------------


def test_events_that_are_not_well_formed_are_counted(tmp_path: Path) -> None:
    found = read_traces([str(hostile_trace(tmp_path))])
    assert found.left_out == 8
    assert found.saves == []
    assert found.restores == []


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), 1e308, 5e-324, 2**62, -1],
    ids=["long", "long below 0", "large", "small", "whole", "below 0"],
)
def test_numbers_that_nobody_measures_are_on_no_page(
    run: Path, tmp_path: Path, number: float
) -> None:
    """Some of them were a traceback."""
    path, events = tmp_path / "trace.json", []
    for kind in ("save", "restore", "copy"):
        names = ("bytes", "read_bytes", "written_bytes", "seconds", "committed_s", "blocked_s")
        for odd in names:
            facts = {**dict.fromkeys(names, 3), "step": 3, "event": kind, odd: number}
            about = {"pid": 0, "tid": 1, "ts": 7, "name": kind, "id": f"{kind} {odd}"}
            events += [{**about, "ph": "X", "dur": 5, "args": facts}]
            events += [{**about, "ph": "b", "args": facts}, {**about, "ph": "e", "args": {}}]
    path.write_text(json.dumps({"traceEvents": events}))
    _, page = page_of(tmp_path, run, "--trace", path)
    assert not any(text in ("inf", "nan") for text in page.texts)
    assert len(read_traces([str(path)]).saves) == 6


@pytest.mark.parametrize("text", ["", "{}", "7", '{"traceEvents": 7}', "[" * 100_000, "\x00"])
def test_what_is_no_trace_is_refused(
    text: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    code = main(["report", str(run), "--json", "--trace", str(path)])
    assert code == 2
    assert "not a trace" in capsys.readouterr().err


def test_a_long_trace_shows_its_end(tmp_path: Path) -> None:
    count = MARKS_MAX + 100
    about = {"ph": "X", "pid": 0, "tid": 1, "name": "stage", "dur": 1}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{**about, "ts": 10 * index} for index in range(count)]))
    found = read_traces([str(path)])
    (lane,) = found.lanes
    assert len(lane.marks) == MARKS_MAX
    assert lane.marks[-1].begin == 10 * (count - 1)
    assert found.left_out == 100


# -- the command ---------------------------------------------------------------------------


def test_it_has_to_know_where_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["report", str(run)])
    assert code == 2
    assert "-o report.html" in capsys.readouterr().err
    code = main(["report", str(run.parent / "nowhere"), "--json"])
    assert code == 3


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    code = main(["report", str(run), "-o", str(tmp_path / "nowhere" / "report.html")])
    assert code == 3
    monkeypatch.setattr(os, "replace", no_room)
    code = main(["report", str(run), "-o", str(page)])
    assert code == 4
    assert page.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["report.html"]


def test_no_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from statehold.cli import main; "
        f"code = main(['report', {str(run)!r}, '-o', {str(tmp_path / 'r.html')!r}, '--verify']); "
        "sys.exit(code or bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
