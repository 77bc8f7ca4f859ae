"""The coordinator: who belongs to the membership, and who does not any more."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import replace

import pytest

from resilience.protocol.hall import MICROBATCHES, Hall, hello
from statehold.resilience.protocol.coordinator import (
    FRUITLESS_MAX,
    PATIENCE,
    RETURN_S,
    Coordinator,
)
from statehold.resilience.protocol.member import Member
from statehold.resilience.protocol.messages import (
    TORN,
    Beat,
    Complaint,
    Fenced,
    GivesUp,
    Hello,
    Install,
    Leave,
    Message,
    Prepare,
    Promise,
    Refused,
    View,
    Waiting,
    decode,
    encode,
)


def running(*names: str) -> tuple[Hall, dict[str, int]]:
    hall = Hall(len(names))
    return hall, {name: hall.connect(hello(name)) for name in names}


def commit(hall: Hall, *conns: int) -> None:
    """A round of these ranks, which they commit."""
    for conn in conns:
        member = hall.members[conn]
        assert member.vote(member.epoch)
        assert member.commit(member.epoch, end_epoch=False)


def end_step(hall: Hall, *conns: int) -> None:
    """These ranks commit the step, and end the epoch for those that wait (R11)."""
    for conn in conns:
        member = hall.members[conn]
        assert member.joiners_wait
        assert member.vote(member.epoch)
        assert member.commit(member.epoch, end_epoch=True)
    hall.say(conns[0], Promise(hall.epoch + 1, hall.members[conns[0]].view))


# A run begins


def test_a_run_begins_as_soon_as_the_expected_replicas_are_here() -> None:
    hall = Hall(expected=2)
    hall.connect(hello("a"))
    assert hall.epoch == 0
    hall.connect(hello("b"))
    assert (hall.epoch, hall.names) == (1, ["a", "b"])


def test_a_run_begins_with_fewer_when_none_has_come_for_a_while() -> None:
    hall = Hall(expected=3, settle_s=1.0)
    hall.connect(hello("a"))
    hall.wait(0.8)
    hall.connect(hello("b"))
    hall.wait(0.8)
    assert hall.epoch == 0
    hall.wait(0.4)
    assert hall.names == ["a", "b"]


def test_a_run_waits_for_min_replicas() -> None:
    hall = Hall(settle_s=0.1)
    hall.connect(hello("a", min_replicas=2))
    hall.wait(5)
    assert hall.epoch == 0
    hall.connect(hello("b", min_replicas=2))
    hall.wait(0.3)
    assert hall.names == ["a", "b"]


def test_a_replica_is_there_when_all_its_ranks_are() -> None:
    hall = Hall(expected=1, settle_s=0.1)
    hall.connect(hello("a", place=0, width=2))
    hall.wait(1)
    assert hall.epoch == 0
    hall.connect(hello("a", place=1, width=2))
    assert hall.names == ["a"]


@pytest.mark.parametrize("expected", [None, 1, 2])
@pytest.mark.parametrize("is_cut", [False, True], ids=["leases", "connections"])
def test_members_that_come_back_after_a_newcomer_bring_the_newest_state(
    expected: int | None, is_cut: bool
) -> None:
    """Who has waited for long began a run of its own, from step 0, before they were back."""
    hall = Hall(2, settle_s=1.0)
    conns = [hall.connect(hello(name)) for name in "ab"]
    commit(hall, *conns)
    hall.coordinator.expected = expected or sys.maxsize
    newcomer = hall.connect(hello("n"))
    hall.wait(5)
    hall.deaf.update(conns)
    if is_cut:
        for conn in conns:
            hall.lose(conn)
    else:
        hall.wait(hello("a").lease_s + 0.3)
    hall.wait(0.3)
    back = hall.connect(hello("a2", view=replace(hall.members[conns[0]].own_view, digest="a")))
    hall.wait(1.5)
    assert hall.names == ["n", "a2"]
    assert hall.members[newcomer].holders == ("a2",)
    assert (hall.members[back].step, hall.members[newcomer].step) == (1, 1)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (hello("b", job={"seed": "2"}), "seed"),
        (hello("b", job={}), "seed"),
        (hello("b", job={"seed": "1", "code": "x"}), "code"),
        (hello("b", width=2), "ranks of a replica"),
    ],
    ids=["another seed", "no seed", "one more", "other ranks"],
)
def test_a_replica_that_differs_is_refused_by_name(other: object, what: str) -> None:
    hall, _ = running("a")
    conn = hall.connect(other)  # type: ignore[arg-type]
    out = hall.out(conn)
    assert isinstance(out, Refused)
    assert out.facts["what"] == what
    hall.wait(2)
    assert hall.names == ["a"]


def test_all_ranks_of_a_refused_replica_are_refused() -> None:
    hall = Hall(expected=1)
    first = hall.connect(hello("b", place=0, width=2))
    second = hall.connect(hello("b", place=1, width=2, job={"seed": "2"}))
    assert isinstance(hall.out(first), Refused)
    assert isinstance(hall.out(second), Refused)


# Losses


def test_the_others_go_on_without_a_lost_member() -> None:
    """R6, R7."""
    hall, conns = running("a", "b", "c")
    hall.lose(conns["b"])
    assert (hall.epoch, hall.names) == (2, ["a", "c"])
    assert [hall.members[conns[each]].epoch for each in "ac"] == [2, 2]


def test_a_lost_rank_takes_its_replica_with_it() -> None:
    hall = Hall(expected=2)
    conns = [hall.connect(hello(name, place, 2)) for name in "ab" for place in (0, 1)]
    hall.lose(conns[3])
    assert isinstance(hall.out(conns[2]), Fenced)
    assert hall.names == ["a"]


def test_a_lease_that_ends_is_a_loss() -> None:
    """R5."""
    hall, conns = running("a", "b")
    hall.deaf.add(conns["b"])
    hall.wait(0.9)
    assert hall.names == ["a", "b"]
    hall.wait(0.3)
    assert hall.names == ["a"]


def test_a_coordinator_that_stood_still_expels_nobody() -> None:
    hall, conns = running("a", "b")
    hall.wait(0.5)
    hall.now += 30
    hall.deliver(hall.coordinator.tick(hall.now))
    hall.wait(0.9, beats=False)
    assert (hall.epoch, hall.names) == (1, ["a", "b"])
    hall.deaf.add(conns["b"])
    hall.wait(0.5)
    assert hall.names == ["a"]


def test_a_name_that_was_fenced_never_comes_back() -> None:
    """R10."""
    hall, conns = running("a", "b")
    hall.lose(conns["b"])
    conn = hall.connect(hall.members[conns["b"]])
    assert isinstance(hall.out(conn), Fenced)
    assert hall.names == ["a"]


def test_a_second_connection_under_a_name_is_a_loss() -> None:
    """The end of the first one may come later. It was looked up in replicas that are gone."""
    hall, conns = running("a", "b")
    again = hall.connect(hall.members[conns["b"]])
    assert isinstance(hall.out(again), Fenced)
    assert hall.names == ["a"]
    hall.lose(conns["b"])
    hall.say(conns["b"], Beat(0))
    hall.wait(3)
    assert hall.names == ["a"]


def test_a_loss_during_the_preparation_does_not_hold_it_up() -> None:
    """R7."""
    hall, conns = running("a", "b", "c")
    hall.deaf.add(conns["c"])
    hall.lose(conns["b"])
    assert hall.epoch == 1
    hall.lose(conns["c"])
    assert hall.names == ["a"]


def test_when_all_are_lost_a_new_run_waits_for_the_expected_replicas() -> None:
    """The first one to come back would begin alone, with a state that may be old."""
    hall, conns = running("a", "b")
    hall.deaf |= set(conns.values())
    hall.lose(conns["a"])
    hall.lose(conns["b"])
    hall.connect(hello("c"))
    hall.wait(0.5)
    assert not hall.names
    hall.connect(hello("d", view=View(7, digest="newer")))
    assert hall.names == ["c", "d"]
    assert all(hall.members[conn].step == 7 for conn in (3, 4))


def test_newcomers_of_a_preparation_without_members_can_promise_again() -> None:
    """Seed 500259: they had promised a later epoch than they were asked for next."""
    hall, conns = running("a")
    hall.deaf.add(conns["a"])
    hall.say(conns["a"], Complaint(1, "failed"))
    newcomer = hall.connect(hello("b"))
    assert hall.members[newcomer].promised == 2
    hall.lose(conns["a"])
    hall.wait(2)
    assert hall.names == ["b"]
    assert hall.members[newcomer].epoch == hall.epoch > 2


def test_fewer_than_min_replicas_wait() -> None:
    hall = Hall(expected=2)
    conns = [hall.connect(hello(name, min_replicas=2)) for name in "ab"]
    hall.lose(conns[1])
    hall.wait(5)
    assert hall.members[conns[0]].is_changing
    hall.connect(hello("c", min_replicas=2))
    assert hall.names == ["a", "c"]
    assert hall.members[3].must_fetch


def test_a_newcomer_that_asks_for_more_replicas_does_not_hold_the_members_up() -> None:
    """The members had ended their epoch for it. The next one was never installed."""
    hall, conns = running("a", "b")
    hall.connect(hello("c", min_replicas=5))
    assert Waiting(1) not in hall.heard[conns["a"]]
    hall.connect(hello("d"))
    end_step(hall, *conns.values())
    assert hall.names == ["a", "b", "d"]
    hall.connect(hello("e", min_replicas=5))
    end_step(hall, conns["a"], conns["b"])
    assert hall.names == ["a", "b", "d", "c", "e"]


def test_after_torn_newcomers_are_out_a_new_run_waits_for_the_expected_replicas() -> None:
    """The next one began alone, in the epoch that was prepared for them."""
    hall = Hall(expected=2)
    torn = [hall.connect(hello(name, view=View(TORN))) for name in "ab"]
    assert all(isinstance(hall.out(conn), Fenced) for conn in torn)
    hall.connect(hello("c"))
    assert not hall.names
    hall.connect(hello("d", view=View(7, digest="newer")))
    assert hall.names == ["c", "d"]
    assert [hall.members[conn].step for conn in (3, 4)] == [7, 7]


def test_one_that_gives_up_is_out_with_all_its_ranks() -> None:
    hall = Hall(expected=2)
    conns = [hall.connect(hello("a", place=place, width=2, min_replicas=2)) for place in (0, 1)]
    other = [hall.connect(hello("b", place=place, width=2, min_replicas=2)) for place in (0, 1)]
    hall.lose(other[0])
    hall.say(conns[0], GivesUp(1))
    outs = [hall.out(conn) for conn in conns]
    assert [isinstance(out, Fenced) and out.gave_up for out in outs] == [True, True]


def test_one_that_gives_up_too_late_goes_on() -> None:
    """The epoch was on its way when it had waited for too long."""
    hall, conns = running("a", "b")
    hall.say(conns["a"], GivesUp(0))
    assert hall.out(conns["a"]) is None
    assert hall.names == ["a", "b"]


# Complaints


def test_a_complaint_leads_to_another_epoch_once() -> None:
    hall, conns = running("a", "b")
    for conn in conns.values():
        hall.say(conn, Complaint(1, "failed"))
    assert (hall.epoch, hall.names) == (2, ["a", "b"])


def test_members_that_fail_for_ever_are_not_kept_together() -> None:
    hall, conns = running("a", "b", "c")
    for _ in range(FRUITLESS_MAX):
        hall.say(conns["b"], Complaint(hall.epoch, "cannot reach a"))
    assert isinstance(hall.out(conns["b"]), Fenced)
    assert hall.names == ["a", "c"]


def test_after_the_only_member_has_failed_for_ever_the_expected_replicas_begin() -> None:
    """The first one to come began alone, as after any other loss of all members."""
    hall = Hall(expected=1)
    conn = hall.connect(hello("a"))
    hall.coordinator.expected = 2
    for _ in range(FRUITLESS_MAX):
        hall.say(conn, Complaint(hall.epoch, "failed"))
    assert isinstance(hall.out(conn), Fenced)
    hall.connect(hello("b"))
    assert not hall.names
    hall.connect(hello("c"))
    assert hall.names == ["b", "c"]


def test_newcomers_do_not_hide_that_members_fail_for_ever() -> None:
    """Each one made the count begin anew."""
    hall, conns = running("a", "b")
    for number in range(FRUITLESS_MAX):
        hall.connect(hello(f"new {number}"))
        hall.say(conns["a"], Complaint(hall.epoch, "cannot reach b"))
    assert isinstance(hall.out(conns["a"]), Fenced)


def test_failures_with_progress_between_them_expel_nobody() -> None:
    """Three failures in a month made the last member go."""
    hall, conns = running("a", "b")
    for _ in range(3 * FRUITLESS_MAX):
        hall.say(conns["b"], Complaint(hall.epoch, "failed"))
        commit(hall, *conns.values())
    assert hall.names == ["a", "b"]


# Joining and leaving


def test_a_joiner_waits_for_the_end_of_the_step() -> None:
    """R11."""
    hall, conns = running("a", "b")
    newcomer = hall.connect(hello("c"))
    assert hall.epoch == 1
    assert Waiting(1) in hall.heard[conns["a"]]
    end_step(hall, *conns.values())
    assert hall.names == ["a", "b", "c"]
    joiner = hall.members[newcomer]
    assert (joiner.step, joiner.share, joiner.must_fetch) == (1, (), True)
    assert joiner.holders == ("a", "b")


def test_newcomers_enter_only_after_a_step() -> None:
    """Seeds 74 and 152 of --replicas: one that b cannot reach came again at once, for ever."""
    hall, conns = running("a", "b")
    hall.connect(hello("c"))
    hall.say(conns["b"], Complaint(hall.epoch, "failed"))
    assert (hall.epoch, hall.names) == (2, ["a", "b"])
    end_step(hall, *conns.values())
    assert hall.names == ["a", "b", "c"]
    for _ in range(FRUITLESS_MAX):
        hall.say(3, Complaint(hall.epoch, "cannot reach b"))
    hall.connect(hello("c again"))
    assert hall.names == ["a", "b"]
    end_step(hall, *conns.values())
    assert hall.names == ["a", "b", "c again"]


def test_the_last_step_of_one_that_has_left_is_known() -> None:
    hall, conns = running("a", "b")
    for conn in conns.values():
        assert hall.members[conn].vote(1)
    commit(hall, conns["a"])
    hall.say(conns["a"], Leave(hall.members[conns["a"]].view))
    hall.say(conns["b"], Complaint(1, "a has gone"))
    assert hall.members[conns["b"]].is_behind
    assert hall.names == ["b"]


def test_a_replica_of_torn_ranks_begins_no_run() -> None:
    hall = Hall(expected=2)
    torn = hall.connect(hello("a", view=View(TORN)))
    hall.connect(hello("b"))
    assert isinstance(hall.out(torn), Fenced)
    assert hall.names == ["b"]


# Restarts


def reconnected(hall: Hall, names: dict[str, int]) -> dict[str, int]:
    return {name: hall.connect(hall.members[conn]) for name, conn in names.items()}


def test_after_a_restart_all_members_go_on_in_their_epoch() -> None:
    """R12."""
    hall, conns = running("a", "b", "c")
    hall.restart()
    conns = reconnected(hall, conns)
    assert (hall.epoch, hall.names) == (1, ["a", "b", "c"])
    assert not any(hall.heard[conn] for conn in conns.values())


def test_after_a_restart_a_complaint_that_was_lost_is_known() -> None:
    hall, conns = running("a", "b")
    hall.restart()
    hall.members[conns["a"]].complain("failed")
    reconnected(hall, conns)
    assert hall.epoch == 2


def test_what_members_say_while_others_come_back_is_known() -> None:
    """It was of no epoch that the coordinator knew, and was dropped."""
    for message in (Complaint(1, "failed"), Promise(2, View(1, member=True))):
        hall, conns = running("a", "b")
        hall.restart()
        first = hall.connect(hall.members[conns["a"]])
        hall.say(first, message)
        hall.connect(hall.members[conns["b"]])
        assert hall.epoch > 1


def test_after_a_restart_most_members_go_on_after_a_lease() -> None:
    """How long a new run waits (settle_s) is no time of members that stand still."""
    hall, conns = running("a", "b", "c")
    late = hall.members[conns.pop("c")]
    hall.restart(settle_s=30.0)
    reconnected(hall, conns)
    hall.wait(RETURN_S + 0.9)
    assert hall.epoch == 0
    hall.wait(0.4)
    assert hall.names == ["a", "b"]
    assert isinstance(hall.out(hall.connect(late)), Fenced)


def test_after_a_restart_few_members_go_on_after_longer() -> None:
    hall, conns = running("a", "b", "c")
    hall.restart(settle_s=30.0)
    reconnected(hall, {"a": conns["a"]})
    hall.wait(RETURN_S + PATIENCE - 1)
    assert hall.epoch == 0
    hall.wait(1.5)
    assert hall.names == ["a"]


def test_newcomers_do_not_make_the_members_wait_longer() -> None:
    """A replica that crashed and came again every second held the others up for ever."""
    hall, conns = running("a", "b", "c")
    conns.pop("c")
    hall.restart(settle_s=30.0)
    reconnected(hall, conns)
    for number in range(5):
        hall.wait(0.9)
        hall.lose(hall.connect(hello(f"crashes {number}")))
    assert hall.names == ["a", "b"]


def test_the_members_define_the_job_after_a_restart() -> None:
    """A newcomer that came first had all members refused."""
    hall, conns = running("a", "b")
    hall.restart()
    wrong = hall.connect(hello("c", job={"seed": "2"}))
    reconnected(hall, conns)
    assert isinstance(hall.out(wrong), Refused)
    assert hall.names == ["a", "b"]


def test_a_newcomer_that_has_promised_to_the_coordinator_before_can_promise() -> None:
    hall = Hall(expected=2)
    first = Member(hello("a"), MICROBATCHES)
    first.receive(Prepare(5))
    hall.connect(first)
    second = Member(hello("b"), MICROBATCHES)
    second.receive(Prepare(9))
    hall.connect(second)
    assert hall.names == ["a", "b"]
    assert hall.epoch > 9


def test_a_replica_in_preparation_that_has_promised_more_is_asked_for_more() -> None:
    """Seed 78: it was asked for an epoch before the one that it had promised."""
    hall, conns = running("a", "b")
    hall.deaf.add(conns["b"])
    hall.say(conns["a"], Complaint(1, "failed"))
    member = Member(hello("c"), MICROBATCHES)
    member.receive(Prepare(40))
    hall.connect(member)
    hall.lose(conns["b"])
    assert (hall.epoch, hall.names) == (41, ["a"])
    end_step(hall, conns["a"])
    assert hall.names == ["a", "c"]


def test_a_half_fenced_replica_is_fenced() -> None:
    """One of its ranks had entered no epoch. It waited for the other one for ever."""
    hall = Hall(expected=1)
    hall.connect(hello("a", place=0, width=2))
    hall.connect(hello("a", place=1, width=2))
    old = replace(hello("x", place=1, width=2), epoch=1, promised=1, members=("x",))
    first = hall.connect(hello("x", place=0, width=2))
    second = hall.connect(Told(old))
    assert isinstance(hall.out(first), Fenced)
    assert isinstance(hall.out(second), Fenced)
    assert hall.names == ["a"]


class Told(Member):
    """A member that says this Hello, whatever it knows."""

    def __init__(self, told: object) -> None:
        super().__init__(told, MICROBATCHES)  # type: ignore[arg-type]
        self._told = told

    def hello(self) -> object:  # type: ignore[override]
        return self._told


def test_an_install_names_the_store_of_the_first_member() -> None:
    hall = Hall(expected=2)
    hall.connect(hello("a", desk="host:1"))
    conn = hall.connect(hello("b", desk="host:2"))
    installs = [each for each in hall.heard[conn] if isinstance(each, Install)]
    assert [each.desk for each in installs] == ["host:1"]


# Strangers


def hostile(draw: random.Random) -> bytes:
    """A line that may be a message: its fields have values of which some are nobody's."""
    number = draw.choice([0, 0, 1, 1, 2, 5, -1, 2**62, 2**64, 10**400])
    view = View(number, draw.random() < 0.5, (0,), draw.random() < 0.5, draw.choice(["", "same"]))
    names = tuple(draw.choices("abc", k=draw.randrange(4)))
    lease_s = draw.choice([0.001, 1.0, 1e300, 10**400])
    said: list[Message] = [
        hello(draw.choice("abc"), draw.randrange(2), draw.randrange(1, 3), view=view,
              epoch=number, promised=number, failed=draw.choice([0, number]), members=names,
              min_replicas=draw.choice([1, 2, number]), lease_s=lease_s),
        Promise(number, view), Complaint(number, "x"), Leave(view), GivesUp(number), Beat(number),
    ]  # fmt: skip
    return encode(draw.choice(said[:1] * 3 + said))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100))
def test_no_messages_of_strangers_end_the_coordinator(seed: int) -> None:
    draw, now = random.Random(seed), 0.0
    coordinator = Coordinator(settle_s=0.1)
    for conn in range(50):
        now += draw.choice([0.0, 0.02, 3.0])
        coordinator.tick(now)
        with contextlib.suppress(ValueError):  # the server hangs up
            message = decode(hostile(draw))
            if isinstance(message, Hello):
                sent = coordinator.hello(conn, message, now)
            else:
                sent = coordinator.receive(draw.randrange(conn + 1), message, now)
            for _, each in sent:
                assert decode(encode(each)) == each
        if draw.random() < 0.2:
            coordinator.lost(draw.randrange(conn + 1), now)
