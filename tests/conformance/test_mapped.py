"""Files that are memory, by both real backends: what is written is there, whoever dies or lets go.

The simulated disk is a disk: it refuses, as the file system of a real one does.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statehold import _core
from statehold.errors import (
    ClosedError,
    MissingFileError,
    NoSpaceError,
    StorageError,
    TruncatedFileError,
)
from support import scripts
from support.disks import (
    BLOCK,
    BUFFER,
    DEADLINE_S,
    EAGER,
    EXTERNAL,
    Disk,
    State,
    corrupt,
    finish,
    no_file_larger_than,
    open_or_skip,
    random_arrays,
    restore,
    save,
)
from support.in_memory import SimFs

MEMORY = Path("/dev/shm")


@pytest.fixture(params=["io_uring", "threads"])
def memory(request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A directory on tmpfs."""
    fs = open_or_skip(request.param)
    if not MEMORY.is_dir():
        pytest.skip(f"there is no {MEMORY}")
    with tempfile.TemporaryDirectory(prefix="statehold-test-", dir=MEMORY) as root:
        try:
            fs.open_write(f"{root}/probe", 1, mapped=True).close()
        except StorageError as error:
            pytest.skip(str(error))
        yield Disk(fs, root)
    fs.close()


@pytest.fixture
def disk(memory: Disk) -> Disk:
    """What `engine` is for."""
    return memory


def strided() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    return [rng.random((300, 200), np.float64).T, rng.random((500, 300), np.float32)[:, 7]]


STATES = {
    "nothing at all": State([], header=b""),
    "smaller than a page": State(random_arrays(1, 5, 0, 7), header=b"h" * 10),
    "unaligned tail": State(random_arrays(4, BUFFER, 1)),
    "many small": State(random_arrays(5, *range(300))),
    "much larger than staging": State(random_arrays(6, 5_000_000, 3_000_001, 1_000_000)),
    "eager among lazy": State(random_arrays(7, *[200_000] * 20), flags={3: EAGER, 17: EAGER}),
    "external": State(
        random_arrays(8, 1_000_000, 10, 0, 700_001, 300_000),
        flags={0: EXTERNAL, 1: EXTERNAL, 2: EXTERNAL, 4: EXTERNAL | EAGER},
    ),
    "strided": State(strided()),
}
LARGE = STATES["much larger than staging"]


def save_mapped(
    engine: _core.Engine, memory: Disk, name: str, state: State, **how: Any
) -> tuple[_core.File, bytes]:
    file = memory.fs.open_write(memory.path(name), state.file_bytes, mapped=True, **how)
    return file, finish(state.write(engine, file), state)


@pytest.mark.thorough
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("attached", ["from the start", "later"])
def test_round_trip(memory: Disk, engine: _core.Engine, name: str, attached: str) -> None:
    state = STATES[name]
    file = memory.fs.open_write(memory.path("f"), state.file_bytes, mapped=True)
    job = state.write(engine, file if attached == "from the start" else None)
    if attached == "later":
        job.wait_copied(0.0)
        job.attach(file)
    sums = finish(job, state)
    assert file.mapped
    assert bytes(file.view) == state.image
    assert memory.fs.read_file(memory.path("f"), state.file_bytes) == state.image
    back = state.cleared()
    restore(engine, memory, "f", back, sums)
    assert back.image == state.image
    plain = save(engine, memory, "plain", state)
    assert sums == plain


def test_a_damaged_file_is_found_where_it_lies(memory: Disk, engine: _core.Engine) -> None:
    """Larger than a huge page, or it would be read; the kernel decides whether it gets them."""
    state = State(random_arrays(11, 3 << 20, 5 << 20))
    _, sums = save_mapped(engine, memory, "f", state)
    back = state.cleared()
    restore(engine, memory, "f", back, sums)
    assert back.image == state.image
    at = state.begins[1] + (3 << 20) + 17
    corrupt(memory, "f", at, cold=False)
    job = back.read(engine, memory.path("f"), sums)
    with pytest.raises(_core.Mismatch) as raised:
        job.wait(DEADLINE_S)
    assert raised.value.segment == 1
    assert raised.value.begin <= at < raised.value.end


def test_no_buffer_is_needed(memory: Disk, engine: _core.Engine) -> None:
    """All buffers are in Python's hands, and a save into memory goes on."""
    waiting = State(random_arrays(1, 3 * BUFFER), flags={0: EXTERNAL})
    holder = waiting.write(engine)
    fills = [fill for _ in range(3) if (fill := holder.next_fill(DEADLINE_S)) is not None]
    assert len(fills) == 3
    _, sums = save_mapped(engine, memory, "f", LARGE)
    assert memory.fs.read_file(memory.path("f"), LARGE.file_bytes) == LARGE.image
    assert len(sums) > 0
    holder.cancel()
    for fill in fills:
        holder.filled(fill)


def test_it_outlives_every_object(memory: Disk) -> None:
    engine = _core.Engine(memory.fs, 3 * BUFFER, BUFFER)
    file, _ = save_mapped(engine, memory, "f", LARGE)
    view = file.view
    engine.close()
    file.close()
    del engine, file
    gc.collect()
    os.unlink(memory.path("f"))
    assert view.readonly
    assert bytes(view) == LARGE.image


def test_a_job_in_flight_keeps_it(memory: Disk, engine: _core.Engine) -> None:
    state = STATES["external"]
    file = memory.fs.open_write(memory.path("f"), state.file_bytes, mapped=True)
    job = state.write(engine, file)
    file.close()
    del file
    gc.collect()
    finish(job, state)
    assert memory.fs.read_file(memory.path("f"), state.file_bytes) == state.image


VICTIM = """
import os, signal, sys
from statehold import _core
from support.disks import BUFFER, State, finish, random_arrays
folder, backend = sys.argv[1:]
state = State(random_arrays(6, 5_000_000, 3_000_001, 1_000_000))
fs = _core.open_fs(backend)
file = fs.open_write(folder + "/partial", state.file_bytes, mapped=True)
engine = _core.Engine(fs, 3 * BUFFER, BUFFER)
finish(state.write(engine, file), state)
fs.rename(folder + "/partial", folder + "/step")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_it_outlives_the_process(memory: Disk) -> None:
    tests = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(tests)}
    done = scripts.run(["-c", VICTIM, memory.root, memory.fs.backend], env=env)
    assert done.returncode == -signal.SIGKILL
    file = memory.fs.open_view(memory.path("step"), LARGE.file_bytes)
    assert bytes(file.view) == LARGE.image
    file.close()
    assert memory.fs.can_reuse(memory.path("step"))


def test_a_retired_file_is_reused_with_its_mapping(memory: Disk, engine: _core.Engine) -> None:
    fs = memory.fs
    file, _ = save_mapped(engine, memory, "old", LARGE)
    address = file.address
    fs.rename(memory.path("old"), memory.path("new"))
    assert not fs.can_reuse(memory.path("new"))
    assert fs.can_reuse(memory.path("new"), file)
    for seed, size in ((1, 8_000_000), (2, 8_999_000)):
        state = State(random_arrays(seed, size))
        again, sums = save_mapped(engine, memory, "new", state, reuse=True, kept=file)
        with pytest.raises(ClosedError):
            _ = file.view
        assert again.address == address
        assert fs.read_file(memory.path("new"), 1 << 30) == state.image
        back = state.cleared()
        restore(engine, memory, "new", back, sums)
        assert back.image == state.image
        file = again


def test_what_is_seen_is_not_reused(memory: Disk, engine: _core.Engine) -> None:
    fs, path = memory.fs, memory.path("f")
    file, _ = save_mapped(engine, memory, "f", LARGE)
    view = file.view
    assert not fs.can_reuse(path, file)
    view.release()
    gc.collect()
    assert fs.can_reuse(path, file)
    other = fs.open_view(path, LARGE.file_bytes)
    assert not fs.can_reuse(path, file)
    other.close()
    job = STATES["external"].write(engine)  # of another size: it is not attached
    with pytest.raises(TruncatedFileError):
        job.attach(file)
    assert fs.can_reuse(path, file)
    with open(path, "rb"):
        assert not fs.can_reuse(path, file)
    os.link(path, memory.path("other-name"))
    assert not fs.can_reuse(path, file)


def test_a_kept_file_that_is_shared_is_mapped_anew(memory: Disk, engine: _core.Engine) -> None:
    file, _ = save_mapped(engine, memory, "f", LARGE)
    address, view = file.address, file.view
    again = memory.fs.open_write(memory.path("f"), LARGE.file_bytes, True, mapped=True, kept=file)
    assert again.address != address
    assert len(view) == LARGE.file_bytes


def test_a_full_memory_is_an_error_before_anything_is_written(memory: Disk) -> None:
    memory.fs.write_file(memory.path("committed"), b"whole")
    with pytest.raises(NoSpaceError):
        memory.fs.open_write(memory.path("f"), 1 << 45, mapped=True)
    assert memory.fs.read_file(memory.path("committed"), 9) == b"whole"


def test_a_file_in_memory_that_has_no_room_takes_none(memory: Disk) -> None:
    fs, old = memory.fs, memory.path("old")
    kept = fs.open_write(old, BLOCK, mapped=True)
    with no_file_larger_than(fs, 4 * BLOCK):
        for mapping in (kept, None):
            with pytest.raises(StorageError):
                fs.open_write(old, 16 * BLOCK, True, mapped=True, kept=mapping)
        with pytest.raises(StorageError):
            fs.open_write(memory.path("new"), 16 * BLOCK, mapped=True)
    assert [name for name, _ in fs.listdir(memory.root) if name != "probe"] == ["old"]
    assert fs.stat_bytes(old) == os.stat(old).st_blocks * 512 == BLOCK


def test_populating_changes_nothing(memory: Disk, engine: _core.Engine) -> None:
    file = memory.fs.open_write(memory.path("f"), LARGE.file_bytes, mapped=True)
    file.populate(0, LARGE.file_bytes)
    assert not any(file.view[:: BLOCK // 4])
    finish(LARGE.write(engine, file), LARGE)
    file.populate(0, LARGE.file_bytes)
    assert bytes(file.view) == LARGE.image


def test_a_view_is_a_source(memory: Disk, engine: _core.Engine, tmp_path: Path) -> None:
    """How a step is promoted: from the memory of its file to a disk, without a copy of its own."""
    _, sums = save_mapped(engine, memory, "f", LARGE)
    viewed = memory.fs.open_view(memory.path("f"), LARGE.file_bytes)
    job = engine.write(
        file_bytes=LARGE.file_bytes,
        block_bytes=BLOCK,
        begins=array("q", [0]),
        sizes=array("q", [LARGE.file_bytes]),
        addresses=array("Q", [viewed.address]),
        flags=b"\0",
        strided={},
        header=b"",
        owner=viewed,
    )
    job.attach(memory.fs.open_write(str(tmp_path / "f"), LARGE.file_bytes))
    written = job.wait_written(DEADLINE_S)
    assert written
    job.finish()
    assert (tmp_path / "f").read_bytes() == LARGE.image
    assert len(job.checksums()) <= len(sums)  # one segment: its pieces are not cut at tensors


def test_a_view_is_of_a_whole_file(memory: Disk) -> None:
    fs = memory.fs
    with pytest.raises(MissingFileError):
        fs.open_view(memory.path("f"), 1)
    fs.write_file(memory.path("f"), b"12345")
    for wrong in (4, 6):
        with pytest.raises(TruncatedFileError):
            fs.open_view(memory.path("f"), wrong)
    file = fs.open_view(memory.path("f"), 5)
    assert (bytes(file.view), file.mapped, file.direct) == (b"12345", False, False)
    os.symlink(memory.path("f"), memory.path("link"))
    with pytest.raises(MissingFileError):
        fs.open_view(memory.path("link"), 5)


def test_a_forked_child_is_refused(memory: Disk) -> None:
    file = memory.fs.open_write(memory.path("f"), 5, mapped=True)
    child = os.fork()
    if child == 0:
        try:
            _ = file.view
        except ClosedError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert bytes(file.view) == bytes(5)


def test_a_plain_file_is_no_memory(memory: Disk) -> None:
    file = memory.fs.open_write(memory.path("f"), 4096)
    assert (file.mapped, file.address, len(file.view)) == (False, 0, 0)
    file.close()


def refused(call: Callable[[], object], path: str) -> None:
    with pytest.raises(StorageError, match="not in memory") as raised:
        call()
    assert raised.value.errno == errno.EOPNOTSUPP
    assert raised.value.path == path


@pytest.mark.parametrize("backend", ["io_uring", "threads", "sim"])
def test_a_disk_is_refused(backend: str) -> None:
    """Beside this file, which is on one, wherever temporary files are."""
    fs = SimFs(seed=1) if backend == "sim" else open_or_skip(backend)
    with tempfile.TemporaryDirectory(prefix=".disk-", dir=Path(__file__).parent) as root:
        path = "f" if backend == "sim" else f"{root}/f"
        refused(lambda: fs.open_write(path, 5, mapped=True), path)
        assert fs.stat_bytes(path) is None
        fs.write_file(path, b"12345")
        refused(lambda: fs.open_write(path, 5, True, mapped=True), path)
        refused(lambda: fs.open_view(path, 5), path)
        assert fs.read_file(path, 5) == b"12345"
    fs.close()


def test_a_file_with_two_names_is_never_mapped_to_be_written(memory: Disk) -> None:
    one, other = memory.path("one"), memory.path("other")
    file = memory.fs.open_write(one, BLOCK, mapped=True)
    memory.fs.link(one, other)
    assert not memory.fs.can_reuse(one, file)
    for kept in (file, None):
        with pytest.raises(StorageError) as raised:
            memory.fs.open_write(other, BLOCK, reuse=True, mapped=True, kept=kept)
        assert raised.value.errno == errno.EMLINK
