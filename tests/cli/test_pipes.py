"""stdout that closes early, or is full: how a command ends, as other tools of Unix do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from statehold.cli import codes

AS_SIGPIPE = 128 + 13


def ended(words: list[str], stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    # As users have it: stdout of Python is buffered, so an error may come as late as its end.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "statehold", *words],
        stdout=stdout, stderr=stderr, text=True, check=False, env=env,
    )  # fmt: skip
    return done.returncode, done.stderr


def closed_pipe() -> int:
    """The end for writing of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["verify", "--help", "ls --json"])
def test_a_reader_that_has_gone(run: Path, command: str) -> None:
    writer = closed_pipe()
    words = [*command.split(), str(run)]
    try:
        code, said = ended(words, writer)
    finally:
        os.close(writer)
    assert (code, said) == (AS_SIGPIPE, "")
    assert code == codes.CLOSED_PIPE


def test_a_reader_that_goes_in_the_middle(run: Path) -> None:
    """More than a pipe holds; `head -1` reads a line of it."""
    for number in range(3000):
        (run / f"step-{number:012d}.corrupt").mkdir()
    command = f"{sys.executable} -m statehold ls {run} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("STEP")
    assert (done.returncode, done.stderr) == (AS_SIGPIPE, "")


def test_errors_that_nobody_reads(tmp_path: Path) -> None:
    writer = closed_pipe()
    try:
        code, _ = ended(["ls", str(tmp_path / "nowhere")], subprocess.DEVNULL, writer)
    finally:
        os.close(writer)
    assert code == codes.NOT_FOUND


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_the_shell_closed(run: Path, closed: str) -> None:
    """Python has no stream there at all."""
    command = f"{sys.executable} -m statehold verify {run} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("intact" in done.stdout) is (closed == "2>&-")


def test_an_error_without_a_stream(run: Path) -> None:
    command = f"{sys.executable} -m statehold ls {run / 'none'} 2>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (codes.NOT_FOUND, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_has_no_room(run: Path) -> None:
    with open("/dev/full", "w") as full:
        code, said = ended(["ls", str(run)], full.fileno())
    assert code == codes.FAILED
    assert "No space left" in said
    assert "Traceback" not in said
