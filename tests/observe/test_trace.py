"""The trace of real saves and restores: stages in order, nested, bounded, and valid JSON."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import statehold
from observe.conftest import Seen
from statehold.errors import StorageError, UsageError
from statehold.observe.tracing import Trace
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.ranks import Ranks
from support.training import Training

Events = list[dict[str, Any]]


def spans(events: Events, **about: Any) -> Events:
    """The spans whose facts are these, in order."""
    return [
        each
        for each in events
        if each["ph"] == "X" and about.items() <= each["args"].items()
    ]  # fmt: skip


def names(events: Events) -> list[str]:
    return [each["name"] for each in events]


def end(span: dict[str, Any]) -> int:
    return span["ts"] + span["dur"]


def named(events: Events, name: str) -> dict[str, Any]:
    (found,) = [each for each in events if each["name"] == name]
    return found


def test_the_stages_of_a_save_are_there_and_in_order(seen: Seen) -> None:
    saving = [each for each in seen.events if each["ph"] == "X"]
    begin = next(i for i, each in enumerate(saving) if each["args"].get("step") == 2)
    of_two = [each for each in saving[begin:] if each["args"].get("step") == 2]
    assert names(of_two)[:4] == ["save()", "wait", "capture", "plan"]
    stage, write = named(of_two, "stage"), named(of_two, "write")
    commit, retain = named(of_two, "commit"), named(of_two, "retain")
    assert named(of_two, "plan")["ts"] <= stage["ts"]
    assert end(named(of_two, "open")) <= write["ts"]
    assert end(write) <= commit["ts"]
    assert end(stage) <= commit["ts"]
    assert end(commit) <= retain["ts"]


def test_the_stages_of_a_restore_are_there_and_in_order(seen: Seen) -> None:
    restore = named(seen.events, "restore")
    inside = [
        each
        for each in seen.events
        if each["ph"] == "X" and each["tid"] == restore["tid"] and each["ts"] >= restore["ts"]
    ]
    expected = ["restore", "discover", "plan", "open", "read", "verify", "values"]
    assert names(inside) == expected
    assert restore["args"]["step"] == 3
    assert restore["args"]["read_bytes"] > 0


def test_spans_of_a_thread_nest(seen: Seen) -> None:
    threads = {each["tid"] for each in seen.events if each["ph"] == "X"}
    assert len(threads) == 3  # the trainer's, stage, commit
    for thread in threads:
        above: Events = []
        for span in (each for each in spans(seen.events) if each["tid"] == thread):
            while above and end(above[-1]) <= span["ts"]:
                above.pop()
            assert not above or end(span) <= end(above[-1]), span
            above.append(span)


def test_the_engine_is_in_it(seen: Seen) -> None:
    for step in (1, 2, 3):
        of_step = [each for each in seen.events if each.get("id") == f"save {step}"]
        begins = {each["name"]: each for each in of_step if each["ph"] == "b"}
        ends = {each["name"]: each for each in of_step if each["ph"] == "e"}
        assert begins.keys() == ends.keys() == {"save", "copy", "transfer"}
        whole = begins["save"]["args"]
        assert whole["step"] == step
        assert whole["written_bytes"] == begins["copy"]["args"]["bytes"] > 0
        for name in ("copy", "transfer"):
            assert begins["save"]["ts"] <= begins[name]["ts"] <= ends[name]["ts"]
            assert ends[name]["ts"] <= ends["save"]["ts"]


def test_threads_have_names(seen: Seen) -> None:
    lanes = {e["tid"]: e["args"]["name"] for e in seen.events if e["name"] == "thread_name"}
    (commit,) = {each["tid"] for each in seen.events if each["name"] == "commit"}
    assert lanes[commit].startswith("statehold-commit")
    assert lanes.keys() == {each["tid"] for each in seen.events if each["ph"] == "X"}


def test_a_failed_save_is_in_it(tmp_path: Path) -> None:
    fs = SimFs(1)
    training = Training()
    ckpt = checkpointer_on(fs, "/run", trace=tmp_path / "t.json", **SMALL)
    fs.fail_next("rename", 5)
    save = ckpt.save(1, training.state)
    with pytest.raises(StorageError):
        save.wait("committed", DEADLINE_S)
    ckpt.close()
    assert fs.fired["injected"] == 1
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    failed = [e for e in told if e["name"] == "failed save" and e["ph"] == "b"]
    assert [e["args"]["step"] for e in failed] == [1]
    assert named(told, "commit")["args"] == {"step": 1, "error": "StorageError"}


def test_each_rank_has_a_file(tmp_path: Path) -> None:
    states = [Training(rank) for rank in range(2)]
    with Ranks(SimFs(1), 2, trace=tmp_path / "trace.json") as ranks:
        ranks.save(1, lambda rank: {"model": states[rank].model})
        ranks.each(lambda rank: ranks.ckpts[rank].restore({"model": states[rank].model}))
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "trace.rank-00000.json",
        "trace.rank-00001.json",
    ]
    for rank in range(2):
        document = json.loads((tmp_path / f"trace.rank-{rank:05d}.json").read_text())
        assert document["otherData"] == {"rank": rank, "ranks": 2, "dropped_events": 0}
        events = document["traceEvents"]
        assert {each["pid"] for each in events} == {rank}
        commit = named(events, "commit")
        inner = {"seal", "arrive"} | ({"gather", "publish"} if rank == 0 else {"wait for rank 0"})
        for name in inner:
            inside = named(events, name)
            assert commit["ts"] <= inside["ts"] <= end(inside) <= end(commit)
        assert ("retain" in names(events)) == (rank == 0)


def test_written_on_request(tmp_path: Path) -> None:
    training = Training()
    with statehold.Checkpointer(tmp_path / "run", trace=tmp_path / "a", **SMALL) as ckpt:
        ckpt.save(1, training.state).wait("committed", DEADLINE_S)
        written = ckpt.write_trace(tmp_path / "b")
        assert written == str(tmp_path / "b")
        assert "commit" in names(json.loads(Path(written).read_text())["traceEvents"])
        with pytest.raises(StorageError) as caught:
            ckpt.write_trace(tmp_path / "nowhere" / "b")
        assert caught.value.path == str(tmp_path / "nowhere" / "b")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b", "run"]


def test_off_is_off(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, Training().state)
        with pytest.raises(UsageError, match="records no trace"):
            ckpt.write_trace(tmp_path / "trace")
    for wrong in ("", 7, True, b"trace"):
        with pytest.raises(UsageError, match="trace must be the path"):
            statehold.Checkpointer(tmp_path / "run", trace=wrong)


def test_a_trace_that_cannot_be_written_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "nowhere" / "trace.json"
    where.parent.mkdir()
    with statehold.Checkpointer(tmp_path / "run", trace=where, **SMALL) as ckpt:
        ckpt.save(1, Training().state)
        where.parent.rmdir()
        log = inside(ckpt).watch.log
    log.flush()
    assert "cannot write the trace" in caplog.text
    assert str(where) in caplog.text


def test_memory_is_bounded_and_what_was_dropped_is_told() -> None:
    trace = Trace(events_max=100)
    for index in range(1000):
        with trace.span("stage", step=index):
            pass
    document = trace.document()
    # In no order: two of these may begin in the same microsecond.
    steps = {each["args"]["step"] for each in spans(document["traceEvents"])}
    assert steps == set(range(900, 1000))
    assert document["otherData"]["dropped_events"] == 900


def test_threads_may_trace_at_once() -> None:
    trace = Trace()

    def work(index: int) -> None:
        for step in range(200):
            with trace.span("outer", step=step, who=index), trace.span("inner"):
                pass

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for each in workers:
        each.start()
    documents = [trace.document() for _ in range(20)]  # while they are at it
    for each in workers:
        each.join()
    assert len(spans(trace.document()["traceEvents"])) == 4 * 200 * 2
    for document in documents:
        stamps = [each["ts"] for each in document["traceEvents"] if "ts" in each]
        assert all(a <= b for a, b in pairwise(stamps))


def test_a_span_tells_of_the_error_it_ended_with() -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.span("plan", step=1):
        raise KeyError("x")
    (span,) = spans(trace.document()["traceEvents"])
    assert span["args"] == {"step": 1, "error": "KeyError"}
