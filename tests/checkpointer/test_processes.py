"""Ends of scripts, forks, and threads: saves are finished, and nobody hangs."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import torch

import statehold
from soak.usage import Usage, settled
from support import scripts
from support.faults import DEADLINE_S, SMALL
from support.training import Training, bits

SCRIPT = """
import sys, torch, statehold
ckpt = statehold.Checkpointer(sys.argv[1], staging_bytes="2MiB",
    io=statehold.Io(buffer_bytes="1MiB"))
state = {"model": torch.nn.Linear(1024, 1024)}
for step in (1, 2):
    ckpt.save(step, state)
#END
"""


def run_script(run: Path, end: str) -> subprocess.CompletedProcess[str]:
    return scripts.run(["-c", SCRIPT.replace("#END", end), run])


def committed(run: Path) -> list[int]:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        return ckpt.steps()


def test_a_script_that_ends_without_close_still_commits(run) -> None:
    result = run_script(run, "")
    assert result.returncode == 0, result.stderr
    assert committed(run) == [1, 2]


def test_an_exception_that_ends_the_script_does_not_lose_saves(run) -> None:
    result = run_script(run, "raise SystemExit(5)")
    assert result.returncode == 5, result.stderr
    assert committed(run) == [1, 2]


def test_a_forked_child_changes_nothing_for_its_parent(run) -> None:
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, training.state).wait("committed", DEADLINE_S)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        training.step()
        ckpt.save(2, training.state).wait("committed", DEADLINE_S)
        live = Training(seed=2)
        got = ckpt.restore(live.state)
        assert got == 2
        assert bits(live) == bits(training)


def test_data_loading_workers_that_fork_do_not_disturb(run) -> None:
    loader = torch.utils.data.DataLoader(
        torch.arange(64), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        total = torch.zeros(())
        for step, batch in enumerate(loader, 1):
            total += batch.sum()
            ckpt.save(step, {"total": total})
        live = torch.zeros(())
        ckpt.save(99, {"total": total}).wait("committed", DEADLINE_S)
        ckpt.restore({"total": live})
    assert live.item() == sum(range(64))


def test_threads_and_memory_are_given_back(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
    before, python_threads = Usage.now(), threading.active_count()
    for step in range(2, 12):
        with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
            ckpt.save(step, {"x": torch.zeros(1000)}).wait("committed", DEADLINE_S)
            ckpt.restore({"x": torch.zeros(1000)})
    growth = settled(before).growth_since(before)
    assert not growth
    assert threading.active_count() == python_threads
