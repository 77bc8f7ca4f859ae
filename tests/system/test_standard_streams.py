"""Standard streams that are full or closed: saves go on, and no file is printed into."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path

import pytest

import statehold
from statehold import errors
from support.contents import FITS, THREADS, check_restored, committed, content
from support.faults import DEADLINE_S, SMALL, small
from support.faulty import FAIL, HOLD, fault
from support.victims import Victims


def clog(descriptor: int) -> int:
    """Make the descriptor a full pipe; the end to read from."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    os.dup2(write, descriptor)
    os.close(write)
    return read


def full_stderr(folder: Path) -> None:
    logging.basicConfig(level=logging.DEBUG)
    run = folder / "run"
    with statehold.Checkpointer(run, **THREADS) as ckpt:
        committed(ckpt, 1, FITS)
        kept, read = os.dup(2), clog(2)
        for step in (2, 4):
            with fault("fdatasync", run, FAIL, nth=1, value=errno.EIO) as failing:
                with pytest.raises(errors.StorageError):
                    ckpt.save(step, content(step, FITS)).wait("committed", DEADLINE_S)
                assert failing.fired == 1
            # What there is to say of the failure cannot be said; the next step does not care.
            ckpt.save(step + 1, content(step + 1, FITS)).wait("committed", DEADLINE_S)
            check_restored(ckpt, step + 1, FITS)
        os.dup2(kept, 2)  # for what comes; the line that is stuck needs a reader
        while b"cannot sync" not in os.read(read, 1 << 20):
            pass
    with pytest.raises(errors.ClosedError):
        ckpt.steps()


def test_a_full_pipe_on_stderr(victims: Victims, tmp_path: Path) -> None:
    victims.run(full_stderr, tmp_path)


def closed_streams(folder: Path, backend: str) -> None:
    run = folder / "run"
    for descriptor in (1, 2):  # not 0, which would take the first file
        os.close(descriptor)
    with statehold.Checkpointer(run, **small(backend=backend)) as ckpt:
        for step in (1, 2, 3):
            # While its file is open: what the process, or a library in it, goes on printing.
            with fault("fdatasync,fsync", ".partial", HOLD, nth=1) as held:
                save = ckpt.save(step, content(step, FITS))
                held.wait_fired()
                refused = [printed(descriptor) for descriptor in (1, 2)]
                held.release()
                save.wait("committed", DEADLINE_S)
            assert all(refused), refused  # EBADF, or the EINVAL of io_uring's descriptor
            check_restored(ckpt, step, FITS)
        with pytest.raises(errors.StorageError), fault("fsync", run, FAIL, value=errno.EIO):
            ckpt.save(9, content(9, FITS)).wait("committed", DEADLINE_S)
        logging.getLogger("statehold").error("as a handler would")
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        check_restored(ckpt, 3, FITS)
    assert (run / ".lock").read_text().startswith("process ")
    assert "as a handler" not in (run / ".lock").read_text()


def printed(descriptor: int) -> int:
    """The errno of writing to a standard stream; 0 if something took it."""
    try:
        os.write(descriptor, b"noise")
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_closed_standard_streams(victims: Victims, tmp_path: Path, backend: str) -> None:
    victims.run(closed_streams, tmp_path, backend)
    assert sys.stderr is not None
