"""Runs on file systems that several hosts mount: NFS of a kernel, GlusterFS with two replicas.

Each server starts once, and runs all scenarios of clients.py. The tests look at what these found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import statehold

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
LIMIT_S = 800.0
SAVES = [1, 2, 3, 4, 5]
QUIET: dict[str, list[Any]] = {
    name: [] for name in ("other_host", "just_begun", "second_job", "reader", "ranks")
}
# Its own command must not match the pattern.
KILL_BRICK, KILL_BRICKS = "pkill -9 -f '[b]rick-name [^ ]*brick-1 '", "pkill -9 -x glusterfsd"
START_BRICKS = "gluster --mode=script volume start v force"
HARD = "a hard mount of NFS waits instead"
STOP_NFS = "rpc.nfsd 0"
START_NFS = "rpc.nfsd -V 4.2 4; echo Y > /proc/fs/nfsd/v4_end_grace"

GLUSTERFS = pytest.param(
    ["glusterfs.sh"], id="glusterfs",
    marks=pytest.mark.programs("glusterd", "mount.glusterfs", "ip", "unshare", root=True),
)  # fmt: skip
NFS = [
    pytest.param(
        ["nfs.sh", options], id=name,
        marks=pytest.mark.programs(
            "linux.uml", "rpc.nfsd", "rpcbind", "modprobe", "ip", "cc", "unshare", root=True
        ),
    )
    for name, options in [("nfs-3", "vers=3"), ("nfs-4.2", "vers=4.2"), ("noac", "vers=4.2,noac")]
]  # fmt: skip

Found = Mapping[str, dict[str, Any]]


def scenarios(folder: Path, script: str, *options: str) -> Found:
    """What the scenarios find on the mounts of this server."""
    if script == "glusterfs.sh":
        outages = {
            "outage": [KILL_BRICK, START_BRICKS, 1.0], "failure": [KILL_BRICKS, START_BRICKS, 0],
            "closed": [KILL_BRICKS, START_BRICKS],
        }  # fmt: skip
    else:
        outages = {"outage": [STOP_NFS, START_NFS, 5.0]}
    at = folder / "share"
    at.mkdir()
    namespaces = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    ran = subprocess.run(
        ["unshare", *namespaces, HERE / script, at, *options, sys.executable, HERE / "clients.py",
         at / "place", at / "a", at / "b", json.dumps({**QUIET, **outages})],
        env={
            **os.environ, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(statehold.__file__).parents[1]), str(TESTS)]),
        },
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    found = {event.pop("scenario"): event for event in map(json.loads, ran.stdout.splitlines())}
    assert set(found) == {*QUIET, *outages}, ran.stderr + (at / "log").read_text()
    return found


@pytest.fixture(scope="module", params=[GLUSTERFS, *NFS])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return scenarios(tmp_path_factory.mktemp("files"), *request.param)


def answer(found: Found, name: str) -> dict[str, Any]:
    assert "error" not in found[name], found[name]["error"]
    return found[name]


def test_a_host_goes_on_with_what_another_host_has_saved(found: Found) -> None:
    assert answer(found, "other_host") == {"restored": [3, 5]}


def test_a_run_that_another_host_has_just_begun_is_found(found: Found) -> None:
    """Also by a client that remembers that there was none."""
    begun = answer(found, "just_begun")
    assert begun == {"before": [[], None], "restored": 1, "loaded": 2}


def test_a_host_does_not_save_into_the_run_of_another_one(found: Found) -> None:
    assert answer(found, "second_job") == {"refusal": "RunBusyError", "restored": 2}


def test_a_host_reads_whole_steps_while_another_one_saves_and_retires(found: Found) -> None:
    """restore() and load(), until both have seen the last step."""
    assert answer(found, "reader")["reads"] >= 2


def test_ranks_of_two_hosts_save_together(found: Found) -> None:
    ranks = [{"restored": 3, "own": 0}, {"restored": 3, "own": 1}]
    assert answer(found, "ranks") == {"ranks": ranks}


def test_a_server_that_stops_in_the_middle_of_a_save_costs_nothing(found: Found) -> None:
    """A hard mount of NFS waits for it. Of GlusterFS, one of two replicas stops."""
    outage = answer(found, "outage")
    assert outage == {"saved": SAVES, "failed": [], "newest": 5, "other": 5}


def test_without_any_replica_a_save_fails_by_name_and_later_ones_commit(found: Found) -> None:
    if "failure" not in found:
        pytest.skip(HARD)
    failure = answer(found, "failure")
    assert failure["saved"][:2] == [1, 2]
    first = failure["failed"][0]
    assert "ENOTCONN" in first
    assert "the save of step 3; nothing was published" in first
    assert failure["newest"] == failure["other"] == failure["saved"][-1]


def test_a_job_ends_without_its_server_and_another_host_goes_on(found: Found) -> None:
    if "closed" not in found:
        pytest.skip(HARD)
    assert answer(found, "closed") == {"restored": 2}
