"""What lies in memory is uploaded from where it is, and is what was committed all the same."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from statehold.errors import StorageError
from statehold.io.mounts import mount_of
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs
from support.inside import inside
from support.levels import settle

pytest.importorskip("obstore", reason="obstore is not installed: no object stores")
from statehold.steps.objects import ObjectSteps

NUMEL = 6_000_000  # 23 MiB: two blocks
DATA = "rank-00000-of-00001.safetensors"


def content(step: int) -> dict[str, Any]:
    return {"w": torch.arange(NUMEL, dtype=torch.int32) * 7 + step, "step": step}


class HeldUpload:
    """Stops the first upload of a data file once it has been given all blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.blocks: list[memoryview] = []
        self.is_unchanged = False
        upload = ObjectSteps.upload

        def held(
            steps: ObjectSteps,
            step: int,
            attempt: str,
            name: str,
            size: int,
            blocks: Iterable[memoryview],
            before: Callable[[int], None] = lambda _: None,
        ) -> None:
            if name == DATA and not self.blocks:
                self.blocks = blocks = list(blocks)
                self.waiting.set()
                before_it = [hash(bytes(block)) for block in blocks]
                must(self.go_on.wait(DEADLINE_S))
                self.is_unchanged = [hash(bytes(block)) for block in blocks] == before_it
            upload(steps, step, attempt, name, size, blocks, before)

        monkeypatch.setattr(ObjectSteps, "upload", held)


def test_what_is_uploaded_does_not_change_meanwhile(memory, tmp_path, monkeypatch) -> None:
    """The step is saved again, and retired, and its files would be overwritten."""
    (tmp_path / "bucket").mkdir()
    store = statehold.ObjectStore(f"file://{tmp_path}/bucket/run", every=1_000_000)
    levels = [statehold.Memory(path=memory, keep=1), store]
    held = HeldUpload(monkeypatch)
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        ckpt.save(7, content(7)).wait("committed", DEADLINE_S)
        must(held.waiting.wait(DEADLINE_S))
        assert all(block.readonly for block in held.blocks)
        for step in (7, 8, 9, 10):
            ckpt.save(step, content(100 + step)).wait("committed", DEADLINE_S)
        held.go_on.set()
        settle(ckpt)
    assert held.is_unchanged


def test_damage_in_memory_is_found_before_it_is_published(memory, tmp_path, caplog) -> None:
    with statehold.Checkpointer(
        tmp_path / "run", levels=[statehold.Memory(path=memory)], **SMALL
    ) as ckpt:
        ckpt.save(1, content(1)).wait("committed", DEADLINE_S)
    with (memory / "step-000000000001" / DATA).open("r+b") as file:
        file.seek(NUMEL * 3)
        found = file.read(1)
        file.seek(NUMEL * 3)
        file.write(bytes([found[0] ^ 1]))
    (tmp_path / "bucket").mkdir()
    store = statehold.ObjectStore(f"file://{tmp_path}/bucket/run")
    levels = [statehold.Memory(path=memory), store]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        ckpt.flush(DEADLINE_S)
        assert inside(ckpt).levels.places[1].steps() == []
    assert "do not match their checksum" in caplog.text


@pytest.mark.parametrize("kind", ["disk", "simulated"])
def test_what_is_not_in_memory_has_no_view(kind, tmp_path) -> None:
    """Then it is read, block by block."""
    (tmp_path / "file").write_bytes(b"1234")
    if mount_of(str(tmp_path)).kind == "tmpfs":
        pytest.skip("the temporary directory is memory")
    fs: Any = _core.open_fs("threads", 1, 1)
    path = str(tmp_path / "file")
    if kind == "simulated":
        fs, path = SimFs(seed=1), "/file"
        fs.write_file(path, b"1234")
    with pytest.raises(StorageError) as caught:
        fs.open_view(path, 4)
    assert caught.value.errno == errno.EOPNOTSUPP
