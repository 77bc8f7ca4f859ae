"""What a user may get wrong is refused at once, and says what was expected, what came, and why."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
from statehold import Checkpointer, Directory, Io, Memory, ObjectStore
from statehold.cli import main
from statehold.dcp import StorageReader, StorageWriter, restore_stock
from statehold.errors import StorageError, UsageError
from statehold.integrations.formats.convert import export_step, import_step
from statehold.io.objects.client import check_url
from statehold.lineage.catalog import Catalog
from support.faults import DEADLINE_S, SMALL


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Checkpointer(""), "the run is not the path of a directory"),
        (lambda: Checkpointer("s3://b/x"), "the run is a URL"),
        (lambda: Checkpointer("file:///tmp/x"), "ObjectStore("),
        (lambda: Checkpointer(Path("s3://b/x")), "the run is a URL"),
        (lambda: Directory(path=""), "the path of level directory is not the path"),
        (lambda: Directory(path="gs://b/x"), "the path of level directory is a URL"),
        (lambda: Memory(path=""), "the path of level memory is not the path"),
        (lambda: Memory(path="memory://x"), "the path of level memory is a URL"),
        (lambda: ObjectStore("file://tmp/x"), "file:///tmp/x"),
        (lambda: ObjectStore("file://"), "three slashes"),
        (lambda: ObjectStore("s3://"), "got       s3://"),
        (lambda: Directory(every="10 steps", name="nvme"), "level     nvme"),
        (lambda: Checkpointer("x", staging_bytes="65TiB"), "staging_bytes must hold"),
        (lambda: Checkpointer("x", staging_bytes=10**30), "at most 64 TiB"),
        (lambda: Checkpointer("x", io=Io(buffer_bytes=10**24 * 2**20)), "buffer_bytes must be"),
        (lambda: check_url("nope"), "got       nope"),
        (lambda: ObjectStore("s3://b/x", options="x"), "options of an object store"),
        (lambda: Checkpointer("x", level=[]), "did you mean levels?"),
        (lambda: Checkpointer("x", stagingbytes=1), "did you mean staging_bytes"),
        (lambda: Checkpointer("x", levels=[Directory(), Directory(path="y")]), 'name="..."'),
    ],
)
def test_what_cannot_be_meant_says_what_was_expected(make: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert told in str(caught.value)


def dcp_saves(where: str) -> None:
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id=where, storage_writer=StorageWriter(), no_dist=True)


def dcp_loads(where: str) -> None:
    state = {"w": torch.ones(3)}
    dcp.load(state, checkpoint_id=where, storage_reader=StorageReader(), no_dist=True)


# Whoever takes a path, with `base`: a run of one step.
TAKERS: dict[str, Callable[[str, str], object]] = {
    "Checkpointer": lambda base, where: Checkpointer(where),
    "source": lambda base, where: Checkpointer("x").restore({}, source=where),
    "parent": lambda base, where: Checkpointer("x", parent=f"{where}@1"),
    "dcp.save": lambda base, where: dcp_saves(where),
    "dcp.load": lambda base, where: dcp_loads(where),
    "StorageWriter": lambda base, where: StorageWriter(where),
    "StorageReader": lambda base, where: StorageReader(where),
    "restore_stock": lambda base, where: restore_stock(where, {}),
    "load": lambda base, where: statehold.load(where),
    "load a step": lambda base, where: statehold.load(where, step=1),
    "open": lambda base, where: statehold.open(where),
    "subscribe": lambda base, where: statehold.subscribe(where, {"w": torch.ones(3)}),
    "copy_step": lambda base, where: statehold.copy_step(base, where),
    "copy_step from": lambda base, where: statehold.copy_step(where, "x"),
    "export_step": lambda base, where: export_step(base, where, "torch"),
    "import_step": lambda base, where: import_step(f"{base}/x", f"{where}@1"),
    "import_step from": lambda base, where: import_step(where, f"{base}@7"),
    "Catalog": lambda base, where: Catalog(where),
    "a file of it": lambda base, where: Catalog(base, where),
}
COMMANDS = [
    "ls URL", "show URL", "verify URL", "verify URL --all", "diff URL BASE", "diff BASE URL",
    "doctor URL", "report URL --json", "prune URL --keep 1", "fork BASE URL", "fork URL x",
    "tree URL", "catalog URL", "du URL", "copy BASE URL", "copy URL x", "free URL",
    "export BASE URL --to hf", "export BASE URL --to torch", "export URL x --to dcp",
    "import URL BASE@7", "import BASE/x URL@7", "bench io URL",
    "bench io . --out URL", "bench io . --profile URL", "show URL@1", "show URL@best:loss",
]  # fmt: skip
ELSEWHERE = [
    "s3://key:secret@b/x", "gs://b/x", "file:///tmp/x", "az:/b/x", "abfs:/b/x", "dbfs:/b/x", "~/x",
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of one step; the working directory has nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Checkpointer("base", **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(3)}).wait("committed", DEADLINE_S)
    return str(tmp_path / "base")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("taker", TAKERS)
def test_a_url_becomes_no_directory(taker: str, base: str) -> None:
    for where in ELSEWHERE:
        with pytest.raises(UsageError) as caught:
            TAKERS[taker](base, where)
        assert "is a URL, not" in str(caught.value) or "begins with ~" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert os.listdir(".") == ["base"]
        assert statehold.open(base).steps() == [1]


@pytest.mark.thorough
@pytest.mark.parametrize("words", COMMANDS)
def test_nor_by_a_command(words: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    for where in ELSEWHERE:
        assert main(words.replace("BASE", base).replace("URL", where).split()) == 2
        said = capsys.readouterr().err
        assert "is a URL, not" in said or "begins with ~" in said
        assert "secret" not in said
        assert os.listdir(".") == ["base"]


def test_a_secret_in_a_url_is_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        Checkpointer("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("below", ["", "run"])
def test_a_run_that_is_a_file_is_no_fresh_start(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        Checkpointer(tmp_path / "file" / below, **SMALL) as ckpt,
        pytest.raises(StorageError, match="ENOTDIR") as caught,
    ):
        ckpt.restore({"w": torch.ones(3)})
    assert str(tmp_path / "file") in str(caught.value)
    assert "another path" in str(caught.value.hint)


def test_a_trace_that_could_not_be_written_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    run, trace = tmp_path / "run", tmp_path / "none" / "trace.json"
    with pytest.raises(UsageError, match="directory of the trace"):
        Checkpointer(run, trace=trace, **SMALL).steps()
    with Checkpointer(run, trace=run / "trace.json", **SMALL) as ckpt:  # which a save makes
        ckpt.save(1, {"w": torch.ones(3)})
    assert (run / "trace.json").is_file()


@pytest.mark.parametrize("within_s", ["25", None, True, 0])
def test_a_time_to_leave_is_a_number(tmp_path: Path, within_s: Any) -> None:
    with (
        Checkpointer(tmp_path, **SMALL) as ckpt,
        pytest.raises(UsageError, match="the time to leave must be a number of seconds"),
    ):
        ckpt.leave_on(signal.SIGUSR2, within_s=within_s)


@pytest.mark.parametrize(
    "level",
    [
        lambda path: Memory(path=path, copies=1, agent=False),
        lambda path: Directory(path=path, per_host=True, copies=1),
    ],
)
def test_copies_on_hosts_that_are_not_there_are_told_of(
    tmp_path: Path, level: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "run", levels=[level(tmp_path / "x")], **SMALL) as ckpt:
        ckpt.steps()
    assert caplog.text.count("asks for 1 copies on other hosts") == 1


def test_memory_on_a_disk_logs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statehold.checkpoint.levels.opening.is_memory", lambda path: False)
    for _ in range(2):
        levels = [Memory(path=tmp_path / "m", agent=False), Directory()]
        Checkpointer(tmp_path / "run", levels=levels, **SMALL).steps()
    assert caplog.text.count("level memory is not in memory") == 1


def test_the_first_level_shows_why_it_takes_no_steps_until_it_does(tmp_path: Path) -> None:
    near = tmp_path / "near"
    near.write_text("")
    state = {"w": torch.ones(3)}
    levels = [Directory(path=near, name="near"), Directory(name="far")]
    with Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        told = repr(ckpt.levels()[0])
        assert str(near) in told
        assert "ENOTDIR" in told
        near.unlink()
        ckpt.save(2, state).wait("committed", DEADLINE_S)
        assert ckpt.levels()[0].error is None


def test_an_error_shows_its_facts_where_it_is_one_of_many() -> None:
    error = StorageError("cannot list", errno=5, path="/x")
    assert repr(error) == "StorageError('cannot list', path='/x', errno='EIO (Input/output error)')"


class Mute:
    """Cannot even say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("not yet built")


PASSED: dict[str, Callable[[str, Any], Any]] = {
    "the run": lambda run, it: Checkpointer(it),
    "io": lambda run, it: Checkpointer(run, io=it),
    "levels": lambda run, it: Checkpointer(run, levels=[it]),
    "every": lambda run, it: Directory(every=(it,)),
    "the step of a save": lambda run, it: Checkpointer(run).save(it, {}),
    "a metric": lambda run, it: Checkpointer(run).save(1, {}, metrics={"loss": it}),
    "metrics": lambda run, it: Checkpointer(run).save(1, {}, metrics=[it]),
    "a tag": lambda run, it: Checkpointer(run).save(1, {}, tags=[it]),
    "the step of a restore": lambda run, it: Checkpointer(run).restore({}, it),
    "a tag of a restore": lambda run, it: Checkpointer(run).restore({}, tag=it),
    "strict": lambda run, it: Checkpointer(run).restore({}, strict=it),
    "rename": lambda run, it: Checkpointer(run).restore({}, rename=it),
    "a signal's time": lambda run, it: Checkpointer(run).leave_on(signal.SIGUSR2, within_s=[it]),
}


@pytest.mark.parametrize("it", [10**5000, Mute()], ids=["10**5000", "mute"])
@pytest.mark.parametrize("where", PASSED)
def test_what_repr_cannot_show_is_refused_like_anything_else(
    tmp_path: Path, where: str, it: Any
) -> None:
    with pytest.raises(UsageError, match="which repr\\(\\) cannot show"):
        PASSED[where](str(tmp_path / "run"), it)


INSIDE: dict[str, Callable[[Path, Path], object]] = {
    "run": lambda _, inside: Checkpointer(inside).save(1, {}),
    "level": lambda run, inside: Checkpointer(run, levels=[Directory(), Directory(path=inside)]),
    "copy": lambda run, inside: statehold.copy_step(run, inside),
    "export": lambda run, inside: export_step(run, inside, "torch"),
}


@pytest.mark.parametrize("by_link", [False, True])
@pytest.mark.parametrize("what", INSIDE)
def test_nothing_is_made_in_the_directory_of_a_step(
    tmp_path: Path, what: str, by_link: bool
) -> None:
    """It would be deleted with the step, without a word."""
    run = tmp_path / "run"
    with Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(5)}).wait("committed", DEADLINE_S)
    step, latest = run / "step-000000000001", tmp_path / "latest"
    latest.symlink_to(step)
    before = sorted(step.rglob("*"))
    with pytest.raises(UsageError, match="would lie in the directory of a step"):
        INSIDE[what](run, (latest if by_link else step) / "made/here")
    with pytest.raises(UsageError, match="the run is the directory of a step"):
        Checkpointer(latest)  # it would seem to have no step
    assert sorted(step.rglob("*")) == before
