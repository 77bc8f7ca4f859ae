"""Links, FIFOs, devices and directories in a run directory: refused by name, never followed.

Holds for every test: it ends, and a bystander outside of the run is afterwards what it was. The run
directory itself may be reached through links.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import statehold
import statehold.integrations.dcp
from statehold import errors
from statehold.ranks.board import DirectoryBoard
from support.faults import DEADLINE_S, SMALL

DATA = "rank-00000-of-00001.safetensors"
Make = Callable[[Path, Path], None]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3000,), value), "epoch": 3}


def step_dir(run: Path, step: int, suffix: str = "") -> Path:
    return run / f"step-{step:012d}{suffix}"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 1 and 2."""
    run = tmp_path / "run"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
    return run


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory that must stay as it is: it looks like a step, as a careful attacker's would."""
    run = tmp_path / "other"
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(2, state(99)).wait("committed", DEADLINE_S)
    outside = step_dir(run, 2)
    (outside / "precious").write_bytes(b"x" * 10_000)
    before = content(outside)
    yield outside
    assert content(outside) == before
    assert not outside.is_symlink()


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / path.name)


def link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def link_in_the_step(path: Path, outside: Path) -> None:
    twin = path.with_name("twin")
    twin.write_bytes((outside / path.name).read_bytes())
    path.symlink_to("twin")


def fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, outside: Path) -> None:
    path.mkdir()


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device node needs privileges")


KINDS = [link_to_file, link_to_nothing, link_in_the_step, fifo, directory, device]


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Ends the process where somebody hangs on a FIFO: nothing else would."""
    done = threading.Event()

    def rescue() -> None:
        if not done.wait(DEADLINE_S):
            os._exit(86)

    threading.Thread(target=rescue, daemon=True).start()
    yield
    done.set()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", DATA])
def test_a_file_of_a_step_that_is_none(run: Path, outside: Path, name: str, make: Make) -> None:
    victim = step_dir(run, 2) / name
    victim.unlink()
    make(victim, outside)
    live = state(0)
    with in_time(), statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        with pytest.raises(errors.MissingFileError) as caught:
            ckpt.restore(live, 2)
        assert caught.value.facts["file"] == str(victim)
        with pytest.warns(RuntimeWarning, match="step 2 is damaged; step 1 was restored"):
            got = ckpt.restore(live)
        assert got == 1
        assert live["w"].eq(1).all()
        for step in (3, 4, 5):  # retires, reuses and deletes
            ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
        got = ckpt.restore(live)
        assert got == 5


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", DATA])
def test_a_load_of_a_file_that_is_none(run: Path, outside: Path, name: str, make: Make) -> None:
    victim = step_dir(run, 2) / name
    victim.unlink()
    make(victim, outside)
    reader = statehold.integrations.dcp.StorageReader(victim.parent)
    with in_time(), pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3000)}, storage_reader=reader, no_dist=True)
    assert "something else is where a file should be" in str(caught.value)


@pytest.mark.parametrize("make", KINDS)
def test_a_file_that_is_none_in_a_retired_step(run: Path, outside: Path, make: Make) -> None:
    victim = step_dir(run, 1) / DATA
    victim.unlink()
    make(victim, outside)
    with in_time(), statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        for step in (3, 4, 5):
            ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        assert ckpt.steps() == [5]


@pytest.mark.parametrize("name", ["step-000000000002", "step-000000000003"])
def test_a_step_that_is_a_link(run: Path, outside: Path, name: str) -> None:
    link = run / name
    if link.exists():
        link.rename(run / "set-aside")
    link.symlink_to(outside)
    step = int(name[-12:])
    live = state(0)
    with in_time(), statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        with pytest.raises(errors.StepNotFoundError):
            ckpt.restore(live, step)
        with pytest.raises(errors.StorageError):
            ckpt.save(step, state(7)).wait("committed", DEADLINE_S)
        with pytest.raises(errors.StepNotFoundError):
            ckpt.rewind(0)
        ckpt.save(9, state(9)).wait("committed", DEADLINE_S)
        got = ckpt.restore(live)
        assert got == 9
    assert link.is_symlink()


@pytest.mark.parametrize("suffix", [".partial", ".retired", ".5f3a09c1-7.partial", ".corrupt"])
def test_a_leftover_that_is_a_link(run: Path, outside: Path, suffix: str) -> None:
    for step in (2, 3):
        step_dir(run, step, suffix).symlink_to(outside)
    (step_dir(run, 2) / DATA).unlink()  # to be set aside
    live = state(0)
    with in_time(), statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
            got = ckpt.restore(live)
        assert got == 1
        for step in (3, 4, 5):
            with contextlib.suppress(errors.StorageError):
                ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
        got = ckpt.restore(live)
        assert got == 5


@pytest.mark.parametrize("inside", [None, DATA])
def test_spare_files_that_are_links(run: Path, outside: Path, inside: str | None) -> None:
    spare = run / ".spare"
    if inside is None:
        spare.symlink_to(outside)
    else:
        spare.mkdir()
        (spare / inside).symlink_to(outside / inside)
    with in_time(), statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        for step in (3, 4, 5):
            with contextlib.suppress(errors.StorageError):
                ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
        got = ckpt.restore(state(0))
        assert got == 5


@pytest.mark.parametrize("make", [link_to_file, link_to_nothing, fifo, directory, device])
def test_a_lock_that_is_no_file(run: Path, outside: Path, make: Make) -> None:
    (run / ".lock").unlink()
    (outside / ".lock").write_bytes(b"not yours")
    make(run / ".lock", outside)
    try:
        with in_time(), statehold.Checkpointer(run, **SMALL) as ckpt:
            got = ckpt.restore(state(0))  # readers take no lock
            assert got == 2
            with pytest.raises(errors.StorageError, match="lock"):
                ckpt.save(3, state(3))
        assert (outside / ".lock").read_bytes() == b"not yours"
    finally:
        (outside / ".lock").unlink()


def test_notes_that_are_links(run: Path, outside: Path) -> None:
    (run / ".peers").symlink_to(outside)
    with pytest.raises(errors.StorageError, match="notes"):
        DirectoryBoard(run / ".peers").open(0, 1, 0)


def test_a_note_that_is_a_fifo(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    os.mkfifo(tmp_path / "notes" / "call")
    with in_time(), pytest.raises(errors.StorageError, match="note"):
        DirectoryBoard(tmp_path / "notes").open(1, 2, 0)


def test_a_run_directory_behind_links(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    for run in (tmp_path / "link", tmp_path / "link" / "deeper"):
        live = state(0)
        with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, state(step)).wait("committed", DEADLINE_S)
            got = ckpt.restore(live)
            assert got == 3
        assert live["w"].eq(3).all()
    assert step_dir(real, 3).is_dir()
    reader = statehold.integrations.dcp.StorageReader(step_dir(tmp_path / "link", 3))
    loaded = {"w": torch.zeros(3000)}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["w"].eq(3).all()


def test_a_checkpoint_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    for value in (1.0, 2.0):
        dcp.save(
            {"w": torch.full((3,), value)},
            storage_writer=statehold.integrations.dcp.StorageWriter(tmp_path / "latest"),
            no_dist=True,
        )
        loaded = {"w": torch.zeros(3)}
        reader = statehold.integrations.dcp.StorageReader(tmp_path / "latest")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert loaded["w"].eq(value).all()
    assert sorted(os.listdir(tmp_path)) == ["latest", "real"]
