"""Ranks as processes: one is killed, and the others say which, in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.peer_ranks import Process, be_rank, serve_store

SIZE = 3
TIMEOUT_S = 3.0
STALL_S = 60.0  # how long a busy machine may stand still


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(body: Callable[..., None], *arguments: object) -> Process:
        started.append(Process(body, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture(params=["tcp", "directory"])
def job(
    request: pytest.FixtureRequest, tmp_path: Path, start: Callable[..., Process]
) -> tuple[list[Process], Process | None]:
    """Open ranks, and the process that serves their store, if there is one."""
    kind, where, server = request.param, str(tmp_path), None
    if kind == "tcp":
        server = start(serve_store)
        where = str(server.read())
    ranks = [start(be_rank, kind, where, rank, SIZE, TIMEOUT_S) for rank in range(SIZE)]
    assert len({rank.read() for rank in ranks}) == 1  # the token
    return ranks, server


def take_part(ranks: list[Process], seq: int) -> list[Any]:
    for rank in ranks:
        rank.tell(seq)
    return [rank.read() for rank in ranks]


@pytest.mark.thorough
def test_a_killed_rank_is_named_by_the_others_in_time(job) -> None:
    ranks, _ = job
    got = [said["outcome"] for said in take_part(ranks, 0)]
    assert got == ["0+1+2"] * SIZE
    ranks[1].kill()
    begin = time.monotonic()
    for said in take_part([ranks[0], ranks[2]], 1):
        assert said["error"] == "PeerLostError"
        assert said["ranks"] == (1,)
    assert TIMEOUT_S * 0.9 <= time.monotonic() - begin < 2 * TIMEOUT_S + STALL_S


@pytest.mark.thorough
def test_a_killed_committer_is_named_by_the_others_in_time(job) -> None:
    ranks, _ = job
    take_part(ranks, 0)
    ranks[0].kill()
    for said in take_part(ranks[1:], 1):
        assert said["error"] == "PeerLostError"
        assert said["ranks"] == (0,)


@pytest.mark.thorough
def test_ranks_do_not_hang_when_the_stores_server_dies(job) -> None:
    ranks, server = job
    if server is None:
        return  # a directory has no server
    take_part(ranks, 0)
    ranks[1].tell(1)
    server.kill()
    begin = time.monotonic()
    said = [ranks[1].read(), *take_part([ranks[0], ranks[2]], 1), *take_part(ranks, 2)]
    for each in said:
        assert each["error"] == "PeerLostError"
        assert each["ranks"] == (0,)
        assert "store" in each["text"]
    assert time.monotonic() - begin < 2 * TIMEOUT_S + STALL_S
