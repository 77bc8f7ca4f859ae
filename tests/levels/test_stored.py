"""State that lies in files reaches every level: by second names, or as a copy like any file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from statehold.layout.layout import Layout, Mesh
from support.faults import DEADLINE_S, SMALL
from support.hosts import HostRanks, disks
from support.in_memory import SimFs, checkpointer_on
from support.levels import FAR, NEAR, files, opened_on, settle
from support.stored import OnFiles

CUTS = ([("avg", 0, 60_000)], [("avg", 60_000, 100_000)])


def tensors() -> dict[str, torch.Tensor]:
    return {"avg": torch.arange(100_000, dtype=torch.float32)}


def state_of(stored: OnFiles) -> dict[str, Any]:
    return {"optimizer": stored, "weight": torch.full((300,), stored.value)}


def check(ckpt: statehold.Checkpointer, step: int, value: float) -> None:
    moments = {"avg": torch.zeros(100_000)}
    found = {"optimizer": {"moments": moments, "value": -1.0}, "weight": torch.zeros(300)}
    assert ckpt.restore(found, step=step) == step
    assert torch.equal(moments["avg"], tensors()["avg"] + value)


def test_a_farther_level_gets_a_copy_of_its_own() -> None:
    fs = SimFs(seed=1)
    stored = OnFiles(fs, "/opt", tensors(), CUTS)
    with opened_on(fs) as ckpt:
        ckpt.save(1, state_of(stored)).wait("committed", DEADLINE_S)
        settle(ckpt)
    near, far = files(fs, NEAR, 1), files(fs, FAR, 1)
    assert near == far
    for part in (1, 2):
        name = f"step-{1:012d}/rank-00000-of-00001-{part}.safetensors"
        assert not fs.can_reuse(f"{NEAR}/{name}")
        assert fs.can_reuse(f"{FAR}/{name}")
    with checkpointer_on(fs, FAR, **SMALL) as ckpt:
        check(ckpt, 1, 0.0)
    stored.close()


def test_a_level_in_memory_copies_and_the_next_one_too(memory: Path, tmp_path: Path) -> None:
    fs = _core.open_fs("threads")
    stored = OnFiles(fs, str(tmp_path / "opt"), tensors(), CUTS)
    levels = [statehold.Memory(path=memory, keep=1), statehold.Directory(keep=2)]
    run = str(tmp_path / "run")
    with checkpointer_on(fs, run, levels=levels, **SMALL) as ckpt:
        for step in range(1, 5):
            done = ckpt.save(step, state_of(stored)).wait("committed", DEADLINE_S)
            assert done.stats.linked_bytes == 0
            assert done.stats.files == 3
            settle(ckpt)
            check(ckpt, step, step - 1.0)
            stored.update(1.0)
    shutil.rmtree(memory)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        assert ckpt.steps() == [3, 4]
        check(ckpt, 4, 3.0)
    stored.close()
    fs.close()


def test_a_level_in_memory_links_what_lies_there(memory: Path, tmp_path: Path) -> None:
    """The object has its files in the same memory: no byte is copied, and none overwritten."""
    fs = _core.open_fs("threads")
    memory.mkdir()
    stored = OnFiles(fs, str(memory / "opt"), tensors(), CUTS)
    levels = [statehold.Memory(path=memory / "run", keep=2), statehold.Directory(keep=2)]
    with checkpointer_on(fs, str(tmp_path / "run"), levels=levels, **SMALL) as ckpt:
        for step in range(1, 7):
            done = ckpt.save(step, state_of(stored)).wait("committed", DEADLINE_S)
            assert done.stats.linked_bytes == sum(file.file_bytes for file in stored.files)
            settle(ckpt)
            stored.update(1.0)
            for kept in ckpt.steps():
                check(ckpt, kept, kept - 1.0)
    assert stored.reused > 0
    stored.close()
    fs.close()


def test_an_object_store_gets_the_files(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    fs = _core.open_fs("threads")
    stored = OnFiles(fs, str(tmp_path / "opt"), tensors(), CUTS)
    (tmp_path / "bucket").mkdir()
    levels = [
        statehold.Directory(keep=1),
        statehold.ObjectStore(f"file://{tmp_path / 'bucket'}/llama"),
    ]
    run = tmp_path / "run"
    with checkpointer_on(fs, str(run), levels=levels, **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(stored)).wait("committed", DEADLINE_S)
            settle(ckpt)
            stored.update(1.0)
    shutil.rmtree(run)
    with statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt:
        for step in (1, 2):
            check(ckpt, step, step - 1.0)
    stored.close()
    fs.close()


def test_other_hosts_get_the_files() -> None:
    hosts = disks(3)
    layout = Layout(Mesh((3,), (0, 1, 2)), ((0, 0),))
    whole = torch.arange(3000, dtype=torch.float32)
    parts = [
        OnFiles(
            fs, "/opt", {"avg": whole[rank * 1000 : rank * 1000 + 1000].clone()},
            ([("avg", 0, 100)], [("avg", 100, 1000)]), {"avg": (layout, (3000,), rank)},
        )
        for rank, fs in enumerate(hosts)
    ]  # fmt: skip
    with HostRanks(hosts) as ranks:
        ranks.save(1, lambda rank: {"optimizer": parts[rank]})
        ranks.each(lambda rank: settle(ranks.ckpts[rank]))
    lost = SimFs(seed=9)
    with HostRanks([lost, *hosts[1:]]) as ranks:
        found = [
            {"optimizer": {"moments": {"avg": torch.zeros(3000)}, "value": 0.0}} for _ in hosts
        ]
        assert ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank])) == [1, 1, 1]
    for each in found:
        assert torch.equal(each["optimizer"]["moments"]["avg"], whole)  # type: ignore[index]
    for part in parts:
        part.close()
