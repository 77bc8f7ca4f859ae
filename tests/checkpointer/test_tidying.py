"""Old files that cannot be cleared away fail no save; steps that are known are listed no more."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
import torch

from statehold.errors import StepOrderError
from support.faults import DEADLINE_S, SMALL, small, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside

RUN = "/runs/x"


def content(step: int) -> dict[str, Any]:
    return {"w": torch.arange(1000) + step, "step": step}


def save(ckpt: Any, step: int) -> None:
    ckpt.save(step, content(step)).wait("committed", DEADLINE_S)
    inside(ckpt).pipeline.drain()


@pytest.mark.thorough
@pytest.mark.parametrize("operation", ["unlink", "rmdir"])
@pytest.mark.parametrize("reuse", [True, False])
def test_what_cannot_be_deleted_fails_no_save(operation: str, reuse: bool) -> None:
    """Everything that is deleted is old: whichever of these operations fails, steps are saved."""
    for skip in range(20):
        fs = SimFs(seed=skip)
        with checkpointer_on(fs, RUN, keep=1, **small(reuse_files=reuse)) as ckpt:
            save(ckpt, 1)
        for left in ("step-000000000009.partial", "step-000000000008.5f3a09c1-7.partial"):
            fs.mkdir(f"{RUN}/{left}")
            fs.write_file(f"{RUN}/{left}/x", b"left by a crash")
        with checkpointer_on(fs, RUN, keep=1, **small(reuse_files=reuse)) as ckpt:
            fs.fail_next(operation, errno.EIO, 1, skip)
            for step in (2, 3, 3, 4):
                save(ckpt, step)
            fired = fs.fired.get("injected", 0)
            fs.set_faults()
            assert ckpt.steps()[-1] == 4
            got = ckpt.restore(content(0))
            assert got == 4
        if not fired:
            break
    assert skip >= 1


def test_what_is_left_of_a_step_that_was_saved_again_fails_no_save() -> None:
    fs = SimFs(seed=1)
    with checkpointer_on(fs, RUN, **SMALL) as ckpt:
        save(ckpt, 1)
        fs.fail_next("rename", errno.EIO)  # D6 is an exchange; the old one is then held back
        save(ckpt, 1)
        assert fs.fired["injected rename"] == 1
        save(ckpt, 1)
        save(ckpt, 2)
        assert ckpt.steps() == [1, 2]


def test_a_spare_file_that_cannot_be_taken_is_replaced_by_a_new_one() -> None:
    fs = SimFs(seed=1)
    with checkpointer_on(fs, RUN, keep=1, **SMALL) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
        fs.fail_next("rename", errno.EIO)  # of the spare file, before D6
        save(ckpt, 3)
        assert fs.fired["injected rename"] == 1
        assert ckpt.steps() == [3]


def test_the_trainer_lists_the_run_once() -> None:
    """A save lists nothing. A refused one lists the run once, for its hint."""
    fs = SimFs(seed=1)
    trainer = threading.get_ident()
    listed: list[int] = []

    def before(operation: str, _: tuple[Any, ...]) -> None:
        if operation == "listdir" and threading.get_ident() == trainer:
            listed.append(1)

    with checkpointer_on(fs, RUN, keep=2, **SMALL) as ckpt:
        save(ckpt, 1)
        spy_on(ckpt, before)
        for step in range(2, 7):
            save(ckpt, step)
            assert not listed
            with pytest.raises(StepOrderError, match=f"older than step {step}"):
                ckpt.save(step - 1, content(step))
            assert len(listed) <= 1
            listed.clear()
        # What is given up is known, too.
        ckpt.rewind(5)
        with pytest.raises(StepOrderError, match="older than step 5"):
            ckpt.save(4, content(4))
        save(ckpt, 6)
        assert ckpt.steps() == [5, 6]
