"""What the log says of leaving: who asked, and what is safe at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from statehold.ranks.preemption import LEFT
from support import scripts
from support.faults import DEADLINE_S

SCRIPT = """
import logging, os, signal, sys, torch, statehold
from statehold import Directory
logging.basicConfig(format="%(message)s", level=logging.WARNING)
levels = [Directory(), Directory(path=sys.argv[1] + "-far", name="far")]
with statehold.Checkpointer(sys.argv[1], levels=levels, staging_bytes="64MiB") as ckpt:
    ckpt.leave_on(within_s=60)
    for step in range(1, 1000):
        if step == 7:
            exec(sys.argv[2])
            while not ckpt.is_leaving:
                pass
        ckpt.save(step, {"w": torch.ones(3)})
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ask", "who"),
    [("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"), ("ckpt.leave()", "leave()")],
)
def test_one_line_when_asked_and_one_at_the_end(tmp_path: Path, ask: str, who: str) -> None:
    done = scripts.run(["-c", SCRIPT, tmp_path / "run", ask], timeout=DEADLINE_S * 4)
    assert done.returncode == LEFT
    lines = done.stderr.splitlines()
    # A busy machine has lost a little of the 58 seconds when it writes the line.
    asked = f"asked to leave by {who}: the next save is the last; this process ends in 5"
    assert len([line for line in lines if line.startswith(asked) and line.endswith(" s")]) == 1
    told = "step 7 is committed at levels directory, far; leaving with exit code 75"
    assert lines.count(told) == 1
