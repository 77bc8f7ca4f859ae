"""A flush on several ranks is over in its time, whatever the others do, and shifts nothing."""

from __future__ import annotations

import time

import pytest

from statehold.errors import PeerLostError, WaitTimeout
from support.in_memory import SimFs
from support.inside import inside
from support.levels import FAR, LATER, HeldCopy, opened_on, save, settle, steps_at, two
from support.rank_states import state
from support.ranks import Ranks

SHORT_S = 0.5
LONG_S = 20.0  # far below the patience of ranks with one another


def test_a_rank_that_does_not_come_to_a_flush() -> None:
    fs = SimFs(seed=1)
    with Ranks(fs, 2, run="/run", levels=two(far=LATER)) as ranks:
        for step in (1, 2):
            ranks.save(step, lambda rank: state(rank, 1))
        for rank in (0, 1):  # the late one finds that the other has gone
            begin = time.monotonic()
            with pytest.raises(PeerLostError):
                ranks.ckpts[rank].flush(SHORT_S)
            assert time.monotonic() - begin < LONG_S
        ranks.each(lambda rank: ranks.ckpts[rank].flush())
        assert steps_at(fs, FAR) == [1, 2]


def test_a_flush_does_not_wait_for_a_copy_beyond_its_time() -> None:
    fs = SimFs(seed=1)
    ckpt = opened_on(fs)
    with HeldCopy(ckpt) as held:
        save(ckpt, 1, {"x": 1})
        held.waiting.wait()
        with pytest.raises(WaitTimeout):
            ckpt.flush(SHORT_S)
    ckpt.flush()
    settle(ckpt)
    ckpt.close()
    assert steps_at(fs, FAR) == [1]


def test_the_last_step_goes_everywhere_behind_an_older_copy() -> None:
    """Whatever the cadence, and without waiting for what is under way."""
    fs = SimFs(seed=1)
    ckpt = opened_on(fs, far=LATER)
    with HeldCopy(ckpt) as held:
        save(ckpt, 1, {"x": 1})
        held.waiting.wait()
        save(ckpt, 2, {"x": 2})
        inside(ckpt).levels.promotions.end_with(3)
        save(ckpt, 3, {"x": 3})
    settle(ckpt)
    assert steps_at(fs, FAR) == [1, 3]
    ckpt.close()
