"""Members and the actions of their steps: what is promised, and what is committed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from resilience.protocol.hall import MICROBATCHES, hello
from statehold.errors import InvariantError
from statehold.resilience.protocol import actions
from statehold.resilience.protocol.actions import (
    Adopt,
    Await,
    Compute,
    Fetch,
    Forget,
    Gather,
    GroupLostError,
    Reduce,
    Vote,
)
from statehold.resilience.protocol.member import FETCHED, Member
from statehold.resilience.protocol.messages import (
    TORN,
    Fenced,
    Install,
    Prepare,
    Promise,
    View,
    Waiting,
)

Playing = Generator[Any, Any, int | None]
NEW = View(0, digest="same")


def member(name: str = "a", *others: str) -> Member:
    """In the first epoch, with others."""
    found = Member(hello(name), MICROBATCHES)
    if others:
        enter(found, 1, dict.fromkeys((name, *others), NEW))
    return found


def enter(found: Member, epoch: int, views: dict[str, View], *departed: View) -> None:
    assert isinstance(found.receive(Prepare(epoch)), Promise)
    found.receive(Install(epoch, views, departed))
    assert found.epoch == epoch


def playing(found: Member, until: int = 100) -> Playing:
    return actions.play(found, contextlib.nullcontext(), until)


def copying(*others: str) -> Member:
    """In the first epoch with others; each microbatch is computed by two."""
    found = Member(hello("a"), MICROBATCHES, redundancy=2)
    enter(found, 1, dict.fromkeys(("a", *others), NEW))
    return found


def until_vote(play: Playing, action: Any = None) -> Vote:
    action = action or next(play)
    while not isinstance(action, Vote):
        action = play.send(None)
    return action


def ended(play: Playing, result: Any) -> int | None:
    with pytest.raises(StopIteration) as stop:
        play.send(result)
    played: int | None = stop.value.value
    return played


def both(vote: Vote, **of_other: int) -> list[actions.Ballot]:
    """The ballots of this rank, and of one that has computed the rest."""
    mine = vote.ballot
    rest = {0, 1, 2, 3} - COMPUTED
    marks = sum(map(actions.mark, rest)) % (1 << 62)
    other = actions.Ballot(
        **{
            "epoch": mine.epoch,
            "step": mine.step,
            "count": len(rest),
            "marks": marks,
            "joiners_wait": 0,
            **of_other,
        }
    )
    return [mine, other]


COMPUTED = {0, 2}  # by the first of two members


# Members


def test_a_view_before_any_epoch_is_that_of_the_hello() -> None:
    found = member()
    assert (found.view, found.is_changing, found.must_fetch) == (NEW, True, True)


def test_a_promise_excludes_the_commit() -> None:
    """R4, R6."""
    found = member("a", "b")
    assert found.vote(1)
    promise = found.receive(Prepare(2))
    assert promise == Promise(2, View(0, True, (0, 2), member=True))
    assert not found.commit(1, end_epoch=False)
    assert not found.vote(1)
    assert found.view == promise.view


def test_an_older_promise_is_not_given() -> None:
    found = member("a", "b")
    assert found.receive(Prepare(5)) is not None
    assert found.receive(Prepare(4)) is None
    assert found.receive(Prepare(1)) is None
    assert not found.install(Install(4, {"a": NEW}))
    assert found.epoch == 1


def test_a_member_that_is_behind_catches_up() -> None:
    """R8."""
    found = member("a", "b")
    found.vote(1)
    views = {"a": found.view, "b": View(1, False, (1, 3), member=True)}
    enter(found, 2, views)
    assert (found.is_behind, found.step, found.share) == (True, 0, (0, 2))
    found.catch_up()
    assert (found.is_behind, found.step, found.share) == (False, 1, (0, 2))


def test_only_what_was_voted_for_is_caught_up_with() -> None:
    found = member("a", "b")
    with pytest.raises(InvariantError, match="nothing to catch up with"):
        found.catch_up()


def test_a_member_is_not_behind_any_more_when_the_one_ahead_is_lost() -> None:
    """It had not begun to catch up. It then committed with the shares of another epoch."""
    found = member("a", "b")
    found.vote(1)
    enter(found, 2, {"a": found.view, "b": View(1, False, (1, 3), member=True)})
    assert found.is_behind
    enter(found, 3, {"a": found.view})
    assert not found.is_behind
    assert (found.step, found.share) == (0, (0, 2, 1, 3))


def test_a_view_behind_without_a_vote_breaks_the_protocol() -> None:
    found = member("a", "b")
    with pytest.raises(InvariantError, match="has not reduced"):
        enter(found, 2, {"a": found.view, "b": View(1, False, (), member=True)})


def test_a_joiner_has_the_state_when_it_has_come() -> None:
    found = member("c")
    enter(found, 4, {"b": View(6, False, (0, 1, 2, 3), member=True), "c": found.view})
    assert (found.step, found.share, found.must_fetch) == (6, (), True)
    assert found.fetch(4)
    assert found.view == View(TORN)
    found.received(3)
    assert found.must_fetch
    found.received(4)
    assert found.view == View(6, member=True, digest=FETCHED)
    assert found.newcomers == ("c",)
    assert found.vote(4)
    assert found.commit(4, end_epoch=False)
    assert (found.view.digest, found.newcomers) == ("", ())


def test_a_joiner_that_has_promised_another_epoch_keeps_its_state() -> None:
    """Seed 3187: it was taken for a holder of the state that it had when it promised."""
    found = member("c")
    view = found.view
    enter(found, 4, {"b": View(6, False, (0, 1, 2, 3), member=True), "c": view})
    steps = playing(found)
    assert isinstance(next(steps), actions.Gather)
    assert found.promise(5) == Promise(5, view)
    assert steps.send(None) == actions.Await(4)
    assert found.view == view
    assert not found.fetch(4)


def test_waiting_is_for_one_epoch() -> None:
    found = member("a", "b")
    found.receive(Waiting(1))
    assert found.joiners_wait
    enter(found, 2, {"a": found.view, "b": View(0, False, (1, 3), member=True)})
    assert not found.joiners_wait
    found.receive(Waiting(1))
    assert not found.joiners_wait


def test_the_end_of_an_epoch_is_a_promise() -> None:
    found = member("a", "b")
    found.vote(1)
    assert found.commit(1, end_epoch=True)
    assert (found.promised, found.is_changing, found.step) == (2, True, 1)


def test_a_hello_tells_everything_after_a_restart() -> None:
    found = member("a", "b")
    found.complain("failed")
    found.receive(Prepare(2))
    said = found.hello()
    assert (said.epoch, said.promised, said.failed, said.members) == (1, 2, 1, ("a", "b"))
    assert said.view == found.view


def test_fenced_is_kept() -> None:
    found = member("a", "b")
    found.receive(Fenced("gone"))
    assert found.fenced == Fenced("gone")


# Rounds


def test_the_actions_of_an_undisturbed_round() -> None:
    found = member("a", "b")
    play = playing(found)
    actions = [next(play)]
    while not isinstance(actions[-1], Vote):
        actions.append(play.send(None))
    vote = actions.pop()
    assert actions == [Compute(0), Compute(2), Gather(1), Reduce(1)]
    assert ended(play, both(vote)) == 0
    assert (found.step, found.share) == (1, (0, 2))


def test_no_epoch_is_waited_for() -> None:
    found = member()
    play = playing(found)
    assert next(play) == Await(0)
    enter(found, 1, {"a": NEW})
    assert play.send(None) == Compute(0)


def test_the_run_is_over_at_its_last_step() -> None:
    found = member("a", "b")
    play = playing(found, until=0)
    with pytest.raises(StopIteration) as stop:
        next(play)
    assert stop.value.value is None


@pytest.mark.parametrize("kind", [Gather, Reduce, Vote])
def test_a_failure_leads_to_the_next_epoch_and_repeats_no_microbatch(kind: type) -> None:
    """R1, R2, R9."""
    found = member("a", "b")
    play = playing(found)
    computed = []
    action = next(play)
    while not isinstance(action, kind):
        computed += [action.index] if isinstance(action, Compute) else []
        action = play.send(None)
    assert play.throw(GroupLostError("failed")) == Await(1)
    enter(found, 2, {"a": found.view})  # the other one is lost
    action = play.send(None)
    while not isinstance(action, Vote):
        computed += [action.index] if isinstance(action, Compute) else []
        action = play.send(None)
    assert computed == [0, 2, 1, 3]
    assert ended(play, [action.ballot]) == 0


def test_a_pass_that_has_failed_takes_the_sums_with_it() -> None:
    """R14: what they had is computed again, and copies are adopted again."""
    found = copying("b", "c")
    enter(found, 2, {"a": found.view, "c": View(0, False, (2,), member=True)})
    play = playing(found)
    actions = [next(play)]
    while not isinstance(actions[-1], Gather):
        is_late = actions[-1] == Compute(1, copy=1) and len(actions) < 4
        actions.append(play.send(False if is_late else None))
    first = [Compute(0), Compute(3), Compute(1, copy=1)]
    assert actions == [*first, *first[:2], Adopt(1), Gather(2)]


def test_a_promise_between_the_vote_and_the_commit_prevents_it() -> None:
    found = member("a", "b")
    play = playing(found)
    vote = until_vote(play)
    found.receive(Prepare(2))
    assert play.send(both(vote)) == Await(1)
    assert found.step == 0


def test_who_is_behind_commits_what_it_has_reduced() -> None:
    found = member("a", "b")
    play = playing(found)
    until_vote(play)
    found.receive(Prepare(2))
    assert play.throw(GroupLostError("revoked")) == Await(1)
    found.receive(Install(2, {"a": found.view, "b": View(1, False, (1, 3), member=True)}))
    assert ended(play, None) == 0
    assert (found.step, found.share) == (1, (0, 2))


def test_copies_are_computed_and_do_not_count() -> None:
    play = playing(copying("b"))
    assert [next(play), play.send(None)] == [Compute(0), Compute(2)]
    assert [play.send(None), play.send(None)] == [Compute(1, copy=1), Compute(3, copy=1)]
    vote = until_vote(play)
    assert vote.ballot.count == 2
    assert ended(play, both(vote)) == 0


def test_the_copy_of_a_lost_share_is_adopted() -> None:
    found = copying("b")
    play = playing(found)
    until_vote(play)
    found.receive(Prepare(2))
    assert play.throw(GroupLostError("revoked")) == Await(1)
    found.receive(Install(2, {"a": found.view}))
    assert [play.send(None), play.send(None), play.send(None)] == [Adopt(1), Gather(2), Reduce(2)]
    vote = play.send(None)
    assert ended(play, [vote.ballot]) == 0


@pytest.mark.parametrize("computed", [1, 2, 3])
def test_the_order_of_work_does_not_depend_on_when_an_epoch_comes(computed: int) -> None:
    """The ranks of a replica compute together, and learn of a loss at different moments."""
    found = copying("b", "c")
    assert found.share == (0, 3)
    play = playing(found)
    done = []
    action = next(play)
    while isinstance(action, Compute | Adopt):
        done.append(action)
        if len(done) == computed:
            enter(found, 2, {"a": found.view, "c": View(0, False, (2,), member=True)})
        action = play.send(None)
    assert done == [Compute(0), Compute(3), Compute(1, copy=1), Adopt(1)]


def joining() -> tuple[Member, Playing]:
    found = member("c")
    play = playing(found)
    assert next(play) == Await(0)
    enter(found, 4, {"b": View(6, False, (0, 1, 2, 3), member=True), "c": found.view})
    return found, play


def test_a_joiner_fetches_and_reduces_without_a_share() -> None:
    """R11."""
    found, play = joining()
    assert play.send(None) == Gather(4)
    assert play.send(None) == Fetch(4, ("b",))
    assert found.view == View(TORN)
    assert [play.send(None), play.send(None)] == [Gather(4), Reduce(4)]
    vote = play.send(None)
    assert (vote.ballot.count, vote.ballot.marks) == (0, 0)


def test_a_transfer_that_breaks_off_leaves_a_torn_state() -> None:
    found, play = joining()
    play.send(None)
    play.send(None)
    assert play.throw(GroupLostError("the holder died")) == Await(4)
    assert found.view == View(TORN)


def test_a_member_that_becomes_a_joiner_forgets_what_it_has_computed() -> None:
    """Seed 288: a coordinator died while it sent the first epoch. One rank of a replica had begun
    in it and another had not, so others got its share. Its sums counted twice."""
    found = member("a", "b")
    play = playing(found)
    assert [next(play), play.send(None)] == [Compute(0), Compute(2)]
    own = View(0, digest="same")
    enter(found, 2, {"b": View(0, False, (1, 3), member=True), "a": own})
    assert play.send(None) == Forget()
    assert [play.send(None), play.send(None)] == [Gather(2), Fetch(2, ("b",))]
    assert [play.send(None), play.send(None)] == [Gather(2), Reduce(2)]
    assert play.send(None).ballot.count == 0


def test_one_that_waits_is_told_in_the_vote() -> None:
    found = member("a", "b")
    play = playing(found)
    vote = until_vote(play)
    assert ended(play, both(vote, joiners_wait=1)) == 0
    assert found.is_changing


ALIKE, ODD, THIRD = 5, 6, 7


@pytest.mark.parametrize(
    ("digests", "newcomers", "odd"),
    [
        ("AAA", "", ""),
        ("AOA", "", "b"),
        ("AO", "", "ab"),  # nobody knows which of two is right
        ("AAOO", "", "abcd"),
        ("AAO3O", "", "abcde"),
        ("AAAO3", "", "de"),
        ("A", "", ""),
        ("AO", "b", "b"),
        ("AOOO", "cd", "abcd"),  # two have the bytes of the odd one
        ("AAOO", "cd", "cd"),
        ("AA", "ab", ""),  # the last holder has died after it gave the state
        ("AAO", "abc", "abc"),
    ],
)
def test_most_holders_of_the_state_say_who_is_odd(digests: str, newcomers: str, odd: str) -> None:
    """R19."""
    number = {"A": ALIKE, "O": ODD, "3": THIRD}
    ballots = [actions.Ballot(1, 0, 0, 0, 0, number[each]) for each in digests]
    names = "abcde"[: len(ballots)]
    assert "".join(actions.odd_ones(names, ballots, newcomers)) == odd


def test_no_step_is_committed_before_the_odd_ones_have_left() -> None:
    """R19: the others wait for the next epoch, in which they sum again."""
    views = {"a": NEW, "b": NEW, "c": View(0, digest="it has less to do")}
    found = member("a")
    enter(found, 1, views)
    play = playing(found)
    vote = until_vote(play)
    assert (vote.members, vote.of_all) == (("a", "b", "c"), True)
    mine, other = (replace(each, digest=ALIKE) for each in both(vote))
    odd = actions.Ballot(1, 0, 0, 0, 0, ODD)
    assert play.send([mine, other, odd]) == Await(1)
    assert found.step == 0
    enter(found, 2, {"a": found.view, "b": View(0, False, (1, 3), member=True)})
    vote = until_vote(play, play.send(None))
    assert not vote.of_all
    assert ended(play, [replace(each, digest=ALIKE) for each in both(vote)]) == 0


def test_who_is_odd_parts() -> None:
    """R19."""
    found = member("a", "b")
    play = playing(found)
    mine, other = both(until_vote(play))
    assert play.send([replace(mine, digest=ODD), replace(other, digest=ALIKE)]) == actions.Depart(1)
    assert found.step == 0


def test_all_bytes_are_compared_where_a_state_was_fetched() -> None:
    """R19: also in a later epoch of the same step, and in no later step."""
    found, play = joining()
    vote = until_vote(play, play.send(None))
    assert (vote.members, vote.of_all) == (("b", "c"), True)
    assert found.newcomers == ("c",)
    assert play.throw(GroupLostError("failed")) == Await(4)
    enter(found, 5, {"b": View(6, True, (0, 1, 2, 3), member=True), "c": found.view})
    assert found.newcomers == ("c",)
    holder = member("b", "c")
    enter(holder, 2, {"b": View(0, member=True), "c": View(0, member=True, digest=FETCHED)})
    assert holder.newcomers == ("c",)
    enter(holder, 3, {"b": View(0, member=True), "c": View(0, member=True)})
    assert holder.newcomers == ()


@pytest.mark.parametrize("wrong", [{"count": 1}, {"marks": 7}, {"step": 1}, {"epoch": 2}], ids=str)
def test_ballots_that_do_not_fit_stop_the_commit(wrong: dict[str, int]) -> None:
    """R3."""
    found = member("a", "b")
    play = playing(found)
    vote = until_vote(play)
    with pytest.raises(InvariantError, match="counted each microbatch once"):
        play.send(both(vote, **wrong))
    assert found.step == 0
