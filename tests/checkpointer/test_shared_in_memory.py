"""Shared files where the first level is memory, and a save may begin with its file attached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import statehold
from support.faults import DEADLINE_S, SMALL
from support.sharing import Tuned, same

pytestmark = pytest.mark.usefixtures("small_shared_files")


@pytest.fixture
def ckpt(tmp_path: Path, memory: Path) -> Iterator[statehold.Checkpointer]:
    levels = [statehold.Memory(path=memory, keep=1, agent=False)]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        yield ckpt


def saved(ckpt: statehold.Checkpointer, step: int, model: Tuned) -> statehold.Save:
    save = ckpt.save(step, {"model": model})
    save.wait("committed", DEADLINE_S)
    live = Tuned()
    assert ckpt.restore({"model": live}) == step
    assert same(live.bits(), model.bits())
    return save


def test_tensors_that_turn_out_to_stay_the_same(ckpt: statehold.Checkpointer) -> None:
    """Their files are new when the file of the save is there already."""
    model = Tuned()
    model.base.requires_grad_(True)
    linked = []
    for step in range(1, 7):
        model.train_once()
        linked.append(saved(ckpt, step, model).stats.linked_bytes)
    assert linked[0] == 0
    assert linked[-1] > 0


def test_a_tensor_that_is_refuted_is_written(ckpt: statehold.Checkpointer) -> None:
    model = Tuned()
    for step in range(1, 7):
        model.train_once()
        if step == 5:
            model.base[1].data.view(-1).numpy()[7] += 1  # no counter has moved
        save = saved(ckpt, step, model)
        assert step == 1 or save.stats.linked_bytes > 0
