"""`make demo REPLICAS=4` in small, and what its checks have to find.

With STATEHOLD_REPLICAS_DEMO=1 it runs as people see it, too, in a minute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import scripts
from support.llama import LLAMA, fork_jobs, imported

torch = pytest.importorskip("torch")
pytest.importorskip("statehold._core", reason="the native module is not built")

MODULES = ("data", "demo", "report_replicas", "story", "story_replicas")
# A busy machine is no hang, so the lease is long: the one replica that hangs takes as long.
TINY = ("--dim=32", "--layers=2", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=2",
        "--threads=1", "--lease-s=4")  # fmt: skip
STEPS, KILL_AT, HANG_AT = 12, 2, 6
FULL = os.environ.get("STATEHOLD_REPLICAS_DEMO") == "1"


@pytest.fixture(scope="module")
def llama() -> Iterator[SimpleNamespace]:
    with imported(*MODULES) as modules:
        yield modules


@pytest.mark.thorough
def test_replicas_die_and_hang_and_come_back(llama, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    fork_jobs(monkeypatch)
    options = ("--data", str(LLAMA), *TINY)
    out = tmp_path / "demo"
    llama.story_replicas.carry_out(
        llama.story.Demo(out=out, steps=STEPS, kill_at=KILL_AT, options=options, replicas=4)
    )
    said = capfd.readouterr().out
    assert "replica 3 is out: the lease of its rank 0 has ended (4.0 s)" in said
    assert f"replica 0: {STEPS} losses and states equal the reference in every bit" in said
    assert f"{STEPS * 12 * 2} samples counted, 0 lost, 0 repeated" in said
    assert (out / "timeline.png").stat().st_size > 10_000

    run = tmp_path / "demo/run"
    struck = [(each["replica"], each["signal"], each["step"])
              for each in llama.report_replicas.struck(run)]  # fmt: skip
    assert struck == [(1, "SIGKILL", KILL_AT), (2, "SIGKILL", KILL_AT), (3, "SIGSTOP", HANG_AT)]
    replicas = llama.report_replicas.read(run)
    shares = [len(replicas[0].steps[step]["share"]) for step in (1, KILL_AT, HANG_AT, STEPS)]
    assert shares == [3, 6, 12, 4]
    assert HANG_AT not in replicas[3].steps
    assert not {KILL_AT, HANG_AT} & {step for each in replicas[1:3] for step in each.steps}


@pytest.mark.skipif(not FULL, reason="STATEHOLD_REPLICAS_DEMO=1")
def test_the_demo_as_people_see_it(tmp_path):
    words = [LLAMA / "demo.py", "--replicas", "4", "--out", tmp_path / "demo"]
    done = scripts.run(words, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two came back; equal bit for bit" in done.stdout


# -- what the checks find --------------------------------------------------------------------


def written(run: Path, number: int, shares: dict[int, list[int]]) -> None:
    """The log of a replica that has computed its shares of steps."""
    run.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    for step, share in shares.items():
        records += [
            {"event": "microbatch", "step": step, "index": index, "samples": [100 * step + index],
             "began": 0.0, "ended": 1.0}
            for index in share
        ]  # fmt: skip
        records += [
            {"event": "state", "step": step, "sha256": f"state {step}"},
            {"event": "step", "step": step, "loss": (1.0 / step).hex(), "step_s": 0.1,
             "blocked_s": 0.0, "share": share, "at": 1.0},
        ]  # fmt: skip
    log = run / f"replica-{number}.jsonl"
    log.write_text("".join(json.dumps(each) + "\n" for each in records))


@pytest.fixture
def demo(llama, tmp_path):
    """Two steps of twelve microbatches: of one replica alone, and of four, one of them lost."""
    found = llama.story.Demo(out=tmp_path, steps=2, kill_at=2, options=(), replicas=4)
    written(found.reference, 0, {step: list(range(12)) for step in (1, 2)})
    for number in range(4):
        share = list(range(3 * number, 3 * number + 3))
        more = [] if number == 3 else [9 + number]
        written(found.run, number, {1: share} if number == 3 else {1: share, 2: share + more})
    return found


def changed(log: Path, change: Callable[[dict[str, Any]], None]) -> None:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for each in records:
        change(each)
    log.write_text("".join(json.dumps(each) + "\n" for each in records))


def test_counts_of_a_run_without_defects(llama, demo, capsys):
    llama.story_replicas.check(demo)
    assert "24 samples counted, 0 lost, 0 repeated" in capsys.readouterr().out
    timeline = llama.report_replicas.timeline(demo.run).splitlines()
    assert [line.split() for line in timeline[:-1]] == [
        ["step", "1", "2"],
        *[["replica", str(number), "3", "4"] for number in range(3)],
        ["replica", "3", "3", "."],
    ]


DEFECTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a microbatch that is lost": (
        lambda each: each.get("share", []) and each["share"].pop(), "each microbatch once"
    ),
    "a microbatch that is counted twice": (
        lambda each: each["share"].append(0) if each["event"] == "step" else None,
        "each microbatch once",
    ),
    "other samples": (
        lambda each: each.update(samples=[7]) if each["event"] == "microbatch" else None,
        "samples are not those",
    ),
    "a microbatch that was not computed": (
        lambda each: each.update(event="") if each["event"] == "microbatch" else None,
        "samples are not those",
    ),
    "a loss": (
        lambda each: each.update(loss="0x1.8p+0") if each["event"] == "step" else None,
        "losses differ",
    ),
    "a state": (
        lambda each: each.update(sha256="x") if each["event"] == "state" else None, "other states"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(llama, demo, name):
    change, says = DEFECTS[name]
    changed(demo.run / "replica-1.jsonl", change)
    with pytest.raises(llama.story.DemoError, match=says):
        llama.story_replicas.check(demo)


def test_a_replica_that_does_not_come_back_is_noticed(llama, demo):
    with pytest.raises(llama.story.DemoError, match="replica 3 does not take part"):
        llama.story_replicas.check_returns(demo)


def test_gradients_of_before_the_hang_are_noticed(llama, tmp_path):
    demo = llama.story.Demo(out=tmp_path, steps=7, kill_at=2, options=(), replicas=4)
    for number in range(5):
        written(demo.run, number, {step: [number] for step in (6, 7)})
    with pytest.raises(llama.story.DemoError, match="with the gradients of step 6"):
        llama.story_replicas.check_returns(demo)


def test_numbered_windows_are_those_to_train_on(llama):
    loader = llama.data.TextLoader(bytes(range(256)) * 4, seq=8, batch=2, seed=0)
    tokens, targets = loader.numbered([0, loader.windows - 1])
    assert tokens.shape == targets.shape == (2, 8)
    assert tokens[0].tolist() == list(range(8))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    held_out = [batch[0] for batch in loader.validation(100)]
    assert not any(torch.equal(tokens[1], row) for batch in held_out for row in batch)


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--replicas", "3"], "at least 4"), (["--replicas", "4", "--ranks", "2"], "of their own")],
)
def test_a_demo_that_cannot_be_is_refused(llama, capsys, words, says):
    with pytest.raises(SystemExit):
        llama.demo.parse(words)
    assert says in capsys.readouterr().err


def test_too_few_steps_are_refused(llama, tmp_path):
    demo = llama.story.Demo(out=tmp_path, steps=8, kill_at=2, options=(), replicas=4)
    with pytest.raises(llama.story.DemoError, match="the story takes 12"):
        llama.story_replicas.carry_out(demo)
