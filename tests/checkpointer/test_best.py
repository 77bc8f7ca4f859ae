"""restore(best=...) and restore(tag=...): which step that is, on every rank, and beside damage."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import Checkpointer, Directory, Keep
from statehold.errors import CorruptionError, StepNotFoundError, UsageError
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.levels import settle
from support.ranks import Ranks

SAID: dict[int, dict[str, Any]] = {
    1: {"metrics": {"loss": 0.4, "acc": 0.2}, "tags": ["good"]},
    2: {"metrics": {"loss": 0.1, "acc": 0.4}},
    3: {"metrics": {"loss": 0.3, "acc": 0.9}, "tags": ["good", "warm"]},
    4: {"metrics": {"loss": math.nan}},
    5: {},
}


def state(step: int = 0) -> dict[str, Any]:
    return {"w": torch.full((3000,), step), "step": step}


def save_all(ckpt: Checkpointer, said: dict[int, dict[str, Any]] = SAID) -> None:
    for step, each in said.items():
        ckpt.save(step, state(step), **each).wait("committed", DEADLINE_S)
    settle(ckpt)


def restored(ckpt: Checkpointer, **asked: Any) -> int | None:
    live = state()
    step = ckpt.restore(live, **asked)
    assert live["step"] == step
    assert torch.equal(live["w"], torch.full((3000,), step))
    return step


def damage(run: Path, step: int, name: str = "rank-00000-of-00001.safetensors") -> None:
    path = run / f"step-{step:012d}" / name
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)


def test_the_best_step_by_a_metric_and_the_newest_with_a_tag(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt)
        assert restored(ckpt, best="loss") == 2
        assert restored(ckpt, best="loss", mode="max") == 1
        assert restored(ckpt, best="acc", mode="max") == 3
        assert restored(ckpt, tag="good") == 3
        assert restored(ckpt) == 5
        assert restored(ckpt, step=4) == 4


def test_the_mode_of_a_keep_that_names_the_metric_counts(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt)
    with Checkpointer(run, keep=Keep(best=9, metric="acc", mode="max"), **SMALL) as ckpt:
        assert restored(ckpt, best="acc") == 3
        assert restored(ckpt, best="acc", mode="min") == 1
        assert restored(ckpt, best="loss") == 2


def test_a_damaged_best_step_is_skipped_with_a_warning(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt)
    damage(run, 2)
    with Checkpointer(run, **SMALL) as ckpt:
        with pytest.warns(RuntimeWarning, match="step 2 is damaged; step 3 was restored instead"):
            assert restored(ckpt, best="loss") == 3
        assert (run / "step-000000000002.corrupt").is_dir()
        assert restored(ckpt, best="loss") == 3  # it was set aside
    damage(run, 3)
    with (
        Checkpointer(run, **SMALL) as ckpt,
        pytest.warns(RuntimeWarning, match="step 3 is damaged"),
    ):
        assert restored(ckpt, tag="good") == 1


def test_damage_of_all_that_could_be_meant_is_raised(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt)
    for step in (1, 2, 3):
        damage(run, step)
    with Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(CorruptionError) as caught:
            ckpt.restore(state(), best="loss")
        assert caught.value.facts["also damaged"] == "1, 2 (2 in all)"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert restored(ckpt) == 5


def test_a_manifest_that_cannot_be_read_is_told(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt)
    damage(run, 2, "manifest.json")
    with Checkpointer(run, **SMALL) as ckpt:
        assert restored(ckpt, best="loss") == 3
    assert "the manifest of step 2 cannot be read" in caplog.text


def test_what_nothing_has_is_not_found(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        for asked in ({"best": "loss"}, {"tag": "good"}):
            with pytest.raises(StepNotFoundError):
                ckpt.restore(state(), **asked)
        save_all(ckpt)
        with pytest.raises(StepNotFoundError, match="no step has a finite value") as caught:
            ckpt.restore(state(), best="los")
        assert caught.value.facts["there are"] == "acc, loss"
        with pytest.raises(StepNotFoundError, match="no step has this tag") as caught:
            ckpt.restore(state(), tag="bad")
        assert caught.value.facts["there are"] == "good, warm"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"step": 1, "best": "loss"}, "only one of step, best and tag"),
        ({"tag": "good", "best": "loss"}, "only one of step, best and tag"),
        ({"best": 7}, "best must be a name"),
        ({"tag": ""}, "tag must be a name"),
        ({"best": "loss", "mode": "low"}, "not a valid mode"),
        ({"mode": "min"}, "mode is for best"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Path, asked: dict[str, Any], words: str) -> None:
    with Checkpointer(run, **SMALL) as ckpt, pytest.raises(UsageError, match=words):
        ckpt.restore(state(), **asked)


def test_all_ranks_restore_the_same_best_step() -> None:
    fs = SimFs(seed=1)
    with Ranks(fs, 2) as ranks:
        for step, each in SAID.items():
            handles = ranks.each(
                lambda rank, step=step, each=each: ranks.ckpts[rank].save(step, state(step), **each)
            )
            for handle in handles:
                handle.wait("committed", DEADLINE_S)
        assert ranks.each(lambda rank: restored(ranks.ckpts[rank], best="loss")) == [2, 2]
        assert ranks.each(lambda rank: restored(ranks.ckpts[rank], tag="warm")) == [3, 3]
        found = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(state(), best="nothing"))
        assert isinstance(found[0], StepNotFoundError)
        assert isinstance(found[1], statehold.errors.PeerFailedError)


def test_the_best_step_is_found_at_a_far_level(run: Path, tmp_path: Path) -> None:
    far = Directory(path=tmp_path / "far", name="far")
    with Checkpointer(run, levels=[Directory(keep=1), far], **SMALL) as ckpt:
        for step, each in SAID.items():
            save_all(ckpt, {step: each})
        assert sorted(int(each.name[5:]) for each in run.glob("step-*")) == [5]
        assert restored(ckpt, best="loss") == 2


def test_commands_and_load_name_a_step_by_what_it_says(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from statehold.cli import main

    with Checkpointer(run, **SMALL) as ckpt:
        save_all(ckpt)
    for name, step in {"best:loss": 2, "best:acc,max": 3, "best:acc,min": 1, "tag:warm": 3}.items():
        assert statehold.load(f"{run}@{name}", "step") == step
        assert main(["verify", f"{run}@{name}"]) == 0
        assert f"step {step}" in capsys.readouterr().out
    assert main(["diff", f"{run}@best:loss", "@tag:warm"]) == 1
    capsys.readouterr()
    assert main(["show", f"{run}@best:nothing"]) == 3
    assert "there are  acc, loss" in capsys.readouterr().err
