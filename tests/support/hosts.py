"""A job over several hosts, in one process: each host has a simulated disk, ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statehold import Checkpointer, Directory
from support.in_memory import MemoryNetwork, SimFs, ranks_on_hosts
from support.ranks import Ranks

LOCAL = "/local"


def local(copies: int = 1, **options: Any) -> Directory:
    """A level on a disk of each host."""
    return Directory(path=LOCAL, per_host=True, copies=copies, name="local", keep=2, **options)


class HostRanks(Ranks):
    """`disks`: that of each rank's host."""

    def __init__(self, disks: Sequence[SimFs], levels: Sequence[Any] = (), **options: Any) -> None:
        self.disks = list(disks)
        self.network = MemoryNetwork()
        options["levels"] = list(levels) or [local()]
        super().__init__(disks[0], len(disks), run="/run", **options)

    def _opened(self, options: dict[str, Any]) -> list[Checkpointer]:
        return ranks_on_hosts(self.disks, self.run, self.network, **options)


def disks(hosts: int, ranks_each: int = 1) -> list[SimFs]:
    """The disks of the ranks of a job on so many hosts."""
    return [fs for seed in range(hosts) for fs in [SimFs(seed=seed)] * ranks_each]
