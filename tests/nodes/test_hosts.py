"""A level that each host has for itself: any one host is lost, and nothing of the run is.

In one process: each host has a simulated disk, ranks are threads. What is compared is what the
ranks hold, element by element, after a restore on the hosts that are left.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from typing import Any

import pytest

from statehold import Directory, Memory
from statehold.checkpoint.levels.hosts import discovery
from statehold.checkpoint.levels.hosts.discovery import _PRIME, KeyPair, drawn
from statehold.errors import (
    PeerFailedError,
    PeerLostError,
    StateholdError,
    StorageError,
    UsageError,
)
from statehold.ranks.peers import Peers
from statehold.steps.directories import make_directories
from statehold.steps.target import Unfinished
from support.faults import DEADLINE_S, Spy, must
from support.hosts import LOCAL, HostRanks, disks, local
from support.in_memory import SimFs
from support.in_memory.board import MemoryStore
from support.in_memory.network import MemoryExchange, MemoryFiles
from support.inside import end, inside
from support.levels import HeldCopy, remove, status, steps_at
from support.rank_states import blank, check, state

EACH = 1 if os.environ.get("STATEHOLD_NODES") else 7


def save(ranks: HostRanks, *steps: int) -> None:
    for step in steps:
        ranks.save(step, lambda rank, step=step: state(rank, step))


def flush(ranks: HostRanks) -> None:
    ranks.each(lambda rank: ranks.ckpts[rank].flush(DEADLINE_S))


def restored(ranks: HostRanks, saved_by: int) -> int | None:
    """Restore on all ranks; compare with what `saved_by` ranks have saved, those that are more with
    the first. The step."""
    found = [blank() for _ in range(ranks.size)]
    got = set(ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank])))
    must(len(got) == 1, got)
    step = got.pop()
    if step is not None and ranks.size == saved_by:
        for rank in range(ranks.size):
            check(found[rank], rank, step)
    return step


def restored_of(ranks: HostRanks, saved_by: int) -> int | None:
    """As `restored` on another number of ranks: what all have saved alike, and each rank's own by
    those who are left."""
    found = [{"w": blank()["w"], "step": None} for _ in range(ranks.size)]
    got = ranks.each(
        lambda rank: ranks.ckpts[rank].restore(found[rank], only=["w", "step"], strict=False)
    )
    for each in found:
        must(each["step"] == got[0])
        must(bool((each["w"] == state(0, each["step"])["w"]).all()))
    return got[0]


def test_the_secret_of_the_servers_is_never_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of torch answers everybody, and whoever read it there took the steps in memory."""
    told: list[bytes] = []
    known: list[str] = []
    kept = MemoryStore.set

    def seen(store: MemoryStore, key: str, value: bytes) -> None:
        told.append(value)
        kept(store, key, value)

    def let_in(self: MemoryExchange, secret: str) -> None:
        known.append(secret)

    def reach(self: MemoryExchange, address: str, secret: str, place: str) -> MemoryFiles:
        known.append(secret)
        return MemoryFiles(self._network, address, place)

    monkeypatch.setattr(MemoryStore, "set", seen)
    monkeypatch.setattr(MemoryExchange, "let_in", let_in)
    monkeypatch.setattr(MemoryExchange, "reach", reach)
    with HostRanks(disks(3)) as ranks:
        save(ranks, 1)
    (secret,) = set(known)
    assert len(known) == 3 * (1 + 2 * 2)
    assert len(bytes.fromhex(secret)) == 32
    for value in told:
        assert secret.encode() not in value
        assert bytes.fromhex(secret) not in value


def test_only_the_rank_that_it_is_for_opens_what_is_hidden() -> None:
    leader, other, stranger = KeyPair(), KeyPair(), KeyPair()
    secret = drawn()
    hidden = leader.hidden(secret, other.public)
    assert other.opened(hidden, leader.public) == secret
    assert stranger.opened(hidden, leader.public) != secret != hidden
    for public in ("0", "1", f"{_PRIME - 1:x}", f"{_PRIME:x}", "-3", "key"):
        with pytest.raises(ValueError):
            other.opened(hidden, public)


def test_no_rank_hides_the_secret_for_more_than_a_few_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 did so for all ranks, and no other thread of its process ran meanwhile."""
    hiding: Counter[int] = Counter()
    known: list[str] = []
    hide, kept, notes = KeyPair.hidden, MemoryStore.set, dict[str, bytes]()
    dropped = MemoryStore.delete_key

    def hidden(keys: KeyPair, secret: str, public: str) -> str:
        hiding[id(keys)] += 1
        return hide(keys, secret, public)

    def noted(store: MemoryStore, key: str, value: bytes) -> None:
        notes[key] = value
        kept(store, key, value)

    def forgotten(store: MemoryStore, key: str) -> bool:
        notes.pop(key, None)
        return dropped(store, key)

    monkeypatch.setattr(discovery, "HANDED_ON", 2)
    monkeypatch.setattr(KeyPair, "hidden", hidden)
    monkeypatch.setattr(MemoryStore, "set", noted)
    monkeypatch.setattr(MemoryStore, "delete_key", forgotten)
    monkeypatch.setattr(MemoryExchange, "let_in", lambda _, secret: known.append(secret))
    with HostRanks(disks(7)) as ranks:
        save(ranks, 1)
        assert restored(ranks, 7) == 1
    assert list(hiding.values()) == [2, 2, 2]
    assert len(known) == 7
    assert len(set(known)) == 1
    assert not [key for key in notes if "/hosts-key-" in key or "/hosts-secret-" in key]


@pytest.mark.thorough
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("operation", ["post", "peek", "drop"])
def test_a_rank_that_fails_behind_the_meeting_goes_on_there(
    operation: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the outcome, so no rank meets it again. is_told: its failed save stops the next one
    before that comes to the meeting."""
    monkeypatch.setattr(discovery, "HANDED_ON", 1)
    act, lost = getattr(Peers, operation), list[str]()

    def fail_once(peers: Peers, name: str, *note: bytes) -> Any:
        found = act(peers, name, *note)
        is_its = name in ("hosts-key-2", "hosts-secret-2", "hosts-secret-1")
        if peers.rank == 1 and is_its and not lost:
            lost.append(name)
            raise PeerLostError("the store does not answer", ranks=(0,))
        return found

    monkeypatch.setattr(Peers, operation, fail_once)
    with HostRanks(disks(3), peer_timeout_s=4.0) as ranks:
        saves = ranks.begin(1, lambda rank: state(rank, 1))
        named = {}
        for rank in (0, 1, 2):
            with pytest.raises(PeerLostError) as caught:
                saves[rank].wait("committed", DEADLINE_S)
            named[rank] = caught.value.ranks
            if is_told:
                inside(ranks.ckpts[rank]).levels.hosts.give_up(caught.value)
            inside(ranks.ckpts[rank]).peers.timeout_s = DEADLINE_S
        must(lost)
        if operation != "post":  # else the note was there in spite of the error
            assert 1 in named[2]
        save(ranks, 2)
        assert restored(ranks, 3) == 2


@pytest.mark.parametrize("each", [1, 2])
def test_all_ranks_see_the_steps_of_all_hosts(each: int) -> None:
    hosts = disks(3, each)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2, 3)
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()[-2:]) == [[2, 3]] * 3 * each
        assert restored(ranks, 3 * each) == 3
    with HostRanks(hosts) as ranks:
        assert restored(ranks, 3 * each) == 3
        save(ranks, 4)
        assert restored(ranks, 3 * each) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("each", [1, 2])
def test_any_one_host_is_lost_and_the_others_go_on(lost: int, each: int) -> None:
    hosts = disks(4, each)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2, 3)
        flush(ranks)
    left = [fs for fs in hosts if fs is not hosts[lost * each]]
    must(len(left) == 3 * each)
    with HostRanks(left) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()[-1]) == [3] * 3 * each
        assert restored_of(ranks, 4 * each) == 3
        flush(ranks)  # copies of what the lost host held are there again
        assert status(ranks.ckpts[0], "local.copies").newest == 3
        save(ranks, 4, 5)
        flush(ranks)
    with HostRanks(left[each:]) as ranks:  # and another one
        assert restored_of(ranks, 3 * each) == 5


@pytest.mark.parametrize("lost", range(3))
def test_a_second_host_is_lost_before_anything_new_was_saved(lost: int) -> None:
    hosts = disks(4)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
    with HostRanks(hosts[1:]) as ranks:
        assert restored_of(ranks, 4) == 2
        flush(ranks)
    left = [fs for index, fs in enumerate(hosts[1:]) if index != lost]
    with HostRanks(left) as ranks:
        assert restored_of(ranks, 4) == 2


def test_a_job_of_the_same_size_on_fewer_hosts_has_every_value_of_every_rank() -> None:
    hosts = disks(4)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
    left = hosts[:2] + hosts[3:] + hosts[3:]
    with HostRanks(left) as ranks:
        assert restored(ranks, 4) == 2
        save(ranks, 3)
        assert restored(ranks, 4) == 3


def test_without_copies_a_lost_host_takes_its_steps_with_it(caplog: Any) -> None:
    hosts = disks(3)
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        save(ranks, 1, 2)
    with HostRanks(hosts[:2], [local(copies=0)]) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[], []]
    assert (
        "step 2 is not whole at level local: no host of this job has the files of rank 2"
        in caplog.text
    )


def test_a_farther_level_of_the_hosts_takes_over_when_all_memory_is_lost() -> None:
    hosts = disks(3)
    levels = [
        local(),
        Directory(path="/second", per_host=True, copies=1, name="second", keep=2, every=2),
    ]
    with HostRanks(hosts, levels) as ranks:
        save(ranks, 1, 2, 3)
        flush(ranks)
        assert status(ranks.ckpts[0], "second.copies").newest == 3
    for fs in hosts:
        for root in (LOCAL, f"{LOCAL}-copies"):
            remove(fs, root)
    with HostRanks(hosts[:2], levels) as ranks:
        assert restored_of(ranks, 3) == 3
        save(ranks, 4)
        flush(ranks)
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()[-1]) == [4, 4]
    with HostRanks(hosts[1:2] * 2, levels) as ranks:
        assert restored(ranks, 2) == 4


@pytest.mark.parametrize("copies", [0, 1])
def test_a_step_that_is_whole_over_two_levels_only_is_restored(copies: int, caplog: Any) -> None:
    """One host was restarted and has lost its memory, so to say, and another one its disk."""
    hosts = disks(3)
    second = Directory(path="/second", per_host=True, name="second", keep=2)
    levels = [local(copies=0), second]
    with HostRanks(hosts, levels) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
        save(ranks, 3)
        flush(ranks)
    remove(hosts[0], LOCAL)
    remove(hosts[1], "/second")
    with HostRanks(hosts, [local(copies=copies), second]) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[2, 3]] * 3
        assert restored(ranks, 3) == 3
        save(ranks, 4)
        flush(ranks)
        assert restored(ranks, 3) == 4
    assert "is not whole" not in caplog.text


def test_a_step_of_which_two_levels_have_different_saves_is_none() -> None:
    hosts = disks(2)
    second = Directory(path="/second", per_host=True, name="second", keep=2)
    with HostRanks(hosts, [local(copies=0), second]) as ranks:
        save(ranks, 1)
        flush(ranks)
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        save(ranks, 1)  # again: another manifest, at the first level alone
    remove(hosts[0], LOCAL)
    remove(hosts[1], "/second")
    with HostRanks(hosts, [local(copies=0), second]) as ranks:
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[], []]


def test_what_is_copied_stays_until_something_newer_is() -> None:
    """Saves go on while a copy is held up: what they retire must not be all that is copied."""
    hosts = disks(3)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
        with HeldCopy(ranks.ckpts[1], "local.copies") as held:
            save(ranks, 2, 3, 4, 5)
            must(held.waiting.wait(DEADLINE_S))
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
            assert [steps_at(fs, f"{LOCAL}-copies") for fs in hosts] == [[1]] * 3
            assert [steps_at(fs, LOCAL) for fs in hosts] == [[1, 2, 4, 5]] * 3
            assert ranks.each(lambda rank: ranks.ckpts[rank].steps())[0][0] == 1
        flush(ranks)
        assert [steps_at(fs, LOCAL) for fs in hosts] == [[4, 5]] * 3


# -- the two rounds of a commit --------------------------------------------------------------------


def stores(ranks: HostRanks, rank: int) -> list[Any]:
    place = inside(ranks.ckpts[rank]).levels.near[0]
    return [place.store, place.copies.store]


def test_a_host_that_cannot_publish_fails_the_save_on_all_by_name_and_older_steps_stay() -> None:
    hosts = disks(3)
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        save(ranks, 1)
        hosts[1].fail_next("rename", errno.EIO)
        failures = ranks.failures(2, lambda rank: state(rank, 2))
        assert hosts[1].fired["injected rename"] == 1
        for rank in (0, 2):
            assert isinstance(failures[rank], PeerFailedError)
            assert failures[rank].rank == 1
        assert "not all hosts have published it" in str(failures[0])
        assert [steps_at(fs, LOCAL) for fs in hosts] == [[1, 2], [1], [1, 2]]  # half of it is there
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[1]] * 3
        assert restored(ranks, 3) == 1
        save(ranks, 3, 4)
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[3, 4]] * 3
        ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
    assert [steps_at(fs, LOCAL) for fs in hosts] == [[3, 4]] * 3


def test_a_step_saved_again_on_some_hosts_only_is_none_and_an_older_one_is_whole() -> None:
    """The hosts replace it one after the other: then neither of the two is whole."""
    hosts = disks(3)
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        save(ranks, 1, 2)
        hosts[1].fail_next("exchange", errno.EIO)
        ranks.failures(2, lambda rank: state(rank, 7))
        assert hosts[1].fired["injected exchange"] == 1
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        assert restored(ranks, 3) == 1
        save(ranks, 2)
        assert restored(ranks, 3) == 2


@pytest.mark.thorough
def test_a_host_that_is_lost_between_the_rounds_is_named_by_all(monkeypatch: Any) -> None:
    hosts = disks(3)
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        save(ranks, 1)
        for ckpt in ranks.ckpts:
            inside(ckpt).peers.timeout_s = 3.0
        lost = inside(ranks.ckpts[1]).levels.near[0].store
        told = threading.Event()

        def lose(*_: Any) -> None:
            must(told.wait(DEADLINE_S))
            raise StorageError("the host is gone", errno=errno.EIO, path="")

        monkeypatch.setattr(lost, "commit", lose)
        saves = ranks.begin(2, lambda rank: state(rank, 2))
        for rank in (0, 2):
            with pytest.raises(PeerLostError) as caught:
                saves[rank].wait("committed", DEADLINE_S)
            assert caught.value.ranks == (1,)
        told.set()
        with pytest.raises(StateholdError):
            saves[1].wait("committed", DEADLINE_S)
    assert [steps_at(fs, LOCAL) for fs in hosts] == [[1, 2], [1], [1, 2]]
    with HostRanks(hosts, [local(copies=0)]) as ranks:
        assert restored(ranks, 3) == 1
        save(ranks, 2, 3)
        assert restored(ranks, 3) == 3


class Killer:
    """All processes end before the n-th change that any of them makes to its disk."""

    def __init__(self, moment: int) -> None:
        self.left = moment
        self.is_over = False
        self._guard = threading.Lock()

    def before(self, operation: str, _args: tuple[Any, ...]) -> None:
        if operation in CHANGES:
            with self._guard:
                self.left -= 1
                self.is_over = self.is_over or self.left < 0
        if self.is_over:
            raise StorageError("killed", errno=errno.EIO, path="")


CHANGES = ("mkdir", "open_write", "write_file", "rename", "exchange", "sync_dir", "unlink", "rmdir")


@pytest.mark.thorough
def test_all_processes_are_killed_before_any_change_of_a_save_and_its_copies() -> None:
    """At every seventh moment (STATEHOLD_NODES: at each) of the two rounds, of retention and of
    copies. Each time the newest step that save() reported on all ranks is there, and the next job
    goes on."""
    seen: set[int | None] = set()
    for moment in range(0, 1000, EACH):
        hosts = disks(3)
        with HostRanks(hosts) as ranks:
            save(ranks, 1, 2)
            flush(ranks)
            killer = Killer(moment)
            for rank in range(3):
                for store in stores(ranks, rank):
                    store.fs = Spy(store.fs, killer.before)
            told = _told(ranks, 3)
            for rank in range(3):  # nothing is done at the end by processes that are gone
                end(ranks.ckpts[rank], flush=False)
        with HostRanks(hosts) as ranks:
            got = restored(ranks, 3)
            seen.add(got)
            assert got == 3 or not any(told)
            assert got in (2, 3)
            save(ranks, 3, 4)
            flush(ranks)
        with HostRanks(hosts[1:]) as ranks:
            assert restored_of(ranks, 3) == 4
        if not killer.is_over:
            break
    assert seen == {2, 3}
    assert moment > 30


def _told(ranks: HostRanks, step: int) -> list[bool]:
    """Save on all ranks; the ranks on which the save reported its commit."""

    def act(rank: int) -> None:
        ckpt = ranks.ckpts[rank]
        try:
            ckpt.save(step, state(rank, step)).wait("committed", DEADLINE_S)
        finally:
            inside(ckpt).pipeline.drain()
            inside(ckpt).levels.promotions.wait(DEADLINE_S)

    return [not isinstance(each, Exception) for each in ranks.outcomes(act)]


# -- what is refused -------------------------------------------------------------------------------


def test_a_memory_of_one_step_is_for_one_host() -> None:
    hosts = disks(2)
    with HostRanks(hosts, [Memory(path=LOCAL, keep=1)]) as ranks:
        first, second = ranks.failures(1, lambda rank: state(rank, 1))
        assert isinstance(first, UsageError)
        assert "must keep at least 2 steps" in str(second)
    with HostRanks([hosts[0]] * 2, [Memory(path=LOCAL, keep=1)]) as ranks:
        save(ranks, 1, 2)
        assert restored(ranks, 2) == 2


def test_copies_on_more_hosts_than_there_are_are_told_once(caplog: Any) -> None:
    with HostRanks(disks(2), [local(copies=2)]) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
    assert caplog.text.count("asks for 2 copies on other hosts, but there are 2 hosts") == 1


@pytest.mark.parametrize(
    "wrong",
    [{"copies": -1}, {"copies": True}, {"copies": 1}, {"per_host": True}, {"copies": 1, "keep": 1}],
)
def test_levels_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Directory(**wrong)


def test_a_copy_that_another_rank_of_the_host_has_begun_is_left_alone() -> None:
    """The rank that leads clears away what earlier copies have left, and may come later."""
    fs, digest = SimFs(seed=1), "0123456789abcdef"
    names = [f"step-000000000007.5f3a09c1-{number}.copy-{digest}" for number in (4, 5, 6)]
    make_directories(fs, LOCAL)
    for name in names:
        fs.mkdir(f"{LOCAL}/{name}.partial")
    unfinished = Unfinished(fs, LOCAL)
    unfinished.clear(None, names[1].partition(".")[2], and_own=False)
    assert sorted(name for name, _ in fs.listdir(LOCAL)) == [
        f"{name}.partial" for name in names[1:]
    ]
    unfinished.clear(None, names[1].partition(".")[2])
    assert [name for name, _ in fs.listdir(LOCAL)] == [f"{names[2]}.partial"]
