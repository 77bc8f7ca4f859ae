"""The example on several ranks, and the demo that loses one of them, with tiny sizes.

The demo test is the acceptance test of saving and restoring on ranks in small: a rank killed in the
middle of a save, the others told so, and the state brought back on as many ranks and on one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.llama import LLAMA, fork_jobs, imported

torch = pytest.importorskip("torch")
pytest.importorskip("statehold._core", reason="the native module is not built")

MODULES = (
    "config", "data", "demo", "differences", "display", "job", "journal", "model", "ranks",
    "report", "story", "story_ranks", "trainer"
)  # fmt: skip
SMALL = ("--dim=64", "--layers=2", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=12",
         "--threads=1")  # fmt: skip
in_campaigns = pytest.mark.skipif(
    os.environ.get("STATEHOLD_LOWRANK_DEMO") != "1", reason="STATEHOLD_LOWRANK_DEMO=1"
)


@pytest.fixture(scope="module")
def llama() -> Iterator[SimpleNamespace]:
    with imported(*MODULES) as modules:
        yield modules


def log(run: Path, records: list[dict[str, object]]) -> None:
    run.mkdir(parents=True)
    (run / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def state(step: int, checksum: str) -> dict[str, object]:
    return {"event": "state", "step": step, "sha256": checksum}


def trained(step: int, loss: float) -> dict[str, object]:
    return {"event": "step", "step": step, "loss": loss.hex(), "step_s": 0.1, "blocked_s": 0.0}


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, pytest.param(16, marks=in_campaigns)])
def test_the_demo_loses_a_rank_and_resumes_on_the_others(llama, tmp_path, monkeypatch, capfd, rank):
    """rank: of low-rank pairs; 0 for linear layers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    fork_jobs(monkeypatch)
    status = llama.demo.main(
        ["--ranks=2", "--steps=8", "--kill-at=2",
         "--out", str(tmp_path / "demo"), "--data", str(LLAMA), f"--low-rank={rank}", *SMALL]
    )  # fmt: skip
    said, errors = capfd.readouterr()
    assert status == 0, said + errors
    assert "2 ranks (FSDP 1 x TP 2)" in said
    assert "now SIGKILL" in said
    assert "lost ranks: [1]" in said
    assert "ranks did not arrive within" in said
    assert "the state restored on 2 is that of the reference" in said
    assert "the state restored on 1 is that of the reference" in said
    assert "equal the reference in every bit" in said

    options = {"out": tmp_path / "demo", "steps": 8, "kill_at": 2, "options": (), "ranks": 2}
    starts = list(llama.journal.read_events(tmp_path / "demo/run-on-1/log.jsonl", "start"))
    assert [each["ranks"] for each in starts] == [2, 1]
    demo = llama.story.Demo(**options)
    llama.story_ranks.compare_state(demo, demo.out / "run-on-1", 1, starts[1]["step"])


def test_another_state_is_noticed(llama, tmp_path):
    demo = llama.story.Demo(out=tmp_path, steps=4, kill_at=2, options=(), ranks=2)
    log(demo.reference, [state(0, "a"), state(1, "b")])
    log(demo.run, [state(0, "a"), state(1, "b"), state(1, "c")])
    with pytest.raises(llama.story.DemoError, match="is not the reference's"):
        llama.story_ranks.compare_state(demo, demo.run, 2, 1)


def test_differences_are_of_what_was_trained_after_the_restore(llama, tmp_path):
    log(tmp_path / "a", [trained(1, 5.0), trained(2, 4.0), trained(3, 3.0)])
    log(tmp_path / "b", [trained(1, 9.0), trained(2, 9.0), trained(2, 4.0), trained(3, 2.5)])
    found = llama.differences.difference("on 1", tmp_path / "a/log.jsonl", tmp_path / "b/log.jsonl")
    assert found.apart == {2: 0.0, 3: -0.5}
    assert str(found).startswith("on 1: 1 of 2 losses are equal bit for bit; the largest")
    lines = llama.differences.table([found]).splitlines()
    assert [line.split() for line in lines[1:]] == [["2", "4.000000", "="],
                                                    ["3", "3.000000", "-5.0e-01"]]  # fmt: skip


@pytest.mark.parametrize("ranks", range(2, 10))
def test_every_number_of_ranks_divides_the_batch(llama, tmp_path, ranks):
    demo = llama.story.Demo(out=tmp_path, steps=4, kill_at=2, options=(), ranks=ranks)
    batches = set()
    for size in {ranks, ranks - 1, 1}:
        options = llama.story_ranks.options(demo, demo.run, "train", size)
        config = llama.config.parse(options).config
        assert size % config.tp == 0
        assert config.batch % (size // config.tp) == 0
        batches.add(config.batch)
    assert len(batches) == 1


def test_a_run_too_short_to_settle_is_still_measured(llama):
    measured = llama.report.Measured([], [], [], starts=[0, 2])
    steps = [llama.journal.StepRecord(step, (1.0).hex(), 0.1, 0.0, None) for step in (1, 2, 3, 4)]
    assert measured.settled(steps, measured.starts) == steps
    assert [each.step for each in measured.settled(steps, [0])] == [3, 4]


def test_a_process_without_a_job_is_alone(llama, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with llama.ranks.joined(1, "cpu") as ranks:
        assert (ranks.rank, ranks.size, ranks.shares, str(ranks)) == (0, 1, 1, "1 process")
        batch = torch.zeros(3, 4), torch.ones(3, 4)
        assert ranks.share(batch) is batch
        assert ranks.mean(0.1) == 0.1


@pytest.mark.parametrize(("tp", "device"), [(2, "cpu"), (1, "cuda")])
def test_ranks_that_do_not_fit_are_refused(llama, monkeypatch, tp, device):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=f"tp = {tp}|{device}"), llama.ranks.joined(tp, device):
        pass
