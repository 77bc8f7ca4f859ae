"""Which runs began from which, what they share, and the commands that say so."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.cli import main
from statehold.lineage.family import family
from statehold.reading.sizes import sizes, sizes_of_steps
from support.faults import DEADLINE_S, SMALL
from support.runs import write_step
from support.sharing import Tuned

pytestmark = pytest.mark.usefixtures("small_shared_files")


def save(run: Path, *steps: int, model: Tuned | None = None) -> None:
    model = model or Tuned()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in steps:
            ckpt.gate()
            model.train_once()
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def on_storage(*folders: Path) -> int:
    """What du says: the bytes of files, each once."""
    found = {
        (each.stat().st_dev, each.stat().st_ino): each.stat().st_size
        for folder in folders
        for each in folder.rglob("*")
        if each.is_file()
    }
    return sum(found.values())


def test_sizes_count_a_file_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "own").write_bytes(bytes(10))
    (one / "shared").write_bytes(bytes(100))
    os.link(one / "shared", two / "shared")
    os.link(one / "shared", two / "again")
    alone = sizes([str(one)])
    assert (alone.bytes, alone.own_bytes, alone.shared_bytes, alone.files) == (110, 10, 100, 2)
    both = sizes([str(one), str(two)])
    assert (both.bytes, both.own_bytes, both.files) == (110, 110, 2)
    assert sizes([str(one)], [str(two)]).own_bytes == 110
    assert sizes([str(two)], [str(two)]).own_bytes == 0, "a name counts once"


def test_steps_share_and_prune_frees_what_nobody_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save(run, 1, 2, 3)
    found = answer(capsys, "du", run)
    assert found["bytes"] == on_storage(run)
    assert found["shared_bytes"] == 0
    for step in found["steps"]:
        assert step["shared_bytes"] > step["own_bytes"] > 0
    plan = answer(capsys, "prune", run, "--keep", "1")
    before = on_storage(run)
    answer(capsys, "prune", run, "--keep", "1", "--yes")
    assert plan["bytes"] == before - on_storage(run) > 0
    assert main(["verify", str(run)]) == 0


def test_the_files_of_a_live_job_are_its_own(tmp_path: Path) -> None:
    run, model = tmp_path / "run", Tuned()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"model": model}).wait("committed", DEADLINE_S)
        assert (run / ".shared").is_dir()
        step = sizes_of_steps(str(run), [f"{run}/step-000000000001"])
        assert step.own_bytes == step.bytes


def test_a_family_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "base", 1, 2)
    assert main(["fork", f"{tmp_path / 'base'}@1", str(tmp_path / "sweep" / "a")]) == 0
    assert main(["fork", f"{tmp_path / 'base'}", str(tmp_path / "sweep" / "b")]) == 0
    assert main(["fork", f"{tmp_path / 'sweep' / 'a'}", str(tmp_path / "c")]) == 0
    save(tmp_path / "sweep" / "a", 3)
    assert drawn(capsys, tmp_path) == ["base", "├── sweep/a", "│   └── c", "└── sweep/b"]
    found = {Path(each["run"]).name: each for each in answer(capsys, "tree", tmp_path)["runs"]}
    assert found["a"]["steps"] == [1, 3]
    assert found["a"]["parent"]["step"] == 1
    assert found["b"]["base"] == str(tmp_path / "base")
    assert found["b"]["own_bytes"] < found["b"]["shared_bytes"]


def test_a_parent_that_has_moved_is_found_by_its_manifest(tmp_path: Path) -> None:
    save(tmp_path / "base", 1)
    main(["fork", str(tmp_path / "base"), str(tmp_path / "child")])
    (tmp_path / "base").rename(tmp_path / "old")
    save(tmp_path / "base", 1)  # another run with its name, and a step of this number
    found = {Path(each.run).name: each for each in family(str(tmp_path))}
    assert found["child"].base == str(tmp_path / "old")
    shutil.rmtree(tmp_path / "old")
    shutil.rmtree(tmp_path / "base")
    (child,) = family(str(tmp_path))
    assert child.base is None
    assert child.parent is not None
    assert child.sizes.shared_bytes == 0
    assert main(["verify", str(tmp_path / "child")]) == 0


def drawn(capsys: pytest.CaptureFixture[str], directory: Path) -> list[str]:
    """The first column of the tree, without its header."""
    capsys.readouterr()
    assert main(["tree", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line[: lines[0].index("FROM")].rstrip() for line in lines[1:]]


def bases(directory: Path) -> dict[str, str | None]:
    found = family(str(directory))
    return {Path(each.run).name: each.base and Path(each.base).name for each in found}


def test_a_run_that_came_back_from_its_child_is_drawn_below_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, child = tmp_path / "base", tmp_path / "child"
    save(base, 10)
    main(["fork", f"{base}@10", str(child)])
    shutil.rmtree(base)
    main(["fork", f"{child}@10", str(base)])
    assert bases(tmp_path) == {"base": "child", "child": None}
    assert drawn(capsys, tmp_path) == ["child", "└── base"]
    save(base, 11)
    shutil.rmtree(base / "step-000000000010")  # what base said of 10 is gone: only paths are left
    assert drawn(capsys, tmp_path) == ["child", "└── base"]


def test_runs_whose_manifests_make_a_circle_are_all_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    save(c, 1)
    main(["fork", f"{c}@1", str(d)])
    main(["fork", f"{d}@1", str(b)])
    save(b, 2)
    main(["copy", f"{b}@2", str(c)])  # now c says that it began from d
    main(["fork", f"{c}@2", str(a)])
    found = {each.run: each for each in family(str(tmp_path))}
    parents = {Path(run).name: Path(each.parent.run).name for run, each in found.items()
               if each.parent}  # fmt: skip
    assert parents == {"a": "c", "b": "d", "c": "d", "d": "c"}
    assert drawn(capsys, tmp_path) == ["c", "├── a", "└── d", "    └── b"]
    assert len(answer(capsys, "tree", tmp_path)["runs"]) == 4


def test_a_run_is_not_its_own_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, child = tmp_path / "base", tmp_path / "child"
    save(base, 1)
    main(["fork", str(base), str(child)])
    shutil.rmtree(base)
    main(["copy", str(child), str(base)])  # its manifest says that it began from base
    assert drawn(capsys, tmp_path) == ["base", "child"]


def test_a_parent_that_has_retired_the_step_is_found_by_its_path(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save(base, 1, 2)
    main(["fork", f"{base}@1", str(tmp_path / "child")])
    shutil.rmtree(base / "step-000000000001")
    assert bases(tmp_path)["child"] == "base"
    shutil.rmtree(base)
    save(base, 1)  # another run, that has not come so far
    assert bases(tmp_path)["child"] is None
    shutil.rmtree(base)
    save(base, 0)
    assert bases(tmp_path)["child"] is None


def test_a_damaged_run_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "good", 1)
    save(tmp_path / "bad", 1)
    (tmp_path / "bad" / "step-000000000001" / "manifest.json").write_bytes(b"no")
    assert main(["tree", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "good" in out
    assert "unreadable: a manifest is not valid\n" in out, "the first line of the error"


def test_there_is_something_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no run\n"
    assert main(["tree", str(tmp_path / "nowhere")]) == 3


def test_a_run_trains_on_from_its_fork(tmp_path: Path) -> None:
    model = Tuned()
    save(tmp_path / "base", 1, model=model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save(tmp_path / "base", 2, model=model)
    main(["fork", f"{tmp_path / 'base'}@1", str(tmp_path / "child")])
    live = Tuned()
    with statehold.Checkpointer(tmp_path / "child", **SMALL) as ckpt:
        assert ckpt.restore({"model": live}) == 1
    assert all(torch.equal(value, weights[name]) for name, value in live.state_dict().items())


def test_a_name_that_is_not_utf8_hides_no_other_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "good", 1)
    save(tmp_path / "bad", 1)
    os.rename(os.fsencode(tmp_path / "bad"), os.fsencode(tmp_path) + b"/b\xff")
    assert [member.run for member in family(str(tmp_path))] == [f"{tmp_path}/good"]
    assert "its name is not UTF-8" in caplog.text
    assert statehold.lineage.Catalog(tmp_path).scan().steps == 1
    assert main(["tree", str(tmp_path)]) == 0
    assert "good" in capsys.readouterr().out


def test_a_run_whose_only_step_is_a_link_has_a_problem_in_words(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    os.mkdir(tmp_path / "b")
    (tmp_path / "b" / "step-000000000001").symlink_to(tmp_path / "a" / "step-000000000001")
    problems = {member.run: member.problem for member in family(str(tmp_path))}
    assert problems[f"{tmp_path}/a"] is None
    assert "is a link or a file" in str(problems[f"{tmp_path}/b"])


def test_runs_behind_links_are_listed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, disk = tmp_path / "runs", tmp_path / "disk"
    expected = [disk / "exp" / "deep", disk / "other", runs / "here"]
    for run in expected:
        write_step(run, 1, {})
    links = {
        "exp": disk / "exp", "again": disk / "exp" / "deep", "other": disk / "other",
        "twin": runs / "here", "loop": runs, "up": tmp_path, "gone": tmp_path / "nowhere",
        "step": runs / "here" / "step-000000000001",
    }  # fmt: skip
    for name, target in links.items():
        (runs / name).symlink_to(target)
    (disk / "exp" / "back").symlink_to(runs)
    (disk / "exp" / "far").symlink_to("/")
    found = answer(capsys, "tree", runs)["runs"]
    assert [each["run"] for each in found] == list(map(str, expected))
    assert answer(capsys, "catalog", runs)["steps"] == 3
