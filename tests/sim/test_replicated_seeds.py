"""Some seeds of replicas that train together. Many: `make sim SEEDS=5000 ARGS=--replicas`.

Each protocol that is broken on purpose must be found, or the simulation looks at too little.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from sim.campaign import missing, summary
from sim.replica import Rank
from sim.replicated import FAULTS, run_replicated
from statehold.resilience import progress
from statehold.resilience.protocol import actions, member, shares
from statehold.resilience.protocol.coordinator import Coordinator, _Replica
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import TORN, Complaint, Message, View
from statehold.resilience.protocol.shares import Resolution, Share, resolve, spread

SEEDS, FIRST = int(os.environ.get("STATEHOLD_REPLICATED_SEEDS", "30")), 500_000
# A broken protocol must be found in so few seeds.
CONTROL_SEEDS = 20
# A campaign has these, too; so few seeds may not.
RARE = {each for each in FAULTS if each.startswith("death in")} | {"all lost", "forgotten"}


def test_seeds() -> None:
    counts, failed = summary(run_replicated(seed) for seed in range(FIRST, FIRST + SEEDS))
    assert not failed
    assert counts["steps"] > 10 * SEEDS
    assert not set(missing(counts, FAULTS)) - RARE


Break = Callable[[pytest.MonkeyPatch], None]


def commit_after_a_promise(patch: pytest.MonkeyPatch) -> None:
    real = Member.commit

    def commit(self: Member, epoch: int, *, end_epoch: bool) -> bool:
        promised, self.promised = self.promised, self.epoch
        committed = real(self, self.epoch, end_epoch=end_epoch)
        self.promised = max(promised, self.promised)
        return committed

    patch.setattr(Member, "commit", commit)


def forget_a_lost_microbatch(patch: pytest.MonkeyPatch) -> None:
    def forgetful(missing: Any, shares: Mapping[str, Share]) -> dict[str, Share]:
        return spread(list(missing)[any(shares.values()) :], shares)

    patch.setattr(shares, "spread", forgetful)


def share_all_anew(patch: pytest.MonkeyPatch) -> None:
    def anew(microbatches: int, views: Mapping[str, View], departed: Any) -> Resolution:
        found = resolve(microbatches, views, departed)
        return replace(found, shares=shares.fresh(microbatches, found.holders))

    patch.setattr(member, "resolve", anew)


def join_without_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "must_fetch", property(lambda self: False))


def let_the_fenced_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_problem", lambda self, message: None)


def ignore_votes(patch: pytest.MonkeyPatch) -> None:
    real = Rank.act

    def act(self: Rank, action: actions.Action) -> None:
        if isinstance(action, actions.Vote):
            self.later(0, lambda: self.advance([action.ballot]))
        else:
            real(self, action)

    patch.setattr(Rank, "act", act)
    patch.setattr(actions, "_check", lambda *_: None)


def skip_the_catch_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "is_behind", property(lambda self: False))


def install_before_all_have_promised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Replica, "has_promised", property(lambda self: bool(self.promises)))


def keep_what_others_compute(patch: pytest.MonkeyPatch) -> None:
    real = Rank.act

    def act(self: Rank, action: actions.Action) -> None:
        if isinstance(action, actions.Forget):
            self.soon()
        else:
            real(self, action)

    patch.setattr(Rank, "act", act)


def adopt_what_is_not_lost(patch: pytest.MonkeyPatch) -> None:
    def every(self: Member) -> list[int]:
        return list(range(1, len(self.stack)))

    patch.setattr(Member, "adopted", property(every))


def end_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "tick", lambda self, now: self._sent(now))


def hear_no_complaint(patch: pytest.MonkeyPatch) -> None:
    real = Coordinator.receive

    def receive(self: Coordinator, conn: int, message: Message, now: float) -> Any:
        return [] if isinstance(message, Complaint) else real(self, conn, message, now)

    patch.setattr(Coordinator, "receive", receive)


def train_on_weights_that_missed_an_update(patch: pytest.MonkeyPatch) -> None:
    real = Rank.part
    patch.setattr(Rank, "part", lambda self, step: real(self, max(step, self.member.step)))


def take_half_an_update_for_none(patch: pytest.MonkeyPatch) -> None:
    real = Rank.part

    def part(self: Rank, step: int) -> None:
        self.state += step == TORN
        real(self, self.state_of if step == TORN else step)

    patch.setattr(Rank, "part", part)


def stay_in_the_job_without_a_loop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rank, "part", lambda self, step: None)


def keep_no_account_of_lost_sums(patch: pytest.MonkeyPatch) -> None:
    real = Rank.advance

    def advance(self: Rank, result: object, error: Exception | None = None) -> None:
        real(self, None if result is False else result, error)

    patch.setattr(Rank, "advance", advance)


def compare_the_first_microbatch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress, "STUCK_FIRST_S", progress.STUCK_LEAST_S)


def train_on_with_odd_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(actions, "odd_ones", lambda *_: [])


# From which seed on it is found soon.
BROKEN: dict[Break, int] = {
    commit_after_a_promise: 500_020,
    forget_a_lost_microbatch: FIRST,
    share_all_anew: FIRST,
    join_without_the_state: FIRST,
    let_the_fenced_back: 500_011,
    ignore_votes: FIRST,
    skip_the_catch_up: 500_007,
    install_before_all_have_promised: 500_030,
    end_no_lease: 500_006,
    hear_no_complaint: 500_009,
    keep_what_others_compute: 500_500,
    adopt_what_is_not_lost: FIRST,
    train_on_weights_that_missed_an_update: 500_280,
    take_half_an_update_for_none: 500_280,
    stay_in_the_job_without_a_loop: FIRST,
    keep_no_account_of_lost_sums: FIRST,
    compare_the_first_microbatch: FIRST,
    train_on_with_odd_ones: FIRST,
}


@pytest.mark.thorough
@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.__name__)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, broken: Break) -> None:
    broken(monkeypatch)
    first = BROKEN[broken]
    assert any(run_replicated(seed).violations for seed in range(first, first + CONTROL_SEEDS))
