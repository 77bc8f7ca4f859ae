"""A network that interferes before a real server: no save waits for it, no step is half there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.s3.jobs import Job, settled
from infra.s3.network import Network
from infra.s3.servers import BUCKET, DEADLINE_S, SEAWEED, SeaweedFs, Server
from support.agents import wait_for


def some(fault: str) -> Callable[[str, str], str | None]:
    """Every other request."""
    numbers = itertools.count()
    return lambda method, target: fault if next(numbers) % 2 else None


def all_of(fault: str) -> Callable[[str, str], str | None]:
    return lambda method, target: fault


@pytest.mark.parametrize("fault", ["busy", "reset", "slow", "truncate", "lose"])
def test_a_network_that_lets_some_through(
    tmp_path: Path, server: Server, network: Network, prefix: str, fault: str
) -> None:
    """Nobody notices, neither in an upload nor in a restore."""
    job = Job(tmp_path / "run", f"s3://{BUCKET}/{prefix}", network.port)
    network.fault = some(fault)
    with job.open() as ckpt:
        job.train(ckpt, 3, lambda _: ckpt.flush(DEADLINE_S))
        assert settled(ckpt, 3)
    uploading = network.fired[fault]
    assert uploading > 5
    job.lose_host()
    with job.open() as ckpt:
        assert job.train(ckpt, 5) == 3
        ckpt.flush(DEADLINE_S)
        assert settled(ckpt, 5)
    assert network.fired[fault] > uploading + 5
    network.heal()
    if fault != "lose":  # nobody knows of an upload whose first answer was lost
        assert server.uploads() == []


@pytest.mark.parametrize("server", [SeaweedFs], indirect=True)
@SEAWEED
@pytest.mark.parametrize("fault", ["busy", "reset", "hole"])
def test_a_network_that_lets_nothing_through_for_a_while(
    tmp_path: Path, server: Server, network: Network, prefix: str, fault: str
) -> None:
    """The job trains and saves meanwhile; the newest step is there as soon as the network heals."""
    job = Job(tmp_path / "run", f"s3://{BUCKET}/{prefix}", network.port)

    def after(step: int) -> None:
        if step == 2:
            ckpt.flush(DEADLINE_S)
            network.fault = all_of(fault)
        if step == 6:  # four steps were committed meanwhile
            wait_for(lambda: network.fired[fault], fault, DEADLINE_S)
            assert ckpt.levels()[1].newest == 2
            network.heal()

    with job.open() as ckpt:
        job.train(ckpt, 6, after)
        ckpt.flush(DEADLINE_S)
        assert settled(ckpt, 6)
    job.lose_host()
    with job.open() as ckpt:
        assert job.train(ckpt, 8) == 6


@pytest.mark.parametrize("server", [SeaweedFs], indirect=True)
@SEAWEED
@pytest.mark.parametrize("fault", ["busy", "hole"])
def test_a_job_ends_beside_a_store_that_never_answers(
    tmp_path: Path,
    server: Server,
    network: Network,
    prefix: str,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """close() gives the store up, and says so. The next job brings the store up to date."""
    job = Job(tmp_path / "run", f"s3://{BUCKET}/{prefix}", network.port)
    with job.open() as ckpt:
        job.train(ckpt, 2)
    network.fault = all_of(fault)
    with job.open() as ckpt:
        assert job.train(ckpt, 4) == 2  # the steps of the store are not needed
        wait_for(lambda: network.fired[fault], fault, DEADLINE_S)
        caplog.clear()
    assert "step 4 did not reach level objects; it stays at level directory" in caplog.text
    assert f"s3://{BUCKET}/{prefix}" in caplog.text
    network.heal()
    with job.open() as ckpt:
        assert job.train(ckpt, 5) == 4
        ckpt.flush(DEADLINE_S)
        assert settled(ckpt, 5)
