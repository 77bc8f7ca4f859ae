"""engine_state() on the real DeepSpeed: ZeRO-1, 2 and 3, killed, resumed, and cut anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from support.resumed import EXAMPLES, FRAMEWORKS, check, job, ran, same, three

SCRIPT = FRAMEWORKS / "zero_state.py"
STAGES = [1, 2, 3]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def done(folder: Path, codes: list[int]) -> None:
    logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
    assert set(codes) == {0}, logs


@pytest.mark.parametrize("stage", STAGES)
def test_the_example_goes_on_bit_for_bit(tmp_path: Path, stage: int) -> None:
    check(tmp_path, ran(three(EXAMPLES / "zero.py", tmp_path, stage, ranks=2)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("saved_by", STAGES)
def test_any_stage_on_any_number_of_ranks_has_the_same(
    tmp_path: Path, saved_by: int, stage: int
) -> None:
    run = tmp_path / "run"
    jobs = [job(SCRIPT, "load", stage, run, ranks=ranks) for ranks in (1, 2, 3)]
    done(tmp_path, ran([job(SCRIPT, "save", saved_by, run, ranks=2), *jobs]))
    saved = torch.load(run / "saved.pt", weights_only=True)
    assert (saved["counts"], saved["steps"], saved["global_steps"]) == ([3], [3.0], 3)
    for ranks in (1, 2, 3):
        assert same(torch.load(run / f"loaded-{stage}-{ranks}.pt", weights_only=True), saved)


@pytest.mark.parametrize("stage", STAGES)
def test_the_update_waits_until_the_save_is_staged(tmp_path: Path, stage: int) -> None:
    done(tmp_path, ran([job(SCRIPT, "gate", stage, tmp_path / "run", ranks=2)]))


@pytest.mark.parametrize("stage", STAGES)
def test_the_methods_of_an_engine_use_steps(tmp_path: Path, stage: int) -> None:
    done(tmp_path, ran([job(SCRIPT, "methods", stage, tmp_path / "run", ranks=2)]))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_no_step_would_hold_is_refused(tmp_path: Path, stage: int) -> None:
    done(tmp_path, ran([job(SCRIPT, "refused", stage, tmp_path / "run")]))
