"""A directory of a run that holds a step under another name does not count, and is not passed over
in silence."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
from statehold import Checkpointer
from statehold.cli import main
from statehold.dcp import StorageWriter
from statehold.errors import StepNotFoundError
from support.faults import DEADLINE_S, SMALL


def by_dcp(run: Path) -> None:
    state = {"w": torch.full((3,), 100.0)}
    where = run / "step-100"
    dcp.save(state, checkpoint_id=where, storage_writer=StorageWriter(), no_dist=True)


def by_a_person(run: Path) -> None:
    with Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(100, {"w": torch.full((3,), 100.0)}).wait("committed", DEADLINE_S)
    os.rename(run / "step-000000000100", run / "step-100")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [by_dcp, by_a_person])
@pytest.mark.parametrize("has_others", [False, True])
def test_it_is_named_with_the_way(
    tmp_path: Path,
    make: Callable[[Path], None],
    has_others: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path)
    state = {"w": torch.zeros(3)}
    if has_others:
        with Checkpointer(tmp_path, **SMALL) as ckpt:
            ckpt.save(7, state).wait("committed", DEADLINE_S)
    way = "rename step-100 to step-000000000100"
    with Checkpointer(tmp_path, **SMALL) as ckpt:
        for _ in range(2):
            assert ckpt.restore(state) == (7 if has_others else None)
    assert caplog.text.count(way) == (0 if has_others else 1)  # a run with steps goes on
    main(["ls", str(tmp_path)])
    assert way in capsys.readouterr().err
    if not has_others:
        with pytest.raises(StepNotFoundError, match=way):
            statehold.load(tmp_path)
        with (
            Checkpointer(tmp_path / "other", **SMALL) as ckpt,
            pytest.raises(StepNotFoundError, match=way),
        ):
            ckpt.restore(state, source=tmp_path)

    os.rename(tmp_path / "step-100", tmp_path / "step-000000000100")
    with Checkpointer(tmp_path, **SMALL) as ckpt:
        assert ckpt.restore(state) == 100
    assert state["w"].tolist() == [100.0] * 3


def opens(run: Path) -> None:
    assert statehold.open(run).steps() == []


def subscribes(run: Path) -> None:
    statehold.subscribe(run, {"w": torch.zeros(3)}).close()


def begins_from_it(run: Path) -> None:
    with Checkpointer(run / "child", parent=f"{run}@newest", **SMALL) as ckpt:
        try:
            ckpt.restore({"w": torch.zeros(3)})
        except StepNotFoundError as error:
            logging.getLogger("statehold").warning("%s", error)


@pytest.mark.parametrize("reader", [opens, subscribes, begins_from_it])
def test_so_it_is_for_whoever_else_finds_no_step(
    tmp_path: Path,
    reader: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_a_person(tmp_path)
    reader(tmp_path)
    assert caplog.text.count("rename step-100 to step-000000000100") == 1


@pytest.mark.filterwarnings("ignore:step 8 is damaged")
def test_what_is_no_step_or_is_no_longer_one_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.zeros(3)}
    with Checkpointer(tmp_path, **SMALL) as ckpt:
        for step in (7, 8):
            ckpt.save(step, state).wait("committed", DEADLINE_S)
    (tmp_path / "step-000000000008/manifest.json").write_text("{}")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/manifest.json").write_text('{"name": "an app"}')
    (tmp_path / "step-000000000007.retired").mkdir()
    for _ in range(2):  # the second time, step 8 has been set aside
        with Checkpointer(tmp_path, **SMALL) as ckpt:
            assert ckpt.restore(state) == 7
    assert (tmp_path / "step-000000000008.corrupt").is_dir()
    assert "rename" not in caplog.text
