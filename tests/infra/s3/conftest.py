"""Servers for a whole session and for one test, and the environment of their clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="not installed: obstore")
pytest.importorskip("boto3", reason="not installed: boto3")

from infra.s3.network import Network, before
from infra.s3.servers import SEAWEED, SWIFT, Rclone, SeaweedFs, Server, Swift, become, running

KINDS = [
    pytest.param(SeaweedFs, marks=SEAWEED, id="seaweedfs"),
    pytest.param(Swift, marks=SWIFT, id="swift"),
]
_numbers = itertools.count()


@pytest.fixture(scope="session", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that all tests use, and none disturbs."""
    with running(request.param(tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that the test may kill."""
    (tmp_path / "server").mkdir()
    with running(request.param(tmp_path / "server")) as server:
        yield server


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    with running(Rclone(tmp_path / "server")) as server:
        yield server


@pytest.fixture(autouse=True)
def _client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("server", "own_server", "rclone"):
        if name in request.fixturenames:
            server = request.getfixturevalue(name)
            become(monkeypatch, server.key, server.secret)


@pytest.fixture
def prefix() -> str:
    """Names in the bucket that no other test uses."""
    return f"run-{next(_numbers)}/deep"


@pytest.fixture
def network(server: Server) -> Iterator[Network]:
    with before(server) as network:
        yield network
