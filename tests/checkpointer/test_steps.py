"""What stands for a step: whole numbers of any kind, and nothing else."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

import statehold
from statehold.errors import UsageError
from support.faults import DEADLINE_S, SMALL

NUMBERS = [7, np.int64(7), np.uint8(7), torch.tensor(7)]


@pytest.mark.parametrize("step", NUMBERS, ids=repr)
def test_numbers_of_any_kind(run, step: Any) -> None:
    state = {"x": torch.ones(3)}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(6, state)
        ckpt.leave_on(signal.SIGUSR2, within_s=DEADLINE_S)
        assert not ckpt.is_last(step)
        save = ckpt.save(step, state).wait("committed", DEADLINE_S)
        assert type(save.step) is int
        got = ckpt.restore(state, step)
        assert (got, type(got)) == (7, int)
        ckpt.save(8, state)
        assert ckpt.rewind(step) == [8]
        assert ckpt.steps() == [6, 7]


@pytest.mark.parametrize(
    "step",
    [True, np.True_, torch.tensor(True), 7.0, np.float64(7), "7", -1, 10**12, None, {"x": 1}],
    ids=repr,
)
def test_what_is_no_step(run, step: Any) -> None:
    state = {"x": torch.ones(3)}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(7, state).wait("committed", DEADLINE_S)
        calls = [lambda: ckpt.save(step, state), lambda: ckpt.is_last(step)]
        calls.append(lambda: ckpt.rewind(step))
        if step is not None:
            calls.append(lambda: ckpt.restore(state, step))
        for call in calls:
            with pytest.raises(UsageError, match="a step is a whole number") as caught:
                call()
            assert repr(step)[:80] in str(caught.value)
            assert "save(step, state)" in str(caught.value.hint)
        assert ckpt.steps() == [7]
