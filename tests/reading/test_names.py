"""One grammar of names: each function and command means the same step by the same text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.cli import codes, main
from statehold.cli.output import emit
from statehold.errors import StepNotFoundError, UsageError
from statehold.kv import follow
from statehold.options.paths import NamedStep, check_run, named_step
from support.faults import DEADLINE_S, SMALL
from support.levels import save

NAMES = {
    "RUN": 3,
    "RUN@newest": 3,
    "RUN@2": 2,
    "RUN@best:val": 2,
    "RUN@best:val,max": 3,
    "RUN@tag:first": 1,
    "RUN/step-000000000002": 2,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        for step, value in ((1, 5.0), (2, 1.0), (3, 9.0)):
            tags = ["first"] if step == 1 else []
            state = {"w": torch.full((4,), step)}
            ckpt.save(step, state, metrics={"val": value}, tags=tags).wait("committed", DEADLINE_S)
    return tmp_path / "run"


def by_load(name: str, _: Path) -> int:
    return int(statehold.load(name, "w")[0])


def by_source(name: str, folder: Path) -> int:
    with statehold.Checkpointer(folder / "other", **SMALL) as ckpt:
        return ckpt.restore({"w": torch.zeros(4, dtype=torch.int64)}, source=name) or 0


def by_parent(name: str, folder: Path) -> int:
    with statehold.Checkpointer(folder / "child", parent=name, **SMALL) as ckpt:
        return ckpt.restore({"w": torch.zeros(4, dtype=torch.int64)}) or 0


def by_fork(name: str, folder: Path) -> int:
    assert main(["fork", name, str(folder / "forked")]) == 0
    return statehold.open(folder / "forked").steps()[0]


def by_copy(name: str, folder: Path) -> int:
    assert main(["copy", name, str(folder / "copied")]) == 0
    return statehold.open(folder / "copied").steps()[0]


@pytest.mark.thorough
@pytest.mark.parametrize("read", [by_load, by_source, by_parent, by_fork, by_copy])
def test_one_name_means_one_step(
    run: Path, tmp_path: Path, read: Callable[[str, Path], int]
) -> None:
    for index, (name, step) in enumerate(NAMES.items()):
        assert read(name.replace("RUN", str(run)), tmp_path / str(index)) == step, name


def test_metrics_and_tags_may_have_slashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            said: Any = {"metrics": {"val/loss": -step}, "tags": [f"exp/{step}"]}
            ckpt.save(step, {"w": torch.full((4,), step)}, **said).wait("committed", DEADLINE_S)
    names = {"best:val/loss": 2, "best:val/loss,max": 1, "tag:exp/1": 1, "tag:exp/2": 2}
    for name, step in names.items():
        assert by_load(f"{run}@{name}", tmp_path) == step
        assert by_source(f"{run}@{name}", tmp_path) == step
        assert main(["diff", f"{run}@{step}", f"@{name}"]) == codes.YES
        with pytest.raises(UsageError, match="called like a step"):
            statehold.Checkpointer(f"{run}@{name}", **SMALL)
    monkeypatch.chdir(tmp_path)
    assert by_load("run@tag:exp/1", tmp_path) == 1


def test_a_slash_of_a_path_is_none_of_a_metric(tmp_path: Path) -> None:
    for name in ("x@best:loss", "y"):
        os.mkdir(tmp_path / name)
    for text in (f"{tmp_path}/x@best:loss/run", f"{tmp_path}/z@tag:a/run"):  # not there yet
        assert named_step(text) == NamedStep(text)
        assert named_step(f"{text}@8") == NamedStep(text, 8)
        assert check_run(text) == text
    os.mkdir(tmp_path / "x")
    text = f"{tmp_path}/x@best:loss/run"
    assert named_step(text) == NamedStep(text)
    assert named_step(f"{tmp_path}/y@best:loss/1") == NamedStep(f"{tmp_path}/y", best="loss/1")


def test_a_name_that_exists_is_not_cut(tmp_path: Path) -> None:
    old = tmp_path / "x@best:loss"  # older than the grammar
    os.mkdir(old)
    assert named_step(f"{old}") == NamedStep(f"{old}")
    assert named_step(f"{old}@1") == NamedStep(f"{old}", 1)
    assert named_step(f"{tmp_path}/y@best:loss@1") == NamedStep(f"{tmp_path}/y", best="loss@1")
    with statehold.Checkpointer(old, **SMALL) as ckpt:
        save(ckpt, 1, {"w": torch.ones(4)})
    assert statehold.load(f"{old}", "w").sum() == 4
    assert statehold.load(f"{old}@1", "w").sum() == 4
    assert statehold.load(old, "w", step=1).sum() == 4


@pytest.mark.parametrize("beside", ["run", "empty", "file"])
def test_a_step_that_is_given_by_its_number_is_never_looked_for_by_a_name(
    run: Path, tmp_path: Path, beside: str
) -> None:
    for name in ("run@2", "run@newest"):
        if beside == "file":
            (tmp_path / name).touch()
            continue
        os.mkdir(tmp_path / name)
        if beside == "run":
            with statehold.Checkpointer(tmp_path / name, **SMALL) as ckpt:
                save(ckpt, 100, {"w": torch.full((4,), 100.0)})
    assert statehold.load(run, "w", step=2)[0] == 2
    opened = statehold.open(run)
    assert (opened[2].step, opened[2].load("w")[0]) == (2, 2)
    assert [each.step for each in opened] == [1, 2, 3]
    newest = opened.newest()
    assert newest is not None
    assert newest.step == 3
    assert main(["diff", f"{run}@3", "@2"]) == codes.NO
    if beside == "file":  # it is no run, so the name of a step is not its path
        assert by_load(f"{run}@2", tmp_path) == 2


def test_digits_of_other_scripts_name_no_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="not the name of a step"):
        statehold.load(f"{run}@\u0662", "w")
    os.mkdir(run / "step-00000000000\u0664")
    assert statehold.open(run).steps() == [1, 2, 3]
    for given in ("\u0663", "1_0", " 3"):
        with pytest.raises(SystemExit):
            main(["prune", str(run), "--keep", given])
        assert "not a whole number" in capsys.readouterr().err


def test_a_number_too_large_is_told_as_such(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prune", str(run), "--keep", "9" * 19])
    assert "of up to 18 digits" in capsys.readouterr().err


def test_a_source_that_is_not_there_is_told_as_such(run: Path, tmp_path: Path) -> None:
    with (
        statehold.Checkpointer(tmp_path / "new", **SMALL) as ckpt,
        pytest.raises(StepNotFoundError, match="no such directory"),
    ):
        ckpt.restore({"w": torch.ones(4)}, source=tmp_path / "typo")


@pytest.mark.parametrize("name", ["x@1", "x@newest", "x@best:loss", "x@tag:good"])
def test_no_new_run_is_called_like_a_step(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="the run is called like a step"):
        statehold.Checkpointer(tmp_path / name, **SMALL)
    for follows in (follow, lambda path: statehold.subscribe(path, {"w": torch.ones(4)})):
        with pytest.raises(UsageError, match="the run is called like a step"):
            follows(tmp_path / name)
    for command in ("copy", "fork"):
        assert main([command, f"{run}@1", str(tmp_path / name)]) == 2
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["run\udcff", "run\0"])
def test_a_name_that_is_not_utf8_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = f"{tmp_path}/{name}"
    for use in (
        lambda: statehold.Checkpointer(path, **SMALL),
        lambda: statehold.load(path, "w"),
        lambda: statehold.open(path),
        lambda: statehold.subscribe(path, {"w": torch.ones(4)}),
    ):
        with pytest.raises(UsageError, match="not UTF-8, or has NUL"):
            use()
    for command in ("ls", "show", "verify", "free"):
        assert main([command, path]) == 2
        assert "not UTF-8" in capsys.readouterr().err


def test_control_characters_of_terminals_are_refused_and_never_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for tag in ("a\x85b", "a\x9bb"):
            with pytest.raises(UsageError, match="none of them a control character"):
                ckpt.save(4, {"w": torch.ones(4)}, tags=[tag])

    emit({"tag": "a\x85\u2028b"}, indent=None)
    said = capsys.readouterr().out
    assert said == '{"tag": "a\\u0085\\u2028b"}\n'
    assert json.loads(said) == {"tag": "a\x85\u2028b"}


def test_a_step_that_is_a_link_is_named(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "step-000000000003"
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        assert ckpt.restore({"w": torch.zeros(4, dtype=torch.int64)}) == 2
    assert f"{run}/{name} is a link or a file, so it does not count as a step" in caplog.text


def test_stray_names_that_are_not_utf8_hide_no_step(tmp_path: Path) -> None:
    run, state = tmp_path / "run", {"w": torch.ones(3)}
    with statehold.Checkpointer(run, keep=2) as ckpt:
        ckpt.save(1, state)
    for stray in (b"note-\xff\xfe", b"step-000000000001/note-\xff"):
        with open(os.path.join(os.fsencode(run), stray), "wb"):
            pass
    assert statehold.open(run).steps() == [1]
    with statehold.Checkpointer(run, keep=2) as ckpt:
        restored = ckpt.restore(state)
        assert restored == 1
        for step in range(2, 6):  # the step with the stray file goes, and its files are deleted
            ckpt.save(step, state)
        ckpt.flush()
        assert ckpt.steps() == [4, 5]
    assert main(["ls", str(run), "--json"]) == 0
