"""A link to a run, or to a step, is as good as its directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import statehold
from statehold.cli import doctor, main
from support.faults import DEADLINE_S, SMALL


@pytest.fixture
def link(tmp_path: Path) -> Path:
    run, link = tmp_path / "run", tmp_path / "latest"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((8,), step)}).wait("committed", DEADLINE_S)
    link.symlink_to("run")
    return link


def test_readers_follow_a_link_to_a_run(link: Path) -> None:
    assert torch.equal(statehold.load(link)["w"], torch.full((8,), 2))
    assert torch.equal(statehold.load(f"{link}@1")["w"], torch.full((8,), 1))
    assert [step.step for step in statehold.open(link)] == [1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["ls", "show", "verify", "du", "doctor", "tree"])
def test_commands_follow_a_link_to_a_run(
    link: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The doctor also lists what other tests leave in memory, and that changes between two calls.
    monkeypatch.setattr(doctor, "left_behind", lambda fs, path: [])
    answers = []
    for place in (link, link.parent / "run"):
        answers.append((main([command, str(place)]), len(capsys.readouterr().out.splitlines())))
    assert answers[0] == answers[1]


def test_a_step_is_copied_by_a_link_to_it(link: Path, tmp_path: Path) -> None:
    step = tmp_path / "step"
    step.symlink_to(link / "step-000000000002")
    statehold.copy_step(step, tmp_path / "copy")
    assert torch.equal(statehold.load(tmp_path / "copy")["w"], torch.full((8,), 2))
