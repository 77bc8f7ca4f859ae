"""A step in another directory: the same step, verified, continued, and never half there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from sim.crash_states import Sample
from statehold import Checkpointer
from statehold.cli import main
from statehold.errors import (
    CorruptionError,
    MissingFileError,
    NoSpaceError,
    RunBusyError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from statehold.reading.copying import copy_into
from statehold.steps.copying import is_shared
from statehold.steps.target import DirectoryPlace
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.levels import remove, step_path, steps_at
from support.plain_runs import (
    BASE,
    CHILD,
    RetiringOnLink,
    check,
    check_on_ranks,
    content,
    data_of,
    manifest_of,
    save,
    save_on_ranks,
)
from support.ranks import Ranks
from support.sharing import Tuned, TunedRun, same, whole_steps

OTHER = "/runs/other"


@pytest.mark.parametrize("link", [True, False])
def test_a_copy_is_the_same_step_and_stands_on_its_own(fs: SimFs, link: bool) -> None:
    save(fs, BASE, 1, 2, tags=["t"])
    copied = copy_into(fs, step_path(BASE, 1), OTHER, link=link)
    assert copied.path == step_path(OTHER, 1)
    assert bool(copied.linked_bytes) == link
    assert bool(copied.copied_bytes) != link
    name = "manifest.json"
    same = [fs.read_file(f"{step_path(run, 1)}/{name}", 1 << 20) for run in (BASE, OTHER)]
    assert same[0] == same[1]
    save(fs, BASE, 3, 4, keep=1)  # retires step 1, and would write over its files
    check(fs, OTHER, 1)
    remove(fs, BASE)
    check(fs, OTHER, 1)


def test_the_steps_of_the_destination_stay(fs: SimFs) -> None:
    save(fs, BASE, 5)
    save(fs, OTHER, 3, 9)
    copy_into(fs, step_path(BASE, 5), OTHER)
    check(fs, OTHER, 3, 5, 9)
    assert copy_into(fs, step_path(BASE, 5), OTHER).was_there
    assert copy_into(fs, step_path(BASE, 5), BASE).was_there
    save(fs, "/runs/third", 3)
    with pytest.raises(UsageError, match="another save of this step"):
        copy_into(fs, step_path("/runs/third", 3), OTHER)
    check(fs, OTHER, 3, 5, 9)


def test_a_step_that_somebody_renamed_stays_where_it_is(fs: SimFs) -> None:
    save(fs, BASE, 5)
    save(fs, OTHER, 3)
    fs.rename(step_path(OTHER, 3), step_path(OTHER, 5))
    with pytest.raises(UsageError, match="another step under the name"):
        copy_into(fs, step_path(BASE, 5), OTHER)
    fs.rename(step_path(OTHER, 5), step_path(OTHER, 3))
    copy_into(fs, step_path(BASE, 5), OTHER)
    check(fs, OTHER, 3, 5)


def test_a_step_of_several_ranks(fs: SimFs) -> None:
    save_on_ranks(fs, 3, BASE, 1)
    copy_into(fs, step_path(BASE, 1), OTHER)
    with Ranks(fs, 3, OTHER) as ranks:
        check_on_ranks(ranks, 1)


def test_a_file_system_without_links_gets_a_copy(fs: SimFs) -> None:
    save(fs, BASE, 1)
    fs.fail_next("link", errno.EXDEV, 1 << 20)
    copied = copy_into(fs, step_path(BASE, 1), OTHER)
    assert fs.fired["injected link"] == 1
    assert copied.linked_bytes == 0 < copied.copied_bytes
    fs.set_faults()
    check(fs, OTHER, 1)


@pytest.mark.parametrize("link", [True, False])
def test_a_damaged_step_is_not_copied(fs: SimFs, link: bool) -> None:
    save(fs, BASE, 1)
    fs.corrupt(data_of(fs, BASE, 1), 1_000_000, 1)
    with pytest.raises(CorruptionError):
        copy_into(fs, step_path(BASE, 1), OTHER, link=link)
    assert steps_at(fs, OTHER) == []


def test_an_interrupted_copy_is_continued(fs: SimFs, monkeypatch: pytest.MonkeyPatch) -> None:
    save(fs, BASE, 1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # all data is there, and the manifest is not

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryPlace, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            copy_into(fs, step_path(BASE, 1), OTHER, link=False)
    assert steps_at(fs, OTHER) == []
    fs.record()
    copy_into(fs, step_path(BASE, 1), OTHER, link=False)
    taken = [each for each in fs.recorded if each.startswith("rename ") and "rank-" in each]
    assert len(taken) == 1  # into the new attempt, which verifies it
    check(fs, OTHER, 1)
    assert not [name for name, _ in fs.listdir(OTHER) if "partial" in name]


@pytest.mark.parametrize("operation", ["write", "write_file", "rename"])
def test_a_copy_without_room_keeps_nothing(fs: SimFs, operation: str) -> None:
    save(fs, BASE, 1)
    fs.fail_next(operation, errno.ENOSPC)
    with pytest.raises(NoSpaceError):
        copy_into(fs, step_path(BASE, 1), OTHER, link=False)
    assert fs.fired[f"injected {operation}"] == 1
    assert [name for name, is_dir in fs.listdir(OTHER) if is_dir] == []
    copy_into(fs, step_path(BASE, 1), OTHER, link=False)
    check(fs, OTHER, 1)


def test_what_cannot_be_is_refused(fs: SimFs) -> None:
    save(fs, BASE, 1)
    with checkpointer_on(fs, OTHER, **SMALL) as ckpt:
        ckpt.save(2, content(2))
        with pytest.raises(RunBusyError):
            copy_into(fs, step_path(BASE, 1), OTHER)
    with pytest.raises(StorageError):
        copy_into(fs, step_path(BASE, 3), OTHER)


def test_a_step_that_is_retired_meanwhile(fs: SimFs) -> None:
    save(fs, BASE, 1)
    with pytest.raises((StepNotFoundError, MissingFileError)):
        copy_into(RetiringOnLink(fs, BASE, 1), step_path(BASE, 1), OTHER)  # type: ignore[arg-type]
    assert steps_at(fs, OTHER) == []


class Closing:
    """A file that acts when it is closed."""

    def __init__(self, file: Any, act: Callable[[], None]) -> None:
        self.read_into = file.read_into
        self._close, self._act = file.close, act

    def close(self) -> None:
        self._close()
        self._act()


def test_a_step_that_is_retired_when_all_was_read(fs: SimFs) -> None:
    save(fs, BASE, 1)

    class Retiring:
        def __getattr__(self, name: str) -> Any:
            return getattr(fs, name)

        def open_read(self, path: str) -> Any:
            where = step_path(BASE, 1)
            return Closing(fs.open_read(path), lambda: fs.rename(where, f"{where}.retired"))

    with pytest.raises(StepNotFoundError, match="retired"):
        copy_into(Retiring(), step_path(BASE, 1), OTHER)  # type: ignore[arg-type]
    assert steps_at(fs, OTHER) == []


@pytest.mark.parametrize("fault", [None, errno.ENOSPC])
def test_what_other_saves_have_left_in_the_destination_stays(fs: SimFs, fault: int | None) -> None:
    save(fs, BASE, 1)
    save(fs, OTHER, 5)
    whole = "copy-0123456789abcdef"
    for left in ("1.partial", "7.partial", "3.retired", f"1.0a0a0a0a-1.{whole}.partial",
                 f"3.0a0a0a0a-1.{whole}.partial", "9.0a0a0a0a-1.partial"):  # fmt: skip
        step, _, rest = left.partition(".")
        fs.mkdir(f"{step_path(OTHER, int(step))}.{rest}")
        fs.write_file(f"{step_path(OTHER, int(step))}.{rest}/x", b"x")
    before = {*fs.listdir(OTHER), (step_path(OTHER, 1).rpartition("/")[2], True)}
    if fault is not None:
        fs.fail_next("write_file", fault)
        with pytest.raises(NoSpaceError):
            copy_into(fs, step_path(BASE, 1), OTHER, link=False)
        assert fs.fired["injected write_file"] == 1
    copy_into(fs, step_path(BASE, 1), OTHER)
    after = set(fs.listdir(OTHER))
    assert after == before
    assert all(fs.read_file(f"{OTHER}/{name}/x", 9) == b"x" for name, _ in after if "." in name[1:])


class Beaten:
    """A file system on which another copy has ended when this one makes the destination."""

    def __init__(self, fs: SimFs, first: str) -> None:
        self._fs, self._first = fs, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def mkdir(self, path: str) -> None:
        if path == OTHER:
            copy_into(self._fs, self._first, OTHER)
        self._fs.mkdir(path)


def test_two_copies_of_one_number_at_one_moment(fs: SimFs) -> None:
    save(fs, BASE, 1)
    save(fs, CHILD, 1, tags=["another"])
    beaten: Any = Beaten(fs, step_path(CHILD, 1))
    with pytest.raises(UsageError, match="another save of this step"):
        copy_into(beaten, step_path(BASE, 1), OTHER)
    assert manifest_of(fs, OTHER, 1).about.tags == ("another",)
    remove(fs, OTHER)
    assert copy_into(beaten, step_path(CHILD, 1), OTHER).was_there
    check(fs, OTHER, 1)


def shared_of(fs: SimFs, run: str, step: int) -> list[str]:
    where = step_path(run, step)
    return [f"{where}/{name}" for name, _ in sorted(fs.listdir(where)) if is_shared(name)]


@pytest.mark.usefixtures("small_shared_files")
@pytest.mark.parametrize("damaged", [True, False])
def test_a_shared_file_of_the_destination_is_read_before_the_step_gets_it(
    fs: SimFs, damaged: bool
) -> None:
    run = TunedRun(checkpointer_on(fs, BASE, **SMALL), Tuned())
    for step in (1, 2):
        run.save(step)
    run.ckpt.close()
    copy_into(fs, step_path(BASE, 1), OTHER, link=False)
    first = shared_of(fs, OTHER, 1)
    assert first
    if damaged:
        fs.corrupt(first[0], 9000, 1)
    fs.record()
    copied = copy_into(fs, step_path(BASE, 2), OTHER)
    given = [each.split()[1] for each in fs.recorded if each.startswith("link ")]
    must(copied.copied_bytes == 0 and first[0] in given, given)
    with checkpointer_on(fs, OTHER, **SMALL) as ckpt:
        model = Tuned()
        assert ckpt.restore({"model": model}, 2) == 2
        assert same(model.bits(), run.expected[2])


@pytest.mark.usefixtures("small_shared_files")
def test_a_copy_without_links_makes_no_second_names(fs: SimFs) -> None:
    run = TunedRun(checkpointer_on(fs, BASE, **SMALL), Tuned())
    for step in (1, 2):
        run.save(step)
    run.ckpt.close()
    assert shared_of(fs, BASE, 2)
    fs.record()
    for step in (1, 2):
        copied = copy_into(fs, step_path(BASE, step), OTHER, link=False)
        assert copied.linked_bytes == 0 < copied.copied_bytes
    assert not [each for each in fs.recorded if each.startswith("link ")]
    with checkpointer_on(fs, OTHER, **SMALL) as ckpt:
        steps = whole_steps(ckpt, run.expected)
    assert steps == [1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("link", [True, False])
def test_a_crash_leaves_no_step_or_a_whole_one(fs: SimFs, link: bool) -> None:
    save(fs, BASE, 1)
    fs.record()
    copy_into(fs, step_path(BASE, 1), OTHER, link=link)
    states, committed = 0, 0
    for moment in range(len(fs.recorded)):
        for disk in Sample(4, whole=True).of(fs, moment, 0):
            states += 1
            steps = steps_at(disk, OTHER)
            check(disk, OTHER, *steps)
            assert not copy_into(disk, step_path(BASE, 1), OTHER, link=link).was_there or steps
            check(disk, OTHER, 1)
            committed += bool(steps)
    assert states > 8
    assert 0 < committed < states


# -- on a real disk --------------------------------------------------------------------------------


def test_the_command_and_the_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            metrics = {"loss": float(step)}
            ckpt.save(step, content(step), metrics=metrics).wait("committed", DEADLINE_S)
    assert main(["copy", f"{run}@best:loss", str(tmp_path / "a"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "a" / "step-000000000001")
    assert document["linked_bytes"] > 0 == document["copied_bytes"]
    assert not document["was_there"]
    assert main(["copy", f"{run}@1", str(tmp_path / "a")]) == 0
    assert "was there already" in capsys.readouterr().err
    assert main(["copy", str(run), str(tmp_path / "b"), "--no-links"]) == 0
    name = "rank-00000-of-00001.safetensors"
    found = [
        os.stat(tmp_path / at / name).st_nlink
        for at in ("a/step-000000000001", "b/step-000000000002")
    ]
    assert found == [2, 1]
    assert main(["verify", str(tmp_path / "b")]) == 0
    done: list[tuple[int, int]] = []
    copied = statehold.copy_step(run, tmp_path / "c", report=lambda *each: done.append(each))
    assert done[-1][0] == done[-1][1]
    assert torch.equal(statehold.load(tmp_path / "c", "w"), content(2)["w"])
    assert copied.path.endswith("step-000000000002")
    assert main(["copy", f"{run}@7", str(tmp_path / "d")]) == 3
    assert main(["copy", str(run), "s3://bucket/x"]) == 2
