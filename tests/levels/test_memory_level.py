"""A level in memory: one copy into files that are mapped, which outlive the process.

On a memory file system of its own below /dev/shm; skipped, and counted, where there is none.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import statehold
from statehold import errors
from statehold.checkpoint.levels.memory import memory_root
from support import scripts
from support.faults import DEADLINE_S, SMALL, Holdup, spy_on
from support.inside import inside
from support.levels import settle
from support.memory_left import free_below

NUMEL = 2_000_000
BYTES = 4 * NUMEL


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def content(step: int) -> dict[str, object]:
    return {"w": torch.arange(NUMEL, dtype=torch.int32) * 7 + step, "step": step}


def levels(memory: Path, **options: object) -> list[statehold.Memory | statehold.Directory]:
    return [statehold.Memory(path=memory, keep=1), statehold.Directory(**options)]


def mapped_files(folder: Path) -> list[str]:
    """The files below `folder` that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(None, 5)[5] for line in lines if f"{folder}/" in line})


def test_steps_are_copied_once_into_files_that_are_used_again(memory: Path, run: Path) -> None:
    with statehold.Checkpointer(run, levels=levels(memory, every=4), **SMALL) as ckpt:
        reused = []
        for step in range(1, 8):
            save = ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
            settle(ckpt)
            reused.append(save.stats.reused)
        # The second finds one that was made ready; later ones the one that was retired.
        assert reused == [False] + [True] * 6
        assert len(mapped_files(memory)) == 2  # of the step that is kept, and the spare one
        live = content(0)
        got = ckpt.restore(live)
        assert got == 7
        assert torch.equal(live["w"], content(7)["w"])  # type: ignore[arg-type]
        assert [level.newest for level in ckpt.levels()] == [7, 4]
    assert mapped_files(memory) == []
    with statehold.Checkpointer(run, **SMALL) as ckpt:  # what is in the run directory itself
        assert ckpt.steps() == [1, 4, 7]
        got = ckpt.restore(live, 4)
        assert got == 4
    assert torch.equal(live["w"], content(4)["w"])  # type: ignore[arg-type]


def test_a_damaged_manifest_is_named_where_it_is(memory: Path, run: Path, caplog) -> None:
    with statehold.Checkpointer(run, levels=levels(memory), **SMALL) as ckpt:
        ckpt.save(1, content(1)).wait("committed", DEADLINE_S)
    damaged, intact = (each / "step-000000000001/manifest.json" for each in (memory, run))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with statehold.Checkpointer(run, levels=levels(memory), **SMALL) as ckpt:
        assert ckpt.restore(content(0)) == 1
    assert "not intact at level memory" in caplog.text
    assert str(damaged) in caplog.text
    assert str(intact) not in caplog.text


def test_memory_of_steps_that_are_given_up_comes_back(memory: Path, run: Path) -> None:
    def used() -> int:
        return sum(
            os.stat(os.path.join(folder, name)).st_blocks * 512
            for folder, _, names in os.walk(memory)
            for name in names
        )

    memory.mkdir(parents=True)
    with statehold.Checkpointer(run, levels=levels(memory), **SMALL) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
        settle(ckpt)
        assert used() < 3.2 * BYTES
        ckpt.rewind(1)
        ckpt.save(3, {"small": torch.ones(3)}).wait("committed", DEADLINE_S)
        settle(ckpt)
    assert used() < BYTES
    assert mapped_files(memory) == []


def test_a_step_saved_again_keeps_its_own_bytes(memory: Path, run: Path) -> None:
    """The file of the replaced step is overwritten by the next save, not before."""
    with statehold.Checkpointer(run, levels=levels(memory, every=100), **SMALL) as ckpt:
        for value in range(5):
            again = content(1) | {"w": torch.full((NUMEL,), value, dtype=torch.int32)}
            ckpt.save(1, again).wait("committed", DEADLINE_S)
            live = content(0)
            got = ckpt.restore(live)
            assert got == 1
            assert bool((live["w"] == value).all())  # type: ignore[attr-defined]


def test_a_step_that_is_being_saved_is_left_alone_by_the_next_save_of_it(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may become free at any moment, as when a copy to another level has ended."""
    with statehold.Checkpointer(run, levels=levels(memory, every=100), **SMALL) as ckpt:
        # The first of the two is to be opened by the thread that is held up.
        monkeypatch.setattr(inside(ckpt).levels.store, "make_ready", lambda *_: None)
        ckpt.save(1, {"w": torch.zeros(99)}).wait("committed", DEADLINE_S)
        holdup = Holdup(ckpt)
        first = ckpt.save(2, {"w": torch.ones(99)})
        reached = holdup.waiting.wait(DEADLINE_S)
        assert reached
        monkeypatch.setattr(inside(ckpt).levels.store, "has_ready", lambda _name: True)
        second = ckpt.save(2, {"w": torch.full((99,), 2.0)})
        holdup.release()
        first.wait("committed", DEADLINE_S)
        second.wait("committed", DEADLINE_S)
        live = {"w": torch.zeros(99)}
        got = ckpt.restore(live)
        assert got == 2
    assert live["w"].eq(2).all()


def test_a_failed_save_gives_its_memory_back(memory: Path, run: Path) -> None:
    with statehold.Checkpointer(run, levels=levels(memory, every=100), **SMALL) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
        broken = [4]

        def before(operation: str, _args: tuple[object, ...]) -> None:
            if operation == "write_file" and broken:
                broken.clear()
                raise errors.storage_error("write a manifest", errno.EIO, "somewhere")

        spy_on(ckpt, before)
        save = ckpt.save(4, content(4))
        with pytest.raises(errors.StorageError):
            save.wait("committed", DEADLINE_S)
        assert not broken
        assert ckpt.steps()[-1] == 3
        ckpt.save(5, content(5)).wait("committed", DEADLINE_S)
        live = content(0)
        got = ckpt.restore(live)
        assert got == 5
        assert torch.equal(live["w"], content(5)["w"])  # type: ignore[arg-type]
        settle(ckpt)  # one may still be copied elsewhere
        inside(ckpt).pipeline.drain()  # a copy that ends gives a file back
        assert len(mapped_files(memory)) <= 2


SCRIPT = """
import os, signal, sys, torch, statehold
levels = [statehold.Memory(path=sys.argv[1]), statehold.Directory(every=1000)]
ckpt = statehold.Checkpointer(sys.argv[2], levels=levels, staging_bytes="2MiB",
    io=statehold.Io(buffer_bytes="1MiB"))
for step in range(1, 6):
    w = torch.arange(2_000_000, dtype=torch.int32) * 7 + step
    ckpt.save(step, {"w": w, "step": step}).wait("committed", 60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_a_killed_process_leaves_its_newest_step(memory: Path, run: Path) -> None:
    done = scripts.run(["-c", SCRIPT, memory, run])
    assert done.returncode == -signal.SIGKILL
    live = content(0)
    with statehold.Checkpointer(run, levels=levels(memory), **SMALL) as ckpt:
        got = ckpt.restore(live)
        assert got == 5
        assert torch.equal(live["w"], content(5)["w"])  # type: ignore[arg-type]
        ckpt.save(6, content(6))
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        assert ckpt.steps()[-1] == 6


def test_the_tests_leave_no_steps_of_their_runs_in_memory(tmp_path: Path) -> None:
    saved, other = tmp_path / "session" / "run", tmp_path / "other"
    roots = [Path(memory_root(str(each))) for each in (saved, other)]
    for each in (saved, other):
        with statehold.Checkpointer(each, levels=[statehold.Memory(), statehold.Directory()]) as c:
            c.save(1, {"step": 1}).wait("committed", DEADLINE_S)
    assert all(root.is_dir() for root in roots)
    shutil.rmtree(saved)  # as when somebody empties the folder of temporary files
    free_below(tmp_path / "session")
    assert [root.exists() for root in roots] == [False, True]
    free_below(tmp_path)
    assert not roots[1].exists()
