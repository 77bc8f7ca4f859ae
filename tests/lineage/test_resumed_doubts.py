"""What a job does not link of the step that it goes on from: files that may have other bytes."""

from __future__ import annotations

from typing import Any

import pytest

from statehold.steps.copying import is_shared
from support.descended import Job, begin, check
from support.faults import DEADLINE_S, SMALL, must
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.levels import LATER, NEAR, opened_on, settle, step_path, two
from support.plain_runs import BASE
from support.sharing import Tuned, TunedRun, names, same

pytestmark = pytest.mark.usefixtures("small_shared_files")


def _save(job: Job, step: int, state: dict[str, Any]) -> int:
    """The bytes that the step has by second names."""
    save = job.ckpt.save(step, state)
    save.wait("committed", DEADLINE_S)
    inside(job.ckpt).pipeline.drain(DEADLINE_S)
    return save.stats.linked_bytes or 0


@pytest.mark.parametrize("is_rewound", [False, True], ids=["saved again", "rewound"])
def test_a_file_of_another_save_of_the_step(fs: SimFs, is_rewound: bool) -> None:
    """The restored parts are not in the first save, which replaces the restored step."""
    begin(fs, steps=3)
    job = Job(fs, BASE)
    assert job.restored == 3
    other = {"other": Tuned()}
    if is_rewound:
        job.ckpt.rewind(2)
    _save(job, 3, other)
    assert _save(job, 4, job.state) == 0
    assert _save(job, 5, job.state) > job.model.base_bytes  # what step 4 has written
    job.end()
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        for step in (4, 5):
            found = Tuned()
            assert ckpt.restore({"model": found}, step) == step
            assert same(found.bits(), job.model.bits())


def _rot(fs: SimFs, step: int) -> None:
    """Change a byte of each shared file that the near level has of this step."""
    folder = step_path(NEAR, step)
    shared = [name for name in names(fs, folder) if is_shared(name)]
    assert shared
    for name in shared:
        fs.corrupt(f"{folder}/{name}", (fs.stat_bytes(f"{folder}/{name}") or 0) * 2 // 3, 0x04)


def test_a_file_that_the_restore_has_found_damaged(fs: SimFs) -> None:
    with opened_on(fs, far=LATER) as ckpt:
        TunedRun(ckpt, Tuned()).save(1)
        settle(ckpt)
    _rot(fs, 1)
    job = Job(fs, "/run", levels=two({"keep": 3}, LATER))
    assert job.restored == 1  # from the far level
    assert job.linked(2) == 0
    for step in range(3, 6):
        assert job.linked(step) > job.model.base_bytes
    expected = {step: job.expected[step] for step in (3, 4, 5)}
    job.end()
    check(fs, NEAR, expected)


def test_a_damaged_file_of_this_very_job(fs: SimFs) -> None:
    """It has written the file itself, and goes back to a step that has it."""
    job = Job(fs, "/run", levels=two(far=LATER))
    job.save(1)
    settle(job.ckpt)
    assert job.linked(2) > job.model.base_bytes
    _rot(fs, 1)
    assert job.ckpt.restore(job.state, 1) == 1
    job.ckpt.rewind(1)
    linked = [job.linked(step) for step in range(2, 7)]
    assert linked[0] == 0
    assert linked[-1] > job.model.base_bytes
    expected = {step: job.expected[step] for step in range(2, 7)}
    job.end()
    found = Tuned()
    with checkpointer_on(fs, NEAR, **SMALL) as ckpt:
        for step, bits in expected.items():
            assert ckpt.restore({"model": found}, step) == step
            assert same(found.bits(), bits)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "gone"])
def test_a_file_that_is_not_whole_and_that_the_restore_did_not_read(
    fs: SimFs, is_cut: bool
) -> None:
    """Found by seed 103394 of the simulation: steps that linked it could not be read."""
    expected = begin(fs, steps=2)
    folder = step_path(BASE, 2)
    shared = [name for name in names(fs, folder) if is_shared(name)]
    assert shared
    for name in shared:
        raw = fs.read_file(f"{folder}/{name}", 1 << 30)
        fs.unlink(f"{folder}/{name}")
        if is_cut:
            fs.write_file(f"{folder}/{name}", raw[: len(raw) // 2])
    model = Tuned()
    model.load_state_dict(expected[2])
    state = {"model": model}
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        must(ckpt.restore(state, 2, only=["model.head"]) == 2)
        for step in (3, 4):
            ckpt.save(step, state).wait("committed", DEADLINE_S)
        inside(ckpt).pipeline.drain(DEADLINE_S)
        assert ckpt.steps()[-2:] == [3, 4]
        found = Tuned()
        must(ckpt.restore({"model": found}, 4) == 4)
        assert same(found.bits(), model.bits())
