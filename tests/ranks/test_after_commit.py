"""What follows a commit fails on one of several ranks: all of them know that it is committed."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from statehold import errors
from support.faults import DEADLINE_S, must, spy_on
from support.hosts import HostRanks, disks
from support.in_memory import SimFs
from support.inside import inside, passage
from support.rank_states import state
from support.ranks import Ranks

SIZE = 3


class Boom:
    def __init__(self) -> None:
        self.fired = 0
        self.has_fired = threading.Event()

    def __call__(self, *_args: Any, **_options: Any) -> None:
        self.fired += 1
        self.has_fired.set()
        raise OSError(errno.ENOMEM, "this fails after the commit")


LATER: dict[str, Callable[[Any], tuple[object, str]]] = {
    "schedule": lambda opened: (opened.schedule, "committed"),
    "message": lambda opened: (opened.schedule, "message"),
    "decide": lambda opened: (opened.levels.promotions, "decide"),
    "learn": lambda opened: (opened.parts.claims, "learn"),
    "start": lambda opened: (opened.levels.promotions, "start"),
    "retain": lambda opened: (opened.levels.near[0], "retain"),
    "note": lambda opened: (opened.pipeline.publisher, "_leave_note"),
    "conclude": lambda opened: (opened.peers, "conclude"),
}
OF_ALL_RANKS = {"learn", "start"}
CASES = [(name, 0) for name in LATER] + [(name, 2) for name in sorted(OF_ALL_RANKS)]


def check_all_know(ranks: Ranks, step: int) -> None:
    for save in ranks.save(step, lambda rank: state(rank, step)):
        assert (save.error, save.done("committed")) == (None, True)


def ended(ranks: Ranks, rank: int, step: int) -> None:
    save = ranks.ckpts[rank].save(step, state(rank, step))
    must(passage(save).wait_ended("committed", DEADLINE_S))


def wait_in_vain(ranks: Ranks, boom: Boom, patched: pytest.MonkeyPatch) -> None:
    """Rank 0 fails to say how a save ended; then the time of the ranks that wait for it is over."""

    def impatient(peers: Any, outcome: Callable[..., bytes]) -> Callable[..., bytes]:
        def wait(*number: float) -> bytes:
            must(boom.has_fired.wait(DEADLINE_S))
            with pytest.MonkeyPatch.context() as now:
                now.setattr(peers, "timeout_s", 0.0)
                return outcome(*number)

        return wait

    for ckpt in ranks.ckpts[1:]:
        peers = inside(ckpt).peers
        patched.setattr(peers, "outcome", impatient(peers, peers.outcome))


@pytest.mark.parametrize(("name", "failing"), CASES)
def test_all_ranks_know_that_the_step_is_committed(
    name: str, failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Ranks(SimFs(seed=1), SIZE) as ranks:
        check_all_know(ranks, 1)
        owner, method = LATER[name](inside(ranks.ckpts[failing]))
        boom = Boom()
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, boom)
            if name == "conclude":
                wait_in_vain(ranks, boom, patched)
            check_all_know(ranks, 2)
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
        assert boom.fired == 1
        assert ranks.ckpts[0].steps() == [1, 2]
        if name == "conclude":  # who was not told knows less, until two saves have failed for it
            for step in (3, 4, 5):
                ranks.outcomes(lambda rank, step=step: ended(ranks, rank, step))
        for step in (6, 7):
            check_all_know(ranks, step)
    assert "step 2 is committed and safe; could not " in caplog.text


def test_a_host_that_cannot_note_where_its_files_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with HostRanks(disks(2)) as ranks:
        check_all_know(ranks, 1)
        boom = Boom()
        with monkeypatch.context() as patched:
            patched.setattr(inside(ranks.ckpts[1]).levels.near[0], "landed", boom)
            check_all_know(ranks, 2)
        assert boom.fired == 1
        check_all_know(ranks, 3)
    assert "step 2 is committed and safe; could not note where its files are" in caplog.text


def test_a_last_sync_that_fails_is_told_to_the_others_as_what_it_is() -> None:
    with Ranks(SimFs(seed=1), SIZE) as ranks:
        check_all_know(ranks, 1)
        store, fired = inside(ranks.ckpts[0]).levels.store, []

        def last_sync(operation: str, args: tuple[Any, ...]) -> None:
            if operation == "sync_dir" and args[0] == store.root and fs.is_dir(store.path(2)):
                fired.append(args)
                raise errors.storage_error("sync_dir", errno.EIO, args[0])

        fs = ranks.fs
        spy_on(ranks.ckpts[0], last_sync)
        failures = ranks.failures(2, lambda rank: state(rank, 2))
        assert fired
        for error in failures:
            assert isinstance(error, errors.StateholdError)
            assert "nothing was published" not in str(error)
            assert error.facts["published"].startswith("yes, and whole")


def test_a_rank_that_cannot_hear_the_outcome_looks_for_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store of torch.distributed may fail in ways of its own."""
    with Ranks(SimFs(seed=1), SIZE) as ranks:
        check_all_know(ranks, 1)
        peers = inside(ranks.ckpts[1]).peers
        real, fired = peers.outcome, []

        def outcome(*number: float) -> bytes:
            real(*number)
            fired.append(number)
            raise RuntimeError("Connection reset by peer")

        with monkeypatch.context() as patched:
            patched.setattr(peers, "outcome", outcome)
            check_all_know(ranks, 2)
        assert fired
