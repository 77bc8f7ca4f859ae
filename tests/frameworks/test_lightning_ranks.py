"""Several ranks of Lightning resume: rank 0 finds the step, and all take it, or its error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lightning")

import statehold
from statehold.errors import StepNotFoundError
from statehold.integrations.lightning import strategy
from statehold.integrations.lightning.checkpoints import Checkpoint
from support.faults import DEADLINE_S


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_decides_which_step_is_resumed(tmp_path: Path, rank: int) -> None:
    """Two ranks gave the path its step at the same time, and one failed."""
    checkpoint, told = Checkpoint(tmp_path / "last.ckpt"), []
    with statehold.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
    checkpoint.announce(str(tmp_path), 1)  # and the job was killed before it gave the step
    trainer = SimpleNamespace(
        is_global_zero=rank == 0,
        training=True,
        strategy=SimpleNamespace(broadcast=lambda what: told.append(what) or (False, None)),
    )
    stock = {"load_checkpoint": lambda *_, **__: {"stock": True}}
    resuming = strategy.Restoring(trainer, stock)
    assert resuming.load_checkpoint(checkpoint.path) == {"stock": True}
    assert checkpoint.holds(1) == (rank == 0)
    assert told == [(True, (str(checkpoint.steps), 1, None)) if rank == 0 else None]


def test_all_ranks_raise_what_rank_0_has_found(tmp_path: Path) -> None:
    told = []

    def broadcast(what: object) -> object:
        told.append(what)
        return StepNotFoundError("of rank 0")

    for is_zero in (True, False):
        trainer = SimpleNamespace(
            is_global_zero=is_zero, training=False, strategy=SimpleNamespace(broadcast=broadcast)
        )
        checkpoint = Checkpoint(tmp_path / "last.ckpt")
        checkpoint.announce(str(tmp_path), 1)
        with pytest.raises(StepNotFoundError, match="of rank 0"):
            strategy.Restoring(trainer, {}).load_checkpoint(checkpoint.path)
    assert [type(each) for each in told] == [StepNotFoundError, type(None)]
