"""What a real server refuses: the error says whose fault it is, and the run loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import statehold
from infra.s3.jobs import Job
from infra.s3.servers import (
    BUCKET,
    SEAWEED,
    SeaweedFs,
    Server,
    become,
    why_no_rclone,
)
from statehold.errors import StorageError
from support.faults import DEADLINE_S, SMALL

TESTS = Path(__file__).parents[2]
TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from infra.s3.test_refusals import refused
print(refused(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
"""
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


def refused(folder: Path, url: str, port: int) -> StorageError:
    """Why a step does not get to a store; the run has it, and goes on from it."""
    store = statehold.ObjectStore(url, options={"endpoint": f"http://127.0.0.1:{port}"})
    levels = [statehold.Directory(), store]
    state = {"w": torch.arange(1000)}
    with statehold.Checkpointer(folder / "run", levels=levels, **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        ckpt.flush(DEADLINE_S)
        near, far = ckpt.levels()
    assert (near.newest, near.error) == (1, None)
    assert far.newest is None
    with statehold.Checkpointer(folder / "run", levels=levels, **SMALL) as ckpt:
        assert ckpt.restore({"w": torch.zeros(1000, dtype=torch.int64)}) == 1
    assert isinstance(far.error, StorageError)
    assert url in str(far.error)
    return far.error


def test_a_wrong_secret(
    tmp_path: Path, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, server.key, "another-secret")
    error = refused(tmp_path, f"s3://{BUCKET}/{prefix}", server.port)
    assert "403 SignatureDoesNotMatch" in str(error)
    assert "credentials come from the environment" in str(error)
    assert "another-secret" not in str(error)


def test_a_key_that_nobody_has(
    tmp_path: Path, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, "nobody:nobody", server.secret)
    error = refused(tmp_path, f"s3://{BUCKET}/{prefix}", server.port)
    assert "answer  403" in str(error)
    assert "credentials come from the environment" in str(error)


@pytest.mark.parametrize("server", [SeaweedFs], indirect=True)
@SEAWEED
def test_a_key_that_may_only_read(
    tmp_path: Path, server: SeaweedFs, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, *server.reader)
    error = refused(tmp_path, f"s3://{BUCKET}/{prefix}", server.port)
    assert "answer  403 AccessDenied" in str(error)
    assert "credentials come from the environment" in str(error)


def test_a_bucket_that_is_not_there(tmp_path: Path, server: Server, prefix: str) -> None:
    error = refused(tmp_path, f"s3://no-such-bucket/{prefix}", server.port)
    assert "404 NoSuchBucket" in str(error)


@pytest.mark.skipif(not FAKETIME.exists(), reason="not installed: libfaketime")
def test_a_clock_that_is_wrong(tmp_path: Path, server: Server, prefix: str) -> None:
    """Only the trainer's, by an hour."""
    words = [str(TESTS), str(tmp_path), f"s3://{BUCKET}/{prefix}", str(server.port)]
    false = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+1h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, *words],
        capture_output=True, text=True, check=True, env={**os.environ, **false},
    )  # fmt: skip
    assert "answer  403 RequestTimeTooSkewed" in done.stdout
    assert "the clock of this machine and that of the store differ" in done.stdout


@pytest.mark.skipif(why_no_rclone() is not None, reason=str(why_no_rclone()))
def test_a_store_that_gives_whole_objects_for_ranges_gets_no_step(
    tmp_path: Path, rclone: Server
) -> None:
    url = f"s3://{BUCKET}/run"
    error = refused(tmp_path, url, rclone.port)
    assert "the store does not give back parts of objects" in str(error)
    assert not [name for name in rclone.objects("run") if name.endswith(".commit")]
    # What another client, or an earlier version, has put there is not restored from.
    shutil.rmtree(tmp_path / "run")
    job = Job(tmp_path / "run", url, rclone.port)
    with job.open() as ckpt:
        assert job.train(ckpt, 2) == 0
