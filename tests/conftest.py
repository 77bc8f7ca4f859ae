"""Settings and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from support.seeds import IS_NEW, SEED

if TYPE_CHECKING:
    from support.in_memory import SimFs

pytest_plugins = ["support.limits"]

# Before torch is imported, here and in children: the workers are as many as the cores, and threads
# that torch has besides would only wait for each other, which costs processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines stall for longer than any deadline; a failure prints how to replay it.
settings.register_profile("campaign", deadline=None, print_blob=True)
settings.register_profile("everyday", settings.get_profile("campaign"), derandomize=True)
settings.load_profile("campaign" if IS_NEW else "everyday")

WORKERS_MAX = 8
WORKER_BYTES = 2 << 30  # of memory, at most


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-io-uring",
        action="store_true",
        help="as in most containers: io_uring is forbidden, for this process and its children",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-io-uring"):
        from support.seccomp import IO_URING_SETUP, forbid

        forbid(IO_URING_SETUP)


def pytest_collection_finish() -> None:
    """What is there by now stays: each of hundreds of collections would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What the tests of a file have imported stays, too."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: twice the cores, because many tests wait for a disk or a deadline."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(2 * len(os.sched_getaffinity(0)), WORKERS_MAX, memory // WORKER_BYTES))


@pytest.fixture(autouse=True)
def _draws_are_those_of_the_seed() -> None:
    """Whichever tests ran before in this process."""
    random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED % 2**32)


@pytest.fixture(autouse=True)
def _notes_are_logged_once_a_test() -> Iterator[None]:
    """Not once a process: which tests ran before in it is never the same."""
    from statehold.observe import background_log

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(background_log, "_logged", set())
        yield


@pytest.fixture(autouse=True, scope="session")
def _copies_do_not_starve() -> Iterator[None]:
    """Copies give way to all programs of the machine, and so for minutes where others are busy."""
    from statehold.checkpoint.levels import promoting

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(promoting, "NICENESS", 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _runs_leave_no_steps_in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of another session get the same names once somebody empties the folder of temporary
    files, and a run in one of them would find the steps that memory still has of that session."""
    from support.memory_left import free_below

    base = tmp_path_factory.getbasetemp()
    free_below(base)
    yield
    free_below(base)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A path on a memory file system; nothing is there yet, and no other test uses it."""
    from statehold.io.mounts import mount_of

    if mount_of("/dev/shm").kind != "tmpfs":
        pytest.skip("/dev/shm is no memory file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder, "steps")


@pytest.fixture
def fs() -> Iterator[SimFs]:
    """A simulated disk without faults."""
    from support.in_memory import SimFs

    disk = SimFs(seed=1)
    yield disk
    disk.close()


@pytest.fixture
def small_shared_files() -> Iterator[None]:
    """Steps share files of a few KiB, too."""
    from support.sharing import small_files

    with small_files():
        yield
