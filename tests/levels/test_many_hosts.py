"""What the plan of copies costs grows with the hosts of a job, and not with their square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from statehold.checkpoint.levels.hosts.census import Holder, PlacedFiles, lacking_hosts
from statehold.layout.layout import Ranks


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
