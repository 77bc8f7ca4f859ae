"""Tests that hang on purpose, in a run of their own: it ends, and says which ones and where."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults import DEADLINE_S, must

CONFTEST = """
pytest_plugins = ["support.limits"]

def pytest_configure():
    from support import limits
    limits.GRACE_S, limits.POLL_S = 3.0, 0.01
"""
HANGS = """
import os, pathlib, signal, subprocess, threading, time
import pytest

def hangs():
    time.sleep(10_000)

def fork():
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            pathlib.Path("fork").write_text(str(os.getpid()))
            hangs()
        os._exit(0)
    os.wait()

def test_waits():
    threading.Thread(target=hangs, name="a waiting thread", daemon=True).start()
    subprocess.Popen(["sleep", "10000"]).wait()

@pytest.fixture
def clings():
    yield
    hangs()

def test_clings(clings):
    pass

def test_is_not_interrupted():
    fork()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    hangs()

@pytest.mark.parametrize("number", range(3))
def test_is_fine(number):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With a fork of a worker that outlives it, as long as it is used."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_all.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntime_limit = 0.5\n")
    yield tmp_path
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


@pytest.mark.thorough
def test_what_hangs_fails_and_says_where(folder: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    words = [sys.executable, "-m", "pytest", "-p", "xdist", "-n1", "-v"]
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(words, cwd=folder, env=environment, stdout=said, stderr=said)
        try:
            code = run.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            run.kill()
            code = run.wait()
    told = (folder / "said").read_text()
    must((folder / "fork").exists(), told)
    assert code == 1, told
    for each in (
        "2 failed, 4 passed, 1 error in",
        "Failed: test_all.py::test_waits has not ended after 0.5 s.",
        "Thread a waiting thread:",
        ": S sleep 10000",
        "Failed: the teardown of test_all.py::test_clings has not ended after 0.5 s.",
        "test_all.py::test_is_not_interrupted hangs: its worker ends.",
        "crashed while running 'test_all.py::test_is_not_interrupted'",
        "in test_is_not_interrupted",
    ):
        assert each in told, f"{each!r} is not in\n{told}"
