"""levels.json: what a run says of its levels, and what is done with one that says something bad."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import Directory, Memory, ObjectStore
from statehold.checkpoint.levels.remembered import FILE_NAME, Remembered, itself, recall, remember
from statehold.errors import CorruptionError
from support.faults import SMALL
from support.levels import save

Change = Callable[[dict[str, Any]], object]


def written(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / FILE_NAME).read_text())
    return found


def test_it_says_where_the_levels_are_and_no_secret(tmp_path: Path) -> None:
    run = tmp_path / "run"
    far = ObjectStore("s3://bucket/llama", options={"endpoint": "http://10.0.0.1:9000"})
    levels = [Memory(path="/dev/shm/x"), Directory(), Directory(path=tmp_path / "b", name="b"), far]
    remember(levels, str(run))
    assert recall(str(run)) == (
        Remembered("memory", "memory", "/dev/shm/x", socket.gethostname()),
        Remembered("directory", "directory", str(run)),
        Remembered("directory", "b", str(tmp_path / "b")),
        Remembered("objects", "objects", "s3://bucket/llama"),
    )
    assert "10.0.0.1" not in (run / FILE_NAME).read_text()
    assert os.listdir(run) == [FILE_NAME]
    moved = run.rename(tmp_path / "moved")
    assert recall(str(moved))[1].where == str(moved)


def test_a_run_of_one_directory_says_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save(ckpt, 1, {"w": torch.ones(3)})
    assert not (run / FILE_NAME).exists()
    assert recall(str(run)) == (itself(str(run)),)


def test_a_save_writes_it_and_the_next_job_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for levels in ([Directory(), Directory(path=tmp_path / "b", name="b")], [Directory()]):
        with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
            save(ckpt, len(ckpt.steps()) + 1, {"w": torch.ones(3)})
        assert [level.name for level in recall(str(run))] == [level.name for level in levels]


def test_a_file_that_cannot_be_written_stops_no_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / FILE_NAME).mkdir(parents=True)
    levels = [Directory(), Directory(path=tmp_path / "b", name="b")]
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        save(ckpt, 1, {"w": torch.ones(3)})
        assert ckpt.steps() == [1]


BROKEN: dict[str, Change] = {
    "another version": lambda d: d.update(version=2),
    "another format": lambda d: d.update(format="x"),
    "a member more": lambda d: d.update(options={}),
    "no levels": lambda d: d.update(levels=[]),
    "too many": lambda d: d.update(levels=d["levels"] * 65),
    "a name twice": lambda d: d.update(levels=d["levels"][:1] * 2),
    "no such kind": lambda d: d["levels"][0].update(kind="tape"),
    "a name that is a path": lambda d: d["levels"][0].update(name="../x"),
    "a relative path": lambda d: d["levels"][0].update(where="../../etc"),
    "a path with a newline": lambda d: d["levels"][0].update(where="/a\nb"),
    "a path that is a number": lambda d: d["levels"][0].update(where=7),
    "a URL with a password": lambda d: d["levels"][1].update(where="s3://me:secret@bucket/x"),
    "a URL of something else": lambda d: d["levels"][1].update(where="http://10.0.0.1/"),
    "a host that is neither here nor there": lambda d: d["levels"][0].update(per_host=1),
    "options": lambda d: d["levels"][1].update(options={"endpoint": "http://10.0.0.1"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_hostile_is_refused(name: str, tmp_path: Path) -> None:
    remember([Directory(path="/a"), ObjectStore("s3://bucket/llama")], str(tmp_path))
    document = written(tmp_path)
    BROKEN[name](document)
    (tmp_path / FILE_NAME).write_text(json.dumps(document))
    with pytest.raises(CorruptionError) as caught:
        recall(str(tmp_path))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 1000, b"0" * (1 << 20)])
def test_what_is_no_list_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(text)
    with pytest.raises(CorruptionError):
        recall(str(tmp_path))


def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    remember([Directory(path="/a"), Directory(path="/b", name="b")], str(elsewhere))
    makers: list[Callable[[Path], object]] = [
        lambda path: path.symlink_to(elsewhere / FILE_NAME),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
    ]
    for number, make in enumerate(makers):
        run = tmp_path / str(number)
        run.mkdir()
        make(run / FILE_NAME)
        with pytest.raises(CorruptionError):
            recall(str(run))
