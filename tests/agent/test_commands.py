"""Commands beside an agent: they do not end it, and it comes back after theirs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import statehold
from agent.test_lock import AGENT, process, told
from statehold.checkpoint.agent.orders import Orders
from statehold.checkpoint.agent.process import Persisting
from statehold.cli import main
from statehold.errors import RunBusyError
from statehold.observe.background_log import BackgroundLog
from statehold.steps import target
from statehold.steps.lock import RunLock
from support.agents import steps_in
from support.faults import DEADLINE_S, SMALL, must

COMMANDS = {
    "prune": ["prune", "RUN", "--keep", "1", "--yes"],
    "copy": ["copy", "OTHER@7", "RUN"],
    "import": ["import", "OTHER/w.safetensors", "RUN@8"],
}


def saved(folder: Path, *steps: int) -> None:
    with statehold.Checkpointer(folder, **SMALL) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": step}).wait("committed", DEADLINE_S)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_beside_an_agent(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    saved(run, 1, 2)
    saved(other, 7)
    save_file({"w": torch.ones(3)}, other / "w.safetensors")
    words = [
        word.replace("RUN", str(run)).replace("OTHER", str(other)) for word in COMMANDS[command]
    ]
    with process(AGENT, run) as agent:
        first = told(agent)
        assert first == "held"
        assert main(words) == 4
        error = capsys.readouterr().err
        assert "agent" in error
        assert str(agent.pid) in error
        assert steps_in(run) == [1, 2]
        with pytest.raises(RunBusyError):
            RunLock(str(run), passes=True)
        assert agent.poll() is None


def test_an_agent_knows_a_command_from_a_trainer(tmp_path: Path) -> None:
    for passes in (True, False):
        lock = RunLock(str(tmp_path), passes=passes)
        with pytest.raises(RunBusyError) as refused:
            RunLock(str(tmp_path), yields=True)
        assert refused.value.passes is passes
        lock.release()
    RunLock(str(tmp_path), yields=True).release()


@pytest.mark.parametrize("where", ["run", "memory"])
def test_an_agent_tries_again_after_a_command(
    tmp_path: Path, memory: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as prune of the run, or of its directory in memory."""
    run = tmp_path / "run"
    near = statehold.Memory(path=memory, agent=False)
    with statehold.Checkpointer(run, levels=[near], **SMALL) as ckpt:
        ckpt.save(3, {"w": 3}).wait("committed", DEADLINE_S)
    met = threading.Semaphore(0)

    def lock(*args: Any, **options: Any) -> RunLock:
        try:
            return RunLock(*args, **options)
        except RunBusyError:
            met.release()
            raise

    monkeypatch.setattr(target, "RunLock", lock)
    orders = Orders(
        trainer=0, pidfd=0, path=[], run=str(run), levels=[near, statehold.Directory()],
        backend="threads", queue_depth=1, buffer_bytes=1 << 20, retry_s=0.01,
    )  # fmt: skip
    agent = threading.Thread(target=Persisting(orders, BackgroundLog()).run)
    command = RunLock(str({"run": run, "memory": memory}[where]), passes=True)
    agent.start()
    for _ in range(2):
        must(met.acquire(timeout=DEADLINE_S), "the agent did not try")
    assert steps_in(run) == []
    command.release()
    agent.join(DEADLINE_S)
    assert steps_in(run) == [3]
