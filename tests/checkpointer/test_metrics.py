"""What a step says of itself: metrics and tags, as save() gets them and as everybody finds them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statehold
from statehold import Checkpointer, Directory
from statehold.cli import main
from statehold.errors import UsageError
from support.faults import DEADLINE_S, SMALL


def save(run: Path, **steps: dict[str, Any]) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        for name, said in steps.items():
            ckpt.save(int(name[1:]), {"x": torch.ones(3)}, **said).wait("committed", DEADLINE_S)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_step_says_what_save_was_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"val_loss": 2.1, "tokens": 10**9, "ratio": np.float32(0.5), "bad": math.nan}
    save(run, s1={"metrics": metrics, "tags": ["before-lr-drop", "good", "good"]}, s2={})
    steps = statehold.open(run)
    assert steps[1].metrics.keys() == metrics.keys()
    assert math.isnan(steps[1].metrics["bad"])
    assert [steps[1].metrics[name] for name in ("val_loss", "tokens", "ratio")] == [2.1, 1e9, 0.5]
    assert steps[1].tags == ("before-lr-drop", "good")
    assert (steps[2].metrics, steps[2].tags) == ({}, ())
    assert (steps[1].version, steps[2].version) == (5, 1)
    expected = {"val_loss": 2.1, "tokens": 1e9, "ratio": 0.5, "bad": "nan"}
    for found in (answer(capsys, "ls", run)["steps"][0], answer(capsys, "show", f"{run}@1")):
        assert found["metrics"] == expected
        assert found["tags"] == ["before-lr-drop", "good"]
    words = "val_loss=2.1 tokens=1e+09 ratio=0.5 bad=nan #before-lr-drop #good"
    assert main(["show", f"{run}@1"]) == 0
    assert words in capsys.readouterr().out
    assert main(["ls", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()[1].split()
    assert said[2:8] == ["2.1", "1e+09", "0.5", "nan", "#before-lr-drop", "#good"]
    assert main(["report", str(run), "-o", str(run / "page.html")]) == 0
    assert "<td>2.1</td>" in (run / "page.html").read_text()


def test_tree_shows_the_newest_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, s1={"metrics": {"a": 1.0}}, s2={"metrics": {"b": 2.0}, "tags": ["t"]})
    assert main(["tree", str(run.parent)]) == 0
    assert "b=2 #t" in capsys.readouterr().out


def test_a_fork_says_what_its_base_said(run: Path, tmp_path: Path) -> None:
    save(run, s1={"metrics": {"a": 1.0}, "tags": ["t"]})
    assert main(["fork", f"{run}@1", str(tmp_path / "child")]) == 0
    child = statehold.open(tmp_path / "child")[1]
    assert (child.metrics, child.tags) == ({"a": 1.0}, ("t",))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"metrics": [1.0]}, "metrics must be a dict"),
        ({"metrics": {"": 1.0}}, "metrics need names"),
        ({"metrics": {7: 1.0}}, "metrics need names"),
        ({"metrics": {"a\nb": 1.0}}, "metrics need names"),
        ({"metrics": {"a" * 201: 1.0}}, "metrics need names"),
        ({"metrics": {str(i): 1.0 for i in range(1001)}}, "too many metrics"),
        ({"metrics": {"a": "1.0"}}, "a metric is not a number"),
        ({"metrics": {"a": True}}, "a metric is not a number"),
        ({"metrics": {"a": None}}, "a metric is not a number"),
        ({"metrics": {"a": 10**400}}, "a metric is too large for a float"),
        ({"metrics": {"a": torch.tensor(1.0)}}, "pass value.item()"),
        ({"tags": "good"}, "tags must be a list"),
        ({"tags": {"good"}}, "tags must be a list"),
        ({"tags": [""]}, "tags need names"),
        ({"tags": [1]}, "tags need names"),
        ({"tags": ["\ud800"]}, "tags need names"),
    ],
)
def test_what_cannot_be_said_is_refused_before_anything_is_saved(
    run: Path, said: dict[str, Any], words: str
) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(UsageError) as caught:
            ckpt.save(1, {"x": 1}, **said)
        assert words in str(caught.value)
        assert ckpt.steps() == []
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1]


def test_the_most_that_can_be_said_can_be_read(run: Path) -> None:
    names = [f"{i:04d}" + "ü" * 196 for i in range(1000)]
    save(run, s1={"metrics": dict.fromkeys(names, 1.5), "tags": names})
    found = statehold.open(run)[1]
    assert (list(found.metrics), list(found.tags)) == (names, names)


def test_a_metric_that_comes_later_is_told_by_saving_the_step_again(run: Path) -> None:
    with Checkpointer(run, levels=[Directory(every=10)], **SMALL) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        assert ckpt.save(2, {"x": 2}, metrics={"loss": 0.5}).is_skipped
        again = ckpt.save(1, {"x": 1}, metrics={"loss": 0.5}, force=True)
        again.wait("committed", DEADLINE_S)
        assert statehold.open(run)[1].metrics == {"loss": 0.5}
