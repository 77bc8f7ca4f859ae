"""Stores of every kind: in memory, in a directory, on an S3 server that runs for the session."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: no object stores")

from statehold.steps.objects import ObjectSteps
from statehold.units import MiB
from support import s3

KINDS = ["memory", "file", "s3"]
PART_BYTES = 5 * MiB  # the least that S3 takes
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    if not s3.is_installed():
        pytest.skip("moto is not installed: no S3 server to test against")
    with s3.s3_server() as port:
        s3.request(port, "PUT", "/bucket")
        yield port


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-tests")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


@pytest.fixture
def s3_url() -> str:
    """A prefix that nothing has used yet."""
    return f"s3://bucket/run-{next(_numbers)}/deep"


@pytest.fixture(params=KINDS)
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectSteps:
    options = {}
    url = {"memory": "memory://", "file": f"file://{tmp_path}/objects"}.get(request.param, "")
    if request.param == "s3":
        request.getfixturevalue("s3_environment")
        url = request.getfixturevalue("s3_url")
        options = {"endpoint": f"http://127.0.0.1:{request.getfixturevalue('s3_port')}"}
    return ObjectSteps(url, options=options, part_bytes=PART_BYTES)


@pytest.fixture
def proxy(s3_port: int, s3_environment: None) -> Iterator[s3.Proxy]:
    made = s3.Proxy(s3_port)
    yield made
    made.close()
