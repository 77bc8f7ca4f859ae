"""What a user may get wrong is refused at once, and says what was expected, what came, and why."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import Checkpointer, Directory, Memory, ObjectStore
from statehold.cli.codes import NotFoundError
from statehold.errors import StorageError, UsageError
from statehold.observe import once
from statehold.reading.places import run_of
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
        (lambda: Checkpointer("x", level=[]), "did you mean levels?"),
        (lambda: Checkpointer("x", stagingbytes=1), "did you mean staging_bytes"),
        (lambda: Checkpointer("x", levels=[Directory(), Directory(path="y")]), 'name="..."'),
    ],
)
def test_what_cannot_be_meant_says_what_was_expected(make: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert told in str(caught.value)


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
    monkeypatch.setattr("statehold.checkpoint.levels.opening._is_memory", lambda path: False)
    monkeypatch.setattr(once, "_logged", set())
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


def test_a_url_is_no_run_for_commands(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotFoundError) as caught:
        run_of("file:///tmp/x")
    assert "--levels" in str(caught.value)


def test_an_error_shows_its_facts_where_it_is_one_of_many() -> None:
    error = StorageError("cannot list", errno=5, path="/x")
    assert repr(error) == "StorageError('cannot list', path='/x', errno='EIO (Input/output error)')"
