"""Where the kernel refuses something, the engine gets slower, not wrong."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from statehold import _core
from statehold.errors import StorageError
from support.disks import BUFFER, Disk, State, random_arrays, restore, save
from support.seccomp import IO_URING_SETUP, forbid


def in_child(body: Callable[[], None]) -> int:
    """Run `body` in a fork, because what it takes away cannot be given back; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def round_trip(fs: _core.Fs, folder: Path) -> None:
    disk, engine = Disk(fs, str(folder)), _core.Engine(fs, 4 * BUFFER, BUFFER)
    state = State(random_arrays(1, 2_000_000, 3))
    sums = save(engine, disk, "f", state)
    back = state.cleared()
    restore(engine, disk, "f", back, sums)
    assert back.image == state.image
    engine.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_without_io_uring_threads_do_it_and_say_why(tmp_path: Path) -> None:
    def body() -> None:
        forbid(IO_URING_SETUP)
        with pytest.raises(StorageError, match="seccomp"):
            _core.open_fs("io_uring")
        fs = _core.open_fs("auto")
        assert fs.backend == "threads"
        assert "seccomp" in fs.note
        round_trip(fs, tmp_path)

    assert in_child(body) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_without_locked_memory_buffers_stay_unregistered(tmp_path: Path) -> None:
    def body() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        if os.geteuid() == 0:
            drop_capabilities(libc)
        round_trip(_core.open_fs("auto"), tmp_path)

    assert in_child(body) == 0


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """All but those that let root write into the test's folder (CAP_DAC_OVERRIDE, 1)."""
    header = struct.pack("Ii", 0x20080522, 0)
    kept = 1 << 1
    if libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
