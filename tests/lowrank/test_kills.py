"""A job of pairs that is killed at any moment goes on in another layout, with the same bits.

One run lives through all kills. Each job restores on as many ranks and in a layout that the seed
draws, and says which step it has found and a digest of all weights and moments. Both are compared:
the step with what the killed job had committed, the digest with that of the job that saved it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import statehold
from support.faults import SMALL
from support.forked import forked
from support.gloo import started_ranks
from support.pairs import PLACES, Place, train, values, whole
from support.seeds import SEED

pytestmark = pytest.mark.thorough

KILLS = int(os.environ.get("STATEHOLD_LOWRANK_KILLS", "1"))
LIFE_S = 0.3  # the longest from a restore to the kill


def digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for each in values(state):
        found.update(whole(each).numpy().tobytes())
    return found.hexdigest()


def live(rank: int, _: int, run: str, place: Place, last: int | None, said: Any) -> None:
    """Restore, train and save at every step, up to `last`; rank 0 says what it has done."""

    def say(*words: Any) -> None:
        if rank == 0:
            said.send(words)

    state = place.state(seed=0)
    train(state, 1)  # other moments than those of any step
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        begin = ckpt.restore(state) or 0
        say("restored", begin, digest(state))
        for step in itertools.count(begin + 1) if last is None else range(begin + 1, last + 1):
            train(state, 1)
            say("trained", step, digest(state))
            ckpt.save(step, state).wait("committed")
            say("committed", step)


class Run:
    """The run that all jobs go on with, and what they have said of it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, itertools.count()
        self._digests: dict[int, str] = {}
        self.committed = 0

    def live(self, place: Place, life_s: float | None, last: int | None = None) -> str:
        """A job in this place, killed so long after it has restored. The last thing it said."""
        meeting = self._folder / f"job-{next(self._jobs)}"
        meeting.mkdir()
        ours, theirs = forked().Pipe(duplex=False)
        words = str(self._folder / "run"), place, last, theirs
        with started_ranks(live, place.world, meeting, *words) as ranks:
            theirs.close()
            said = self._heard(ours.recv())
            if life_s is not None:
                signal.sigtimedwait([], life_s)  # a random moment
                for process in ranks:
                    process.kill()
            while True:
                try:
                    said = self._heard(ours.recv())
                except EOFError:  # no rank lives
                    return said

    def _heard(self, words: tuple[Any, ...]) -> str:
        said, step, *found = words
        if said == "restored":
            assert step >= self.committed, (SEED, step)
            assert step == 0 or [self._digests[step]] == found, (SEED, step)
        if said == "trained":
            (self._digests[step],) = found
        self.committed = step if said in ("restored", "committed") else self.committed
        return str(said)


def test_no_kill_on_the_way_between_layouts_costs_a_committed_step_or_a_bit(tmp_path: Path) -> None:
    chance, run, hit = random.Random(SEED), Run(tmp_path), Counter[str]()
    for _ in range(KILLS):
        place = chance.choice(PLACES if KILLS > 1 else [each for each in PLACES if each.world == 2])
        hit[run.live(place, chance.random() * LIFE_S)] += 1
    print(f"seed {SEED}: killed after {dict(hit)}, {run.committed} steps")
    assert sum(hit.values()) == KILLS
    last = run.committed + 1
    assert run.live(Place(1, "alone"), None, last) == "committed"
    assert run.committed == last
