"""What Python drops without a word: buffers that it was lent, and threads that wait when the
interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from statehold import _core
from statehold.errors import ClosedError
from support.disks import BUFFER, DEADLINE_S, EXTERNAL, Disk, State, random_arrays, restore, save
from support.faults import must

# More than the engine of these tests has.
DROPPED = 4
OUTSIDE = State(random_arrays(1, BUFFER), flags={0: EXTERNAL})
INSIDE = State(random_arrays(2, 4 * BUFFER))


def test_a_buffer_to_fill_that_is_dropped_comes_back(disk: Disk, engine: _core.Engine) -> None:
    for _ in range(DROPPED):
        job = OUTSIDE.write(engine)
        must(job.next_fill(DEADLINE_S) is not None)
        with pytest.raises(ClosedError):
            job.wait_copied(DEADLINE_S)
    save(engine, disk, "f", INSIDE)


def test_a_buffer_to_empty_that_is_dropped_comes_back(disk: Disk, engine: _core.Engine) -> None:
    outside, inside = (save(engine, disk, name, s) for name, s in (("o", OUTSIDE), ("i", INSIDE)))
    for _ in range(DROPPED):
        job = OUTSIDE.cleared().read(engine, disk.path("o"), outside)
        must(job.next_ready(DEADLINE_S) is not None)
        with pytest.raises(ClosedError):
            job.wait(DEADLINE_S)
    back = INSIDE.cleared()
    restore(engine, disk, "i", back, inside)
    assert back.image == INSIDE.image


def test_a_buffer_may_be_dropped_after_its_engine(disk: Disk) -> None:
    engine = _core.Engine(disk.fs, 3 * BUFFER, BUFFER)
    fill = OUTSIDE.write(engine).next_fill(DEADLINE_S)
    engine.close()
    del engine
    assert fill is not None
    assert len(fill.view) == BUFFER
    del fill


# The object is dropped when no thread but the main one may run Python any more. Once the other one
# has slept again, it has asked for the interpreter; once it sleeps on, it was refused.
WAITING_AT_THE_END = """
import sys, threading, time, types
from array import array
from statehold import _core
from statehold.testing import SimFs

class AtTheEnd:
    def __init__(self, thread):
        self.status = f"/proc/self/task/{thread}/status"
    def sleeps(self):
        with open(self.status) as lines:
            return next(line for line in lines if line.startswith("voluntary"))
    def __del__(self, sleep=time.sleep, say=sys.stdout.write, flush=sys.stdout.flush):
        seen = [self.sleeps()]
        while len(set(seen)) == 1 or seen[-20:] != seen[-1:] * 20:
            sleep(0.01)
            seen.append(self.sleeps())
        say("it has asked")
        flush()

engine = _core.Engine(SimFs(1), 1 << 16, 1 << 14)
none = array("Q")
job = engine.write(file_bytes=4096, block_bytes=4096, begins=none, sizes=none, addresses=none,
                   flags=b"", strided={}, header=bytes(4096), owner=None)

def wait():
    job.wait_written(None)

thread = threading.Thread(target=wait, daemon=True)
thread.start()
def line():
    frame = sys._current_frames().get(thread.ident)
    return frame and frame.f_code.co_name == "wait" and frame.f_lineno
while line() != wait.__code__.co_firstlineno + 1:
    time.sleep(0.001)
held = sys.modules["held"] = types.ModuleType("held")
held.object = AtTheEnd(thread.native_id)
del held
"""


def test_a_thread_waits_while_the_interpreter_ends() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", WAITING_AT_THE_END],
        env=os.environ | {"PYTHONPATH": str(source)},
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"it has asked", b"")
