"""A job and a real server, undisturbed: what gets there, what comes back, and what goes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import statehold
from infra.s3.jobs import Job, settled
from infra.s3.network import Network, before
from infra.s3.servers import BUCKET, Server
from statehold.steps.objects import SHARED, attempt_of, commit_name
from support.faults import DEADLINE_S, SMALL
from support.sharing import Tuned, same


def directories(names: list[str]) -> list[int]:
    """The steps of the directories in which these objects are."""
    attempts = {attempt_of(name.partition("/")[0]) for name in names if "/" in name}
    return sorted({attempt[0] for attempt in attempts if attempt is not None})


def unfinished(server: Server, prefix: str) -> list[str]:
    return [name for name in server.uploads() if name.startswith(prefix)]


@pytest.fixture
def url(prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}"


def test_a_job_goes_on_from_the_store_alone(
    tmp_path: Path, server: Server, network: Network, url: str, prefix: str
) -> None:
    job = Job(tmp_path / "run", url, network.port)
    with job.open() as ckpt:
        assert job.train(ckpt, 5, lambda _: ckpt.flush(DEADLINE_S)) == 0
        assert settled(ckpt, 5)
    parts = [target for method, target in network.requests if "partNumber=3" in target]
    assert len(parts) >= 5  # each step went there in parts
    assert unfinished(server, prefix) == []
    names = server.objects(prefix)
    assert directories(names) == [4, 5]  # the steps before are gone, with all their objects
    assert {commit_name(4), commit_name(5), "run.json"} == {
        name for name in names if "/" not in name
    }
    job.lose_host()
    with job.open() as ckpt:
        assert ckpt.steps() == [4, 5]
        assert job.train(ckpt, 8) == 5
    assert directories(server.objects(prefix))[-1] == 8
    assert unfinished(server, prefix) == []


def test_a_rewound_run_leaves_nothing_behind(
    tmp_path: Path, server: Server, url: str, prefix: str
) -> None:
    job = Job(tmp_path / "run", url, server.port, keep=3)
    with job.open() as ckpt:
        job.train(ckpt, 3, lambda _: ckpt.flush(DEADLINE_S))
        assert ckpt.rewind(2) == [3]
    assert directories(server.objects(prefix)) == [1, 2]
    with job.open() as ckpt:
        # Step 3 is made once more.
        assert job.train(ckpt, 4, lambda _: ckpt.flush(DEADLINE_S)) == 2
    assert directories(server.objects(prefix)) == [2, 3, 4]


class Copies(Network):
    """Also counts what a store is asked to copy inside itself: the request has no body."""

    copied = 0

    def _relay(self, connection: Any, head: bytes, body: bytes, fault: str | None) -> None:
        self.copied += b"x-amz-copy-source" in head.lower()
        super()._relay(connection, head, body, fault)


@pytest.mark.usefixtures("small_shared_files")
def test_a_child_gets_the_shared_files_of_its_parent_inside_the_store(
    tmp_path: Path, server: Server, prefix: str
) -> None:
    with before(server, Copies) as network:
        options = {"endpoint": f"http://127.0.0.1:{network.port}"}

        def opened(name: str, **more: Any) -> statehold.Checkpointer:
            store = statehold.ObjectStore(f"s3://{BUCKET}/{prefix}/{name}", keep=1, options=options)
            levels = [statehold.Directory(keep=2), store]
            return statehold.Checkpointer(tmp_path / name, levels=levels, **more, **SMALL)

        model = Tuned(width=1024)  # 16 MB that never change
        with opened("base") as ckpt:
            for step in (1, 2, 3):
                model.train_once()
                ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
                ckpt.flush(DEADLINE_S)
        base = server.objects(f"{prefix}/base/{SHARED}")
        assert base
        assert network.copied == 0
        with opened("child", parent=f"{tmp_path / 'base'}@3") as ckpt:
            assert ckpt.restore({"model": model}) == 3
            model.train_once()
            ckpt.save(4, {"model": model}).wait("committed", DEADLINE_S)
        assert server.objects(f"{prefix}/child/{SHARED}") == base
        assert network.copied == len(base)
        expected = model.bits()
        for name in ("base", "child"):
            shutil.rmtree(tmp_path / name)
        with opened("child") as ckpt:
            found = Tuned(width=1024)
            assert ckpt.restore({"model": found}) == 4
        assert same(found.bits(), expected)
