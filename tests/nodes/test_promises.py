"""What a level of several hosts reports as copied survives the loss of any one host.

In one process: each host has a simulated disk, ranks are threads. Copies are held up, so that other
things happen before they end: younger saves, the same step again, a look at all steps, failures.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from nodes.test_hosts import flush, restored_of, save
from statehold import Directory
from statehold.errors import NoSpaceError, PeerLostError, StorageError
from support.faults import DEADLINE_S, Spy, must
from support.hosts import LOCAL, HostRanks, disks, local
from support.inside import end, inside, promoter
from support.levels import HeldCopy, remove, settle, status, steps_at

HOSTS = 3
COPIES = "local.copies"
SECOND = Directory(path="/second", per_host=True, copies=1, name="second", keep=2)


def settled(ranks: HostRanks) -> None:
    """Return once no rank has a save or a copy under way."""
    ranks.each(lambda rank: settle(ranks.ckpts[rank]))


def kill(ranks: HostRanks) -> None:
    """End all ranks without copying anything more."""
    for ckpt in ranks.ckpts:
        end(ckpt, flush=False)


@pytest.mark.parametrize("lost", range(HOSTS))
def test_a_step_whose_copy_ends_after_many_younger_saves(lost: int) -> None:
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
        with HeldCopy(ranks.ckpts[1], COPIES) as held:
            save(ranks, 2, 3, 4, 5)
            must(held.waiting.wait(DEADLINE_S))
        settled(ranks)
        assert status(ranks.ckpts[0], COPIES).newest == 2
        assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[2, 4, 5]] * HOSTS
        assert [steps_at(fs, LOCAL) for fs in hosts] == [[2, 4, 5]] * HOSTS
        kill(ranks)
    left = [fs for fs in hosts if fs is not hosts[lost]]
    with HostRanks(left) as ranks:
        assert restored_of(ranks, HOSTS) == 2


class HeldPart:
    """The copies of one rank to a level: the first of them is held when its part is there."""

    def __init__(self, ranks: HostRanks, rank: int, level: str) -> None:
        self.is_there, self._go_on = threading.Event(), threading.Event()
        self._place = promoter(ranks.ckpts[rank], level).place
        self._take = self._place.take
        self._place.take = self._held  # type: ignore[method-assign]

    def _held(self, copy: Any) -> None:
        self._take(copy)
        self.is_there.set()
        must(self._go_on.wait(DEADLINE_S))

    def release(self) -> None:
        self._go_on.set()


def test_a_step_that_is_saved_again_is_copied_again_whatever_the_earlier_copy_had() -> None:
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
        held = HeldPart(ranks, 1, COPIES)
        save(ranks, 2)
        must(held.is_there.wait(DEADLINE_S))
        save(ranks, 2)
        assert status(ranks.ckpts[0], COPIES).newest == 1
        held.release()  # what is published now are copies of the earlier save
        settled(ranks)
        assert status(ranks.ckpts[0], COPIES).newest == 2
        kill(ranks)
    with HostRanks(hosts[1:]) as ranks:
        assert restored_of(ranks, HOSTS) == 2


def test_copies_of_a_step_that_is_saved_again_are_none_of_the_new_save() -> None:
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1, 2)
        flush(ranks)
        assert status(ranks.ckpts[0], COPIES).newest == 2
        with HeldCopy(ranks.ckpts[1], COPIES) as held:
            save(ranks, 2)
            must(held.waiting.wait(DEADLINE_S))
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
            assert status(ranks.ckpts[0], COPIES).newest == 1
        settled(ranks)
        assert status(ranks.ckpts[0], COPIES).newest == 2
        kill(ranks)


def test_a_copy_that_ends_while_all_ranks_look_which_steps_there_are() -> None:
    """One host has listed its copies, and gets the last ones before all ranks have the result."""
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
        ended = threading.Event()
        with HeldCopy(ranks.ckpts[1], COPIES) as held:
            save(ranks, 2)
            must(held.waiting.wait(DEADLINE_S))

            def before(operation: str, args: tuple[Any, ...]) -> None:
                if operation == "read_file" and f"{LOCAL}-copies" in args[0] and not ended.is_set():
                    held.go_on.set()
                    for ckpt in ranks.ckpts:
                        inside(ckpt).levels.promotions.wait(DEADLINE_S)
                    ended.set()

            store = promoter(ranks.ckpts[1], COPIES).place.store
            store.fs = Spy(store.fs, before)
            assert ranks.each(lambda rank: ranks.ckpts[rank].steps()) == [[1, 2]] * HOSTS
            must(ended.is_set())
        assert status(ranks.ckpts[0], COPIES).newest == 2
        with HeldCopy(ranks.ckpts[1], COPIES) as held:
            save(ranks, 3, 4, 5)
            must(held.waiting.wait(DEADLINE_S))
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
            assert [steps_at(fs, f"{LOCAL}-copies") for fs in hosts] == [[2]] * HOSTS
            assert [steps_at(fs, LOCAL) for fs in hosts] == [[2, 3, 4, 5]] * HOSTS


def test_a_rank_that_misses_the_end_of_a_copy_keeps_what_the_others_call_copied(
    monkeypatch: Any,
) -> None:
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
        peers = inside(ranks.ckpts[1]).peers
        must(peers is not None)
        agree, missed = peers.agree, threading.Event()

        def miss(kind: str, *args: Any) -> bytes:
            outcome = agree(kind, *args)
            if kind == f"promote {COPIES} published":
                missed.set()
                raise PeerLostError("rank 0 is silent", ranks=(0,))
            return outcome

        with monkeypatch.context() as silent:
            silent.setattr(peers, "agree", miss)
            save(ranks, 2)
            settled(ranks)
        must(missed.is_set())
        assert status(ranks.ckpts[0], COPIES).newest == 2
        with HeldCopy(ranks.ckpts[2], COPIES):
            save(ranks, 3, 4, 5)
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
            for ckpt in ranks.ckpts:
                inside(ckpt).stop_copies()
        assert status(ranks.ckpts[0], COPIES).newest == 2
        kill(ranks)
    with HostRanks(hosts[1:]) as ranks:
        assert restored_of(ranks, HOSTS) == 2


# -- a farther level ---------------------------------------------------------------------------


def test_copies_do_not_count_without_the_files_of_their_level(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("the disk is gone", errno=errno.EIO, path="")

    hosts = disks(HOSTS)
    with HostRanks(hosts, [local(), SECOND]) as ranks:
        with monkeypatch.context() as broken:
            broken.setattr(promoter(ranks.ckpts[1], "second").place, "take", refuse)
            save(ranks, 1)
            settled(ranks)
        for level in ("second", "second.copies"):
            assert status(ranks.ckpts[0], level).newest is None
            assert status(ranks.ckpts[0], level).error is not None
        save(ranks, 2)
        settled(ranks)
        for level in ("second", "second.copies"):
            assert status(ranks.ckpts[0], level).newest == 2


def test_copies_of_a_step_that_is_saved_again_follow_at_a_farther_level() -> None:
    """Its copies come before its own files there, which still are those of the earlier save."""
    hosts = disks(HOSTS)
    levels = [local(copies=0), SECOND]
    with HostRanks(hosts, levels) as ranks:
        save(ranks, 1)
        flush(ranks)
        copies = HeldPart(ranks, 1, "second.copies")
        with HeldCopy(ranks.ckpts[1], "second") as held:
            save(ranks, 1)
            must(held.waiting.wait(DEADLINE_S))
            must(copies.is_there.wait(DEADLINE_S))
            copies.release()
        settled(ranks)
        assert status(ranks.ckpts[0], "second.copies").newest == 1
        kill(ranks)
    for fs in hosts:
        remove(fs, LOCAL)
    with HostRanks(hosts[1:], levels) as ranks:
        assert restored_of(ranks, HOSTS) == 1


def test_a_step_that_the_first_level_cannot_take_is_copied_where_it_is(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise NoSpaceError("full", errno=errno.ENOSPC, path="")

    hosts = disks(HOSTS)
    with HostRanks(hosts, [local(), SECOND]) as ranks:
        save(ranks, 1)
        flush(ranks)
        with monkeypatch.context() as full:
            full.setattr(inside(ranks.ckpts[1]).levels.store, "data_file", refuse)
            save(ranks, 2)
            settled(ranks)
        assert status(ranks.ckpts[0], COPIES).newest == 1
        assert status(ranks.ckpts[0], "second.copies").newest == 2
        # Step 3 reaches no other level, so the host that is lost takes it away.
        with HeldCopy(ranks.ckpts[1], COPIES), HeldCopy(ranks.ckpts[1], "second"):
            save(ranks, 3)
            ranks.each(lambda rank: inside(ranks.ckpts[rank]).pipeline.drain())
            for ckpt in ranks.ckpts:
                inside(ckpt).stop_copies()
        kill(ranks)
    with HostRanks(hosts[1:], [local(), SECOND]) as ranks:
        assert restored_of(ranks, HOSTS) == 2


def test_all_ranks_share_a_copy_alike_though_another_copy_ends_meanwhile(monkeypatch: Any) -> None:
    """Rank 1 shares the step out before copies beside the first level are complete, and rank 0
    after that. A lost host's files are then near another rank."""
    hosts = disks(HOSTS)
    with HostRanks(hosts) as ranks:
        save(ranks, 1)
        flush(ranks)
    left = hosts[1:]
    with HostRanks(left, [local(), SECOND]) as ranks:
        assert restored_of(ranks, HOSTS) == 1
        part = HeldPart(ranks, 1, "second")
        second, copies = (promoter(ranks.ckpts[0], name).place for name in ("second", COPIES))
        prepare, land, landed = second.prepare, copies.landed, threading.Event()
        with HeldCopy(ranks.ckpts[1], COPIES) as held:

            def wait_and_prepare(token: str | None) -> None:
                must(part.is_there.wait(DEADLINE_S))
                held.go_on.set()
                must(landed.wait(DEADLINE_S))
                part.release()
                prepare(token)

            def land_and_tell(*args: Any) -> None:
                land(*args)
                landed.set()

            monkeypatch.setattr(second, "prepare", wait_and_prepare)
            monkeypatch.setattr(copies, "landed", land_and_tell)
            flush(ranks)
        assert status(ranks.ckpts[0], "second.copies").newest == 1
        kill(ranks)
    for fs in left:
        remove(fs, LOCAL)
        remove(fs, f"{LOCAL}-copies")
    with HostRanks(left[:1], [local(), SECOND]) as ranks:
        assert restored_of(ranks, HOSTS) == 1
