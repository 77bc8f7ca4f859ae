"""A warning to all processes of a trainer, as torchrun and SLURM give it: its workers live on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import statehold
from statehold.ranks.preemption import LEFT
from support import scripts
from support.faults import DEADLINE_S

SCRIPT = """
import os, signal, sys, torch, statehold
from torch.utils.data import DataLoader

def ignore_warnings(worker_id):  # as the guide says
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

os.setsid()
asking = getattr(signal, sys.argv[2])
loader = DataLoader(range(500), num_workers=1, worker_init_fn=eval(sys.argv[3]),
                    multiprocessing_context="fork")
with statehold.Checkpointer(sys.argv[1], staging_bytes="64MiB") as ckpt:
    ckpt.leave_on(within_s=60)
    for step, batch in enumerate(loader):
        if step == 0:
            os.kill(0, asking)
            while not ckpt.is_leaving:
                pass
    ckpt.save(500, {"w": torch.ones(3)})
"""


@pytest.mark.parametrize(("asking", "init"), [("SIGUSR1", "None"), ("SIGTERM", "ignore_warnings")])
def test_the_last_save_is_made(tmp_path: Path, asking: str, init: str) -> None:
    done = scripts.run(["-c", SCRIPT, tmp_path / "run", asking, init], timeout=DEADLINE_S * 4)
    assert done.returncode == LEFT, done.stderr
    assert (tmp_path / "run/step-000000000500").is_dir()


def test_a_fork_ends_by_sigterm_alone(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.leave_on(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, within_s=60)
        for number, code in [(signal.SIGUSR1, 7), (signal.SIGINT, 7), (signal.SIGTERM, -15)]:
            pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), number)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        assert not ckpt.is_leaving
