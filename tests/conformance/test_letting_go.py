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


# The object is dropped when no thread but the main one may run Python any more. The other thread
# waits in slices. After its slice it asks for the interpreter and is refused, so it pauses.
WAITING_AT_THE_END = """
import os, sys, threading, time, types
from array import array
from statehold import _core, _sim

class AtTheEnd:
    def __init__(self, thread):
        self.number = f"/proc/self/task/{thread}/syscall"
        self.of_pause = {"x86_64": "34", "aarch64": "73"}[os.uname().machine]
    def __del__(self, sleep=time.sleep, say=sys.stdout.write, flush=sys.stdout.flush):
        while self.system_call() != self.of_pause:
            sleep(0.001)  # between two looks: once the thread pauses, it does so for ever
        say("it pauses")
        flush()
    def system_call(self):
        with open(self.number) as file:
            return file.read().split()[0]

engine = _core.Engine(_sim.SimFs(1), 1 << 16, 1 << 14)
none = array("Q")
job = engine.write(file_bytes=4096, block_bytes=4096, begins=none, sizes=none, addresses=none,
                   flags=b"", strided={}, header=bytes(4096), owner=None)
at_the_wait = threading.Lock()
at_the_wait.acquire()

def wait():
    at_the_wait.release()
    job.wait_written(None)

# Nothing but the wait itself makes the thread give the interpreter up.
sys.setswitchinterval(1000)
thread = threading.Thread(target=wait, daemon=True)
thread.start()
at_the_wait.acquire()
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
    assert (done.returncode, done.stdout, done.stderr) == (0, b"it pauses", b"")
