"""How much memory may still be taken: of the host, of control groups, of the process itself."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from statehold.process import host_memory as memory

KIB = 1024
INFINITE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Machine:
    """A /proc and a /sys/fs/cgroup of our own."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")

    def write(self, file: Path, text: object) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def group(self, folder: str, **files: object) -> None:
        for name, text in files.items():
            self.write(self.groups / folder / f"memory.{name}", text)

    def available(self) -> memory.Room:
        return memory.available(self.proc, self.groups)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(resource, "getrlimit", lambda _: INFINITE)
    return Machine(tmp_path)


def test_the_host(machine: Machine) -> None:
    assert machine.available() == memory.Room(1000 * KIB, "available on this host")


def test_where_nothing_can_be_read_there_is_nothing(tmp_path: Path) -> None:
    assert memory.available(tmp_path, tmp_path).nbytes == 0


def test_a_host_that_never_overcommits(machine: Machine) -> None:
    told = "MemAvailable: 1000 kB\nCommitLimit: 700 kB\nCommitted_AS: 600 kB"
    machine.write(machine.proc / "meminfo", told)
    machine.write(machine.proc / "sys/vm/overcommit_memory", 1)
    assert machine.available().nbytes == 1000 * KIB
    machine.write(machine.proc / "sys/vm/overcommit_memory", 2)
    assert machine.available().nbytes == 100 * KIB


def test_the_narrowest_group_counts_without_its_page_cache(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/jobs/mine")
    machine.group("jobs", max=500 * KIB, current=450 * KIB)
    stat = "anon 5\nactive_file 2048\ninactive_file 1024\nfile 99999"
    machine.group("jobs/mine", max="max", high="max", current=300 * KIB, stat=stat)
    assert machine.available() == memory.Room(50 * KIB, "left to the control group /jobs")
    machine.group("jobs/mine", high=310 * KIB)
    assert machine.available() == memory.Room(13 * KIB, "left to the control group /jobs/mine")


def test_groups_of_the_first_version(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "5:cpu:/x\n4:memory:/a/b\n0::/")
    stat = "active_file 1\ntotal_active_file 1024\ntotal_inactive_file 0"
    machine.group("memory/a/b", limit_in_bytes=2**63 - 4096, usage_in_bytes=100, stat=stat)
    assert machine.available().nbytes == 1000 * KIB
    machine.group("memory/a", limit_in_bytes=40 * KIB, usage_in_bytes=30 * KIB, stat=stat)
    assert machine.available() == memory.Room(11 * KIB, "left to the control group /a")


def test_a_container_that_sees_its_group_as_the_root(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "4:memory:/docker/0123")
    machine.group("memory", limit_in_bytes=60 * KIB, usage_in_bytes=80 * KIB, stat="")
    assert machine.available() == memory.Room(0, "left to the control group /")


@pytest.mark.parametrize(("kind", "left"), [(resource.RLIMIT_AS, 3), (resource.RLIMIT_DATA, 2)])
def test_limits_of_the_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: int, left: int
) -> None:
    page = resource.getpagesize()
    machine.write(machine.proc / "self/statm", "7 2 1 1 0 8 0")
    monkeypatch.setattr(
        resource, "getrlimit", lambda asked: (10 * page, -1) if asked == kind else INFINITE
    )
    assert machine.available().nbytes == left * page


def test_this_machine() -> None:
    room = memory.available()
    assert room.nbytes > 0, room


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 6),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_TASKS_PER_NODE": "1"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 6),
    ],
)
def test_who_shares_a_host(environ: dict[str, str], expected: int) -> None:
    assert memory.ranks_on_host(6, environ) == expected
