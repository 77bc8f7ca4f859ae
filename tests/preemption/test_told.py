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


FAILED_BEFORE = """
import logging, sys, torch, statehold
logging.basicConfig(format="%(message)s", level=logging.WARNING)
with statehold.Checkpointer(sys.argv[1], staging_bytes="64MiB") as ckpt:
    ckpt.leave_on(within_s=60)
    ckpt.save(1, {"w": torch.ones(3)}).wait("committed")
    open(f"{sys.argv[1]}/step-000000000002.partial", "w").close()  # where its directory belongs
    failing = ckpt.save(2, {"w": statehold.Gated(torch.ones(3))})  # no call waits for its bytes
    while failing.error is None:
        pass
    ckpt.leave()
    ckpt.save(3, {"w": torch.ones(3)})
"""


def test_a_save_that_has_failed_is_told_of_and_the_last_one_is_made(tmp_path: Path) -> None:
    done = scripts.run(["-c", FAILED_BEFORE, tmp_path / "run"], timeout=DEADLINE_S * 4)
    assert done.returncode == LEFT, done.stderr
    assert "step 2 was not saved" in done.stderr
    assert "step-000000000002.partial" in done.stderr
    assert "step 3 is committed at level directory; leaving with exit code 75" in done.stderr
