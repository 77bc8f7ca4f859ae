"""Files in memory that are made before a save asks for them: by counting, never by time."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch

import statehold
from statehold import _core
from statehold.steps import ready
from support import scripts
from support.faults import DEADLINE_S, SMALL
from support.inside import inside
from support.levels import settle
from support.ranks import Ranks

NUMEL = 300_000
LATER = {"every": 1_000_000}  # after the first step no copies: nothing but saves has a file


def levels(memory: Path, keep: int) -> list[statehold.Memory | statehold.Directory]:
    # An agent would clear up, too.
    return [statehold.Memory(path=memory, keep=keep, agent=False), statehold.Directory(**LATER)]


def content(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((NUMEL,), float(step))}


def data_files(memory: Path) -> int:
    return len(list(memory.rglob("*.safetensors")))


def save(ckpt: statehold.Checkpointer, step: int) -> bool:
    """Whether a file was there for it; nothing is under way on return, and a spare one is ready."""
    saved = ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
    settle(ckpt)
    inside(ckpt).pipeline.drain()  # a copy that ends gives a file back
    inside(ckpt).levels.store.ready.wait()
    return bool(saved.stats.reused)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_first_save_of_a_run_makes_its_file(
    memory: Path, tmp_path: Path, keep: int
) -> None:
    reused, files = [], []
    with statehold.Checkpointer(tmp_path / "run", levels=levels(memory, keep), **SMALL) as ckpt:
        for step in range(1, keep + 4):
            reused.append(save(ckpt, step))
            files.append(data_files(memory))
    assert reused == [False] + [True] * (keep + 2)
    # Made ahead, but never more than are kept, and one.
    assert files == [min(step + 1, keep + 1) for step in range(1, keep + 4)]
    assert data_files(memory) == keep
    assert not (memory / ready.READY_NAME).exists()


def test_a_step_saved_again_takes_what_is_ready(memory: Path, tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", levels=levels(memory, 2), **SMALL) as ckpt:
        reused = [save(ckpt, 1) for _ in range(4)]
        assert reused == [False, True, True, True]
        assert data_files(memory) <= 3
        live = content(0)
        got = ckpt.restore(live)
    assert got == 1
    assert torch.equal(live["w"], content(1)["w"])


def test_a_state_that_grows_has_room(memory: Path, tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", levels=levels(memory, 2), **SMALL) as ckpt:
        save(ckpt, 1)
        larger = {"w": torch.arange(3 * NUMEL, dtype=torch.float32)}
        saved = ckpt.save(2, larger).wait("committed", DEADLINE_S)
        assert saved.stats.reused
        live = {"w": torch.zeros(3 * NUMEL)}
        got = ckpt.restore(live)
    assert got == 2
    assert torch.equal(live["w"], larger["w"])


def test_memory_that_is_short_is_left_alone(
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ready, "free_bytes", lambda _folder: 7 * NUMEL)
    caplog.set_level(logging.INFO, "statehold")
    with statehold.Checkpointer(tmp_path / "run", levels=levels(memory, 2), **SMALL) as ckpt:
        reused = [save(ckpt, step) for step in range(1, 6)]
    assert reused == [False, False, False, True, True]
    assert "are free" in caplog.text


def test_a_file_that_cannot_be_made_costs_no_save(
    memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.mkdir(parents=True)
    caplog.set_level(logging.INFO, "statehold")
    with statehold.Checkpointer(tmp_path / "run", levels=levels(memory, 2), **SMALL) as ckpt:
        inside(ckpt).prepare_saving()
        (memory / ready.READY_NAME).write_text("in the way")
        reused = [save(ckpt, step) for step in range(1, 6)]
    assert reused == [False, False, False, True, True]
    assert "cannot prepare a file in memory" in caplog.text


TESTS = Path(__file__).parents[1]
SCRIPT = """
import os, signal, sys, torch, statehold
sys.path.insert(0, sys.argv[3])
from support.inside import inside
levels = [statehold.Memory(path=sys.argv[1], agent=False), statehold.Directory()]
ckpt = statehold.Checkpointer(sys.argv[2], levels=levels, staging_bytes="2MiB",
    io=statehold.Io(buffer_bytes="1MiB"))
ckpt.save(1, {"w": torch.ones(300_000)}).wait("committed", 60)
inside(ckpt).pipeline.drain()
inside(ckpt).levels.store.ready.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_cleared(memory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = scripts.run(["-c", SCRIPT, memory, run, TESTS])
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(memory / ready.READY_NAME) != []
    with statehold.Checkpointer(run, levels=levels(memory, 2), **SMALL) as ckpt:
        reused = [save(ckpt, step) for step in (2, 3)]
    assert reused == [False, True]
    assert data_files(memory) == 2
    assert not (memory / ready.READY_NAME).exists()


def test_each_rank_has_its_own(memory: Path, tmp_path: Path) -> None:
    fs = _core.open_fs("threads")
    with Ranks(fs, 2, run=str(tmp_path / "run"), levels=levels(memory, 2)) as job:
        reused = []
        for step in range(1, 6):
            saves = job.save(step, lambda rank, step=step: {"r": {rank: content(step + rank)["w"]}})
            reused.append([save.stats.reused for save in saves])
            for ckpt in job.ckpts:
                settle(ckpt)
                inside(ckpt).pipeline.drain()
                inside(ckpt).levels.store.ready.wait()
        assert len(list(memory.glob(f"{ready.READY_NAME}/*"))) == 0
    assert reused == [[False, False]] + [[True, True]] * 4
    assert data_files(memory) == 2 * 2
    assert not (memory / ready.READY_NAME).exists()
    fs.close()
