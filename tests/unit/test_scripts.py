"""A script that is forked from the server of the tests is like one that Python has started."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from support import scripts
from support.faults import must


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(5)", 5),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_ways_to_end(code: str, status: int) -> None:
    assert scripts.run(["-c", code]).returncode == status


def test_an_error_is_on_stderr() -> None:
    assert scripts.run(["-c", "1 / 0"]).stderr.endswith("ZeroDivisionError: division by zero\n")


def test_what_is_left_for_the_end_is_done(tmp_path: Path) -> None:
    """A thread, what atexit has, and an object that a variable of the script holds, in order."""
    path = tmp_path / "script.py"
    path.write_text(
        "import atexit, threading\n"
        "class Held:\n    def __del__(self, say=print): say('dropped')\n"
        "held, over = Held(), threading.Event()\n"
        "atexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (over.wait(), print('thread'))).start()\n"
        "print(__name__, __file__ == __import__('sys').argv[0]); over.set()\n"
    )
    assert scripts.run([path]).stdout == "__main__ True\nthread\natexit\ndropped\n"


def test_its_surroundings_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    code = "import os, sys, beside; print(beside.name, os.getcwd(), sys.argv[1:], dict(os.environ))"
    said = scripts.run(["-c", code, "word"], cwd=tmp_path, env={"A": "1"}).stdout
    assert said == f"beside {tmp_path} ['word'] {{'A': '1'}}\n"


def test_it_can_be_talked_to_and_killed() -> None:
    code = "print(input(), flush=True); input()"
    with scripts.start(["-c", code], stdin=scripts.PIPE, stdout=scripts.PIPE) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        script.stdin.write("word\n")
        script.stdin.flush()
        must(script.stdout.readline() == "word\n")
        assert script.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            script.wait(0.01)
        script.kill()
    assert script.returncode == -signal.SIGKILL


def test_it_ends_with_a_test_that_fails_beside_it() -> None:
    code = "import signal; signal.pause()"
    with pytest.raises(KeyError), scripts.start(["-c", code]) as script:
        raise KeyError
    assert script.wait() == -signal.SIGKILL
