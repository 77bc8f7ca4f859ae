"""Steps of several ranks, parts, names that lead elsewhere, full disks, and the commands."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import _core, cli
from statehold.cli import main
from statehold.errors import (
    CorruptionError,
    MissingFileError,
    NoSpaceError,
    StateMismatchError,
    StorageError,
    UnsupportedValueError,
)
from statehold.integrations.formats import convert
from statehold.integrations.formats.partial import OutFile, identity_of, work_on
from statehold.io.memory_room import free_bytes
from statehold.process.whole_files import sync_files
from support.disks import no_file_larger_than
from support.mounts import tmpfs, why_no_tmpfs
from support.power import SyncedDisk
from support.records import example
from support.steps import true_sums
from support.transfers import check_equal, saved


def test_a_step_of_four_ranks_goes_out_whole(tmp_path: Path) -> None:
    world = example(true_sums)
    for name, content in world.files.items():
        target = tmp_path / "run" / Path(name).relative_to("run")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    for name in ("sharded", "uneven", "replicated", "free"):
        file = tmp_path / f"{name}.pt"
        statehold.export_step(tmp_path / "run", file, "torch", name=f"model.{name}")
        found = torch.load(file, weights_only=True)
        assert found[name].numpy().tobytes() == world.arrays[name].tobytes()
    with pytest.raises(StateMismatchError, match="ranks saved different"):
        statehold.export_step(tmp_path / "run", tmp_path / "all", "hf")


def test_a_part_goes_out_and_comes_in_below_a_name(tmp_path: Path) -> None:
    state = {"model": {"encoder.w": torch.ones(2), "decoder.w": torch.zeros(2)}, "n": 1}
    step = saved(tmp_path / "run", 1, state)
    statehold.export_step(step, tmp_path / "hf", "hf", name="model.encoder")
    statehold.import_step(tmp_path / "hf", f"{tmp_path / 'new'}@1", name="a.b")
    check_equal(statehold.load(tmp_path / "new"), {"a": {"b": {"w": torch.ones(2)}}})
    with pytest.raises(StateMismatchError, match="nothing of this name"):
        statehold.export_step(step, tmp_path / "other", "hf", name="modle")


def test_a_step_without_its_manifest_is_damaged_and_no_failure_of_the_storage(
    tmp_path: Path,
) -> None:
    step = saved(tmp_path / "run", 1, {"w": torch.ones(2)})
    (tmp_path / "run/step-000000000001/manifest.json").unlink()
    with pytest.raises(MissingFileError, match=r"manifest\.json"):
        statehold.export_step(step, tmp_path / "out", "torch")


@pytest.mark.parametrize("name", ["n", "plain", "empty"])
def test_a_part_without_tensors_is_refused_where_only_tensors_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    state = {"model": torch.ones(2), "n": 1, "plain": {"a": [1, 2]}, "empty": {}}
    step = saved(tmp_path / "run", 1, state)
    for to in ("hf", "deepspeed-universal"):
        code, _, text = asked(capsys, "export", step, tmp_path / "out", "--to", to, "--name", name)
        assert (code, "hf" in text) == (2, True)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]  # and no work to resume
    statehold.export_step(step, tmp_path / "out", "torch", name=name)
    whole = state[name] if isinstance(state[name], dict) else {name: state[name]}
    assert torch.load(tmp_path / "out", weights_only=True) == whole


def test_a_name_of_the_state_leads_nowhere(tmp_path: Path) -> None:
    state = {
        "model": {"../../../x": torch.ones(2)},
        "optimizer": {"state": {}, "param_groups": []},
    }
    step = saved(tmp_path / "run", 1, state)
    with pytest.raises(UnsupportedValueError, match=r"\.\./x"):
        statehold.export_step(step, tmp_path / "a" / "out", "deepspeed-universal")
    assert not list(tmp_path.rglob("fp32.pt"))


def test_a_full_disk_is_told_of_and_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"a": torch.ones(9), "b": torch.zeros(9)}}
    step = saved(tmp_path / "run", 1, state)
    statehold.export_step(step, tmp_path / "hf", "hf")

    def full(self: OutFile, data: object, offset: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(OutFile, "write", full)
        with pytest.raises(NoSpaceError):
            statehold.export_step(step, tmp_path / "again", "hf")
        with pytest.raises(NoSpaceError):
            statehold.import_step(tmp_path / "hf", f"{tmp_path / 'new'}@1")
    assert statehold.open(tmp_path / "new").steps() == []
    statehold.export_step(step, tmp_path / "again", "hf")
    statehold.import_step(tmp_path / "again", f"{tmp_path / 'new'}@1")
    check_equal(statehold.load(tmp_path / "new", "model"), state["model"])


@pytest.mark.parametrize("theirs", ["file", "folder", "journal", "link"])
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_what_a_user_has_where_an_export_is_made_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: str, to: str
) -> None:
    step = saved(tmp_path / "run", 1, {"model": {"a": torch.ones(9)}})
    partial = tmp_path / "out.partial"
    kept = {"file": partial, "link": tmp_path / "mine" / "x", "journal": partial / ".journal"}.get(
        theirs, partial / "x"
    )
    kept.parent.mkdir(exist_ok=True)
    kept.write_text('["of a diary"]\n')
    if theirs == "link":
        partial.symlink_to(kept.parent)
    code, _, text = asked(capsys, "export", step, tmp_path / "out", "--to", to)
    assert code == 2
    assert str(partial) in text
    assert kept.read_text() == '["of a diary"]\n'
    assert theirs == "file" or [kept] == list(kept.parent.iterdir())


@pytest.mark.parametrize("left", ["nothing", "journal"])
def test_an_export_that_was_killed_at_its_begin_is_begun_again(tmp_path: Path, left: str) -> None:
    step = saved(tmp_path / "run", 1, {"model": {"a": torch.ones(9)}})
    partial = tmp_path / "out.partial"
    partial.mkdir()
    if left == "journal":
        (partial / ".journal").touch()
    statehold.export_step(step, tmp_path / "out", "hf")
    assert not partial.exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("again", ["same", "another"])
def test_an_import_after_one_that_was_killed_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    torch.save({"w": torch.ones(5000)}, tmp_path / "a.pt")
    run = tmp_path / "run"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_check_unchanged", killed)
        with pytest.raises(KeyboardInterrupt):
            statehold.import_step(tmp_path / "a.pt", f"{run}@1")
    assert (run / "step-000000000001.partial").is_dir()
    if again == "another":
        torch.save({"w": torch.zeros(7000)}, tmp_path / "a.pt")
    statehold.import_step(tmp_path / "a.pt", f"{run}@1")
    assert {path.name for path in run.iterdir()} == {".lock", "run.json", "step-000000000001"}
    assert statehold.load(run, "w").shape == ((7000,) if again == "another" else (5000,))


@pytest.mark.skipif(why_no_tmpfs() is not None, reason=str(why_no_tmpfs()))
@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_what_does_not_fit_gives_its_room_back_at_once(tmp_path: Path, to: str) -> None:
    state = {"model": {f"w{index}": torch.full((1 << 18,), index + 0.5) for index in range(8)}}
    step = saved(tmp_path / "run", 1, state)
    statehold.export_step(step, tmp_path / "whole", to)
    with tmpfs(tmp_path, 4 << 20) as memory:
        before = free_bytes(str(memory))
        with pytest.raises(NoSpaceError):
            statehold.export_step(step, memory / "new", to)
        assert list(memory.iterdir()) == []
        with pytest.raises(NoSpaceError):
            statehold.import_step(tmp_path / "whole", f"{memory / 'in'}@1")
        with pytest.raises(NoSpaceError):
            statehold.copy_step(step, memory / "copy")
        assert before - free_bytes(str(memory)) < 64 << 10


@pytest.mark.parametrize("nbytes", [600, 800, 1000, 2000, 4000])
def test_the_errors_of_torchs_own_writer_are_those_of_the_storage(
    tmp_path: Path, nbytes: int
) -> None:
    step = saved(tmp_path / "run", 1, {f"w{index}": torch.ones(300) for index in range(20)})
    fs = _core.open_fs("auto", 1)
    with no_file_larger_than(fs, nbytes), pytest.raises(StorageError) as raised:
        statehold.export_step(step, tmp_path / "all.pt", "torch")
    assert raised.value.errno == errno.EFBIG
    statehold.export_step(step, tmp_path / "all.pt", "torch")
    assert torch.equal(torch.load(tmp_path / "all.pt")["w19"], torch.ones(300))


def test_a_job_may_save_into_the_run_afterwards(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    statehold.import_step(tmp_path / "w.pt", f"{tmp_path / 'run'}@10", name="model")
    other = torch.nn.Linear(3, 2)
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore({"model": other}) == 10
        assert torch.equal(other.weight, model.weight)
        ckpt.save(11, {"model": other}).wait()
        assert ckpt.steps() == [10, 11]


def test_a_source_that_changes_meanwhile_makes_no_step(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save({"w": torch.ones(9)}, file)

    def touch(done: int, total: int) -> None:
        os.utime(file, (1, 1))

    with pytest.raises(CorruptionError, match="has changed while it was read"):
        statehold.import_step(file, f"{tmp_path / 'run'}@1", report=touch)
    assert statehold.open(tmp_path / "run").steps() == []
    statehold.import_step(file, f"{tmp_path / 'run'}@1")


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    code = main([*map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": torch.ones(2), "n": 3}}
    step, out = saved(tmp_path / "run", 1, state), tmp_path / "hf"
    code, told, notes = asked(capsys, "export", step, out, "--to", "hf")
    assert (code, told) == (0, f"{out}\n")
    assert "does not hold these as they were: n" in notes
    code, told, _ = asked(capsys, "export", step, tmp_path / "hf2", "--to", "hf", "--json")
    assert (code, json.loads(told)["left_out"]) == (0, ["n"])
    code, told, _ = asked(capsys, "import", out, f"{tmp_path / 'new'}@7", "--name", "net")
    assert (code, told) == (0, f"{tmp_path}/new/step-000000000007\n")
    assert statehold.load(tmp_path / "new", "net.w").tolist() == [1, 1]
    assert asked(capsys, "verify", tmp_path / "new")[0] == 0
    assert asked(capsys, "export", step, out, "--to", "hf")[0] == 2
    assert asked(capsys, "export", f"{tmp_path / 'run'}@9", "x", "--to", "hf")[0] == 3
    assert asked(capsys, "import", tmp_path / "nothing", f"{tmp_path / 'new'}@8")[0] == 3


def test_the_command_offers_every_format() -> None:
    assert set(cli.FORMATS) == {name for name, each in convert.FORMATS.items() if each.export}


def test_an_export_after_a_power_cut_has_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of what is durable may be all that the disk has."""
    (tmp_path / "disk").mkdir()
    disk = SyncedDisk(tmp_path / "disk", monkeypatch)

    def export(folder: Path, *, ends: bool) -> None:
        identity = identity_of(export="test")
        with work_on(f"{folder}/out", identity, is_file=False, done=lambda _: None) as work:
            sync_files([folder, work.directory])  # a disk may have names at any time
            with work.file("deep/data") as out:
                out.put("key", 5, iter([memoryview(b"bytes")]), 0, work.done)
            if not ends:
                raise StorageError("injected", errno=errno.EIO, path="")

    with pytest.raises(StorageError, match="injected"):
        export(tmp_path / "disk", ends=False)
    left = disk.cut(tmp_path / "left")
    export(left, ends=True)
    assert (left / "out/deep/data").read_bytes() == b"bytes"
