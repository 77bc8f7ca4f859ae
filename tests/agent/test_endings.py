"""What ends an agent, or is left of one, in a container and under SLURM."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import statehold
from statehold.checkpoint.agent import starting
from statehold.checkpoint.agent.looking import ends_with_slurm
from support.faults import DEADLINE_S, SMALL

CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork",
             "--kill-child"]  # fmt: skip
FIRST = """
import os, sys, time
from pathlib import Path
import torch, statehold

def children():
    stats = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = each.read_text().rsplit(")", 1)
        except OSError:
            continue
        if rest.split()[1] == "1":
            stats.append(name)
    return stats

for number in range(3):
    levels = [statehold.Memory(path=f"{sys.argv[2]}/{number}"), statehold.Directory()]
    run = f"{sys.argv[1]}/{number}"
    with statehold.Checkpointer(run, levels=levels, staging_bytes="32MiB") as ckpt:
        ckpt.save(1, {"w": torch.zeros(10)}).wait("committed", 60)
until = time.monotonic() + 60
while children() and time.monotonic() < until:
    time.sleep(0.05)
print(os.getpid(), children())
"""


def why_no_container() -> str | None:
    try:
        done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or "unshare failed" if done.returncode else None


@pytest.mark.thorough
@pytest.mark.skipif(why_no_container() is not None, reason=str(why_no_container()))
def test_the_first_process_of_a_container_waits_for_its_agents(tmp_path: Path) -> None:
    """Nobody else does: they would be there as zombies."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        words = [*CONTAINER, sys.executable, "-c", FIRST, str(tmp_path), memory]
        done = subprocess.run(words, capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.stdout == "1 []\n", done.stderr


WAITS = 'while pgrep -f "[s]tatehold-agent $RUN" > /dev/null; do sleep 1; done'
SCRIPTS = {"waits.sh": f"python train.py &\nwait $!\n{WAITS}\n", "plain.sh": "python train.py\n"}


def processes(proc: Path, *commands: str) -> Path:
    """This process, called by the last command, and those that have started it."""
    (proc / "scripts").mkdir(parents=True)
    for name, text in SCRIPTS.items():
        (proc / "scripts" / name).write_text(text)
    for number, command in enumerate(commands, 1):
        name, *words = command.split("|")
        entry = proc / ("self" if number == len(commands) else str(number))
        entry.mkdir()
        (entry / "stat").write_text(f"{number} ({name}) S {number - 1} 1 1 0")
        (entry / "cmdline").write_text("".join(f"{word}\0" for word in (name, *words)))
        (entry / "cwd").symlink_to(proc / "scripts")
    return proc


@pytest.mark.parametrize(
    ("commands", "ends"),
    [
        (("systemd", "slurmstepd", "python"), True),
        (("systemd", "slurmstepd", "pt) main", "python"), True),
        (("systemd", "slurmstepd", "bash|-c|python train.py; date", "python"), True),
        (("systemd", "slurmstepd", "bash|plain.sh|waits", "torchrun", "python"), True),
        (("systemd", "slurmstepd", "sh|gone.sh", "python"), True),
        (("systemd", "slurmstepd", f"bash|-c|{WAITS}", "python"), False),
        (("systemd", "slurmstepd", "dash|waits.sh", "torchrun", "python"), False),
        (("systemd", "slurmstepd", "bash|-e|waits.sh", "sh|plain.sh", "python"), False),
        (("systemd", "slurmstepd", "bash|-i", "python"), False),
        (("systemd", "sshd", "tmux: server", "python"), False),
        (("python",), False),
    ],
)
def test_an_agent_ends_with_a_step_that_no_shell_keeps(
    tmp_path: Path, commands: tuple[str, ...], ends: bool
) -> None:
    assert ends_with_slurm(processes(tmp_path, *commands)) is ends


def test_the_log_says_that_an_agent_ends_with_slurm(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "ends_with_slurm", lambda: True)
    caplog.set_level(logging.INFO, "statehold")
    levels = [statehold.Memory(path=memory), statehold.Directory()]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        ckpt.save(1, {"step": 1}).wait("committed", DEADLINE_S)
    assert "the agent of this run ends with the SLURM step" in caplog.text
