"""torchrun gets SIGTERM and passes it on: its workers save the same last step, and end in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import statehold
from statehold.ranks.preemption import LEFT

KILLED_AFTER_S = 30.0  # by torchrun


@pytest.mark.thorough
def test_sigterm_to_torchrun_is_one_last_save(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2", str(Path(__file__).with_name("trainer.py")), str(tmp_path / "run"),
    ]  # fmt: skip
    with (tmp_path / "stderr").open("w") as log:
        agent = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert agent.stdout is not None
    begun: set[int] = set()
    while len(begun) < 2:
        line = agent.stdout.readline()
        assert line, (tmp_path / "stderr").read_text()
        begun.add(json.loads(line)["rank"])
    begin = time.monotonic()
    agent.send_signal(signal.SIGTERM)
    events = [json.loads(line) for line in agent.stdout.read().splitlines()]
    code = agent.wait(60)
    agent.stdout.close()
    took = time.monotonic() - begin
    left = {event["rank"]: event for event in events if "left" in event}
    assert {event["left"] for event in left.values()} == {LEFT}, (tmp_path / "stderr").read_text()
    [last] = {event["last"] for event in left.values()}
    assert took < KILLED_AFTER_S
    assert code == 1  # torchrun's own, whatever its workers say
    weights = torch.zeros(100_000)
    with statehold.Checkpointer(tmp_path / "run", coordination="none") as ckpt:
        restored = ckpt.restore({"weights": weights})
    assert restored == last
    assert bool((weights == last).all())
