"""The scripts of docs/cluster.md, run as they stand there, with stubs for SLURM and the trainer.

On a real SLURM: tests/infra/slurm.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[2] / "docs/cluster.md"
BLOCKS = re.findall(r"```bash\n(.*?)```", CLUSTER.read_text(), re.DOTALL)
BATCH = [each for each in BLOCKS if "srun" in each and "-eq 75 ]" in each]
TASK = [each for each in BLOCKS if "tatehold-agent" in each]
DEADLINE_S = 60
RESEND_S = 5


def stub(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub(tmp_path, "scontrol", "echo $1 > requeued")
    stub(tmp_path, "pgrep", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("RUN", "run")
    return tmp_path


@contextlib.contextmanager
def running(script: str, there: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a script. What is left of it at the end is killed."""
    shell = subprocess.Popen(["bash", "-c", script], cwd=there, start_new_session=True)
    try:
        yield shell
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_job_ends_as_its_trainer_and_is_requeued_after_75(
    there: Path, script: str, code: int
) -> None:
    stub(there, "srun", f"exit {code}")
    ended = subprocess.run(["bash", "-c", script], cwd=there, timeout=DEADLINE_S)
    assert ended.returncode == code
    assert (there / "requeued").exists() == (code == 75)


warned_shells = pytest.mark.parametrize(
    ("script", "name", "number"),
    [
        *((each, "python", signal.SIGUSR1) for each in TASK),
        *((each, "python", signal.SIGTERM) for each in TASK),
        *((each, "srun", signal.SIGUSR1) for each in BATCH if "trap" in each),
    ],
)


def warned_trainer(folder: Path, name: str, number: signal.Signals) -> None:
    """Tells when it is up and of each warning. Ends, after two, when it may.

    A bash would lose a signal that comes just before it blocks in a read.
    """
    for each in ("up", "warned", "ended"):
        os.mkfifo(folder / each)
    (folder / name).write_text(
        f"#!{sys.executable}\n"
        "import pathlib, signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{number:d}])\n"
        "pathlib.Path('up').write_text('up\\n')\n"
        "for _ in range(2):\n"
        f"    signal.sigwait([{number:d}])\n"
        "    pathlib.Path('warned').write_text('warned\\n')\n"
        "pathlib.Path('ended').read_text()\n"
        "sys.exit(75)\n"
    )
    (folder / name).chmod(0o755)


def warn(shell: subprocess.Popen[bytes], number: signal.Signals, warned: Path) -> str:
    """Warn a shell until its trainer has heard: a bash loses a signal that comes just before it
    blocks in a wait. Returns what the trainer says."""
    until = time.monotonic() + DEADLINE_S
    with open(os.open(warned, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as heard:
        poller = select.poll()
        poller.register(heard, select.POLLIN)
        while time.monotonic() < until:
            shell.send_signal(number)
            if poller.poll(1000 * RESEND_S):
                os.set_blocking(heard.fileno(), True)
                return heard.read()
    return ""


@warned_shells
def test_a_shell_that_is_warned_waits_for_the_trainer(
    there: Path, script: str, name: str, number: signal.Signals
) -> None:
    """Also one that is warned twice."""
    warned_trainer(there, name, number)
    with running(script, there) as shell:
        assert (there / "up").read_text() == "up\n"
        for _ in range(2):
            heard = warn(shell, number, there / "warned")
            assert heard == "warned\n"
        assert shell.poll() is None
        (there / "ended").write_text("\n")
        code = shell.wait(DEADLINE_S)
        assert code == 75


@warned_shells
def test_a_warning_that_comes_as_the_trainer_starts_is_passed_on(
    there: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str, number: signal.Signals
) -> None:
    """The shell warns itself before the first command after it has started the trainer."""
    warned_trainer(there, name, number)
    warns = f'[ -n "$!" ] && [ -z "$up" ] && read -r up < up && kill -{number} $$'
    (there / "warns").write_text(f"trap '{warns}' DEBUG\n")
    monkeypatch.setenv("BASH_ENV", str(there / "warns"))
    with running(script, there) as shell:
        assert (there / "warned").read_text() == "warned\n"
        heard = warn(shell, number, there / "warned")
        assert heard == "warned\n"
        (there / "ended").write_text("\n")
        code = shell.wait(DEADLINE_S)
        assert code == 75


def test_the_scripts_are_there() -> None:
    assert len(BATCH) == 2
    assert len(TASK) == 1
