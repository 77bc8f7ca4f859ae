"""What the plan of copies costs grows with the hosts of a job, and not with their square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from statehold.checkpoint.levels.hosts.census import Holder, PlacedFiles, lacking_hosts
from statehold.layout.layout import Ranks
from support.hosts import HostRanks, disks
from support.in_memory.board import MemoryStore
from support.rank_states import state


class Counted(list[Any]):
    """A list that counts what is looked up in it, and how often it is gone through."""

    looked_up = gone_through = 0

    def __contains__(self, item: object) -> bool:
        self.looked_up += 1
        return super().__contains__(item)

    def __iter__(self) -> Iterator[Any]:
        self.gone_through += 1
        return super().__iter__()


def test_the_hosts_that_lack_a_file_are_found_without_a_look_at_all_hosts() -> None:
    having = Counted([1998])
    assert lacking_hosts(having, 2000, 2) == [1999, 0]
    assert having.looked_up <= 4


def test_the_hosts_that_lack_a_file_are_not_those_that_have_it() -> None:
    assert lacking_hosts([2, 3], 4, 3) == [0, 1]
    assert lacking_hosts([2], 3, 5) == [0, 1]
    assert lacking_hosts([0, 1], 2, 1) == []
    assert lacking_hosts([0], 1, 1) == []


def test_the_copies_of_all_hosts_are_found_in_one_pass() -> None:
    hosts = 50
    own = [Holder(host, False, Ranks.of([host])) for host in range(hosts)]
    copies = [Holder((host + 1) % hosts, True, Ranks.of([host])) for host in range(hosts)]
    later = [Holder((host + 2) % hosts, True, Ranks.of([host])) for host in range(hosts)]
    first, second = Counted([*own, *copies]), Counted([*own, *later])
    placed = PlacedFiles(hosts, first, "a").with_copies_of(  # type: ignore[arg-type]
        PlacedFiles(hosts, second, "a")  # type: ignore[arg-type]
    )
    for writer, found in enumerate(placed.hosts):
        assert sorted(found) == sorted((writer + more) % hosts for more in range(3))
    assert first.gone_through + second.gone_through <= 4


def test_the_first_rank_of_a_host_alone_reads_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the records of all ranks, so all of them would read the square of it from one."""
    read = list[bytes]()
    multi_get = MemoryStore.multi_get

    def counting(self: MemoryStore, keys: Sequence[str]) -> list[bytes]:
        found = multi_get(self, keys)
        read.extend(found)
        return found

    with HostRanks(disks(2, ranks_each=3)) as ranks:
        ranks.save(1, lambda rank: state(rank, 1))  # which begins with the meeting of the hosts
        monkeypatch.setattr(MemoryStore, "multi_get", counting)
        ranks.save(2, lambda rank: state(rank, 2))
        name = b"rank-00005-of-00006"
        assert len([each for each in read if name in each]) == 2
