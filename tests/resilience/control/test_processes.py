"""Processes: `statehold coordinate`, ranks that are stopped, and ranks that have children."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.control.peers import LONG_LEASE_S, PATIENCE_S, Peer, meeting
from statehold.cli import main
from statehold.resilience.protocol.messages import Promise

RANK = Path(__file__).parent / "rank.py"


@contextlib.contextmanager
def process(*words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *map(str, words)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def line_of(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    line = running.stdout.readline().strip()
    if not line:
        assert running.stderr is not None
        pytest.fail(running.stderr.read())
    return line


def coordinate(*words: object) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return process("-m", "statehold", "coordinate", "--host", "127.0.0.1", *words)


def port_in(line: str) -> int:
    found = re.search(r"coordinating at 127\.0\.0\.1:(\d+)", line)
    assert found, line
    return int(found[1])


def test_a_stopped_process_is_expelled_and_learns_it_when_it_goes_on() -> None:
    with meeting("a") as (office, peers), process(RANK, "b", office.port, 1.0) as rank:
        peers["a"].until(lambda member: member.joiners_wait)
        os.kill(rank.pid, signal.SIGSTOP)
        with peers["a"].link.changed:
            peers["a"].member.commit(1, end_epoch=True)
        peers["a"].link.send(Promise(2, peers["a"].member.view))
        peers["a"].until_in("a", after=1)  # it did not wait for ever
        os.kill(rank.pid, signal.SIGCONT)
        assert "the lease of its rank 0 has ended" in line_of(rank)


def test_a_forked_child_does_not_keep_the_connection_of_a_dead_rank() -> None:
    """The leases are long: only the end of the connection can tell it."""
    with coordinate("--port", 0, "--replicas", 2) as office:
        port = port_in(line_of(office))
        peer = Peer("a", port)
        with process(RANK, "b", port, LONG_LEASE_S, "fork") as rank:
            child = int(line_of(rank).removeprefix("child "))
            peer.until_in("a", "b")
            os.kill(rank.pid, signal.SIGKILL)
            peer.until_in("a", after=1)
            os.kill(child, 0)  # it lives
            os.kill(child, signal.SIGKILL)
        peer.link.close()


def test_coordinate_says_where_and_what_and_ends_on_sigterm() -> None:
    with coordinate("--port", 0, "--replicas", 1) as office:
        port = port_in(line_of(office))
        peer = Peer("a", port)
        peer.until_in("a")
        peer.link.leave()
        office.send_signal(signal.SIGTERM)
        out, err = office.communicate(timeout=PATIENCE_S)
    assert (office.returncode, err) == (0, "")
    assert "epoch 1 has 1 replica: a" in out


def test_coordinate_may_open_a_file_for_each_rank() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))  # the child inherits it
    try:
        with coordinate("--port", 0) as office:
            assert port_in(line_of(office))
            assert resource.prlimit(office.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_coordinate_says_it_in_json() -> None:
    with coordinate("--port", 0, "--json") as office:
        port_in(json.loads(line_of(office))["event"])
        office.send_signal(signal.SIGINT)
        office.communicate(timeout=PATIENCE_S)
    assert office.returncode == 0


def test_coordinate_goes_on_though_nobody_takes_its_log() -> None:
    """The reader of a pipe ends, or the disk is full: it ended with the next line."""
    with coordinate("--port", 0, "--replicas", 1) as office:
        port = port_in(line_of(office))
        assert office.stdout is not None
        office.stdout.close()
        office.stdout = None
        peer = Peer("a", port)
        peer.until_in("a")
        peer.link.leave()
        office.send_signal(signal.SIGTERM)
        office.wait(PATIENCE_S)
    assert office.returncode == 0


def test_coordinate_refuses_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with coordinate("--port", port) as office:
            _, err = office.communicate(timeout=PATIENCE_S)
    assert office.returncode == 2
    assert "something else listens on the port of the coordinator" in err
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--port", "70000"), "--port must be an integer from 0 to 65535"),
        (("--port", "0", "--replicas", "0"), "--replicas must be at least 1"),
        (("--port", "0", "--settle", "-1"), "--settle must be at least 0 seconds"),
        (("--port", "0", "--settle", "nan"), "--settle must be at least 0 seconds"),
    ],
    ids=["port", "replicas", "settle", "nan"],
)
def test_coordinate_refuses_bad_values(
    words: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coordinate", *words]) == 2
    assert what in capsys.readouterr().err
