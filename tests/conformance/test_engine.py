"""Bytes out and back over every file system: shapes, limits, concurrency, failures, corruption."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statehold import _core
from statehold.errors import (
    ClosedError,
    InvariantError,
    MissingFileError,
    NoSpaceError,
    StorageError,
    TruncatedFileError,
)
from support.disks import (
    BLOCK,
    BUFFER,
    DEADLINE_S,
    EAGER,
    EXTERNAL,
    Disk,
    State,
    corrupt,
    piece_count,
    random_arrays,
    restore,
    save,
)
from support.faults import must
from support.in_memory import SimFs


def strided_arrays() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    return [
        rng.random((300, 200), np.float64).T,
        rng.integers(0, 1 << 30, (64, 64, 64), np.int32)[:, ::2, 3:50],
        rng.random((500, 300), np.float32)[:, 7],
        rng.integers(0, 255, (90, 70, 3), np.uint8).transpose(2, 0, 1),
        (rng.random((40, 60)) + 1j).astype(np.complex128)[::3].T,
    ]


STATES = {
    "empty state": State([]),
    "no header": State(random_arrays(0, 5), header=b""),
    "nothing at all": State([], header=b""),
    "smaller than a page": State(random_arrays(1, 5, 0, 7), header=b"h" * 10),
    "smaller than a block": State(random_arrays(2, 40_000)),
    "exactly one buffer": State(random_arrays(3, BUFFER - 4096)),
    "unaligned tail": State(random_arrays(4, BUFFER, 1)),
    "many small": State(random_arrays(5, *range(300))),
    "much larger than staging": State(random_arrays(6, 5_000_000, 3_000_001, 1_000_000)),
    "eager among lazy": State(random_arrays(7, *[200_000] * 20), flags={3: EAGER, 17: EAGER}),
    "external": State(
        random_arrays(8, 1_000_000, 10, 0, 700_001, 300_000),
        flags={0: EXTERNAL, 1: EXTERNAL, 2: EXTERNAL, 4: EXTERNAL | EAGER},
    ),
    "strided": State(strided_arrays()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", STATES)
def test_round_trip(disk: Disk, engine: _core.Engine, name: str) -> None:
    state = STATES[name]
    sums = save(engine, disk, "f", state)
    image = state.image
    assert disk.fs.read_file(disk.path("f"), len(image)) == image
    assert disk.fs.stat_bytes(disk.path("f")) == len(image)
    back = state.cleared()
    restore(engine, disk, "f", back, sums)
    assert back.image == image


@pytest.mark.parametrize("name", ["unaligned tail", "strided", "external"])
def test_checksums_are_xxh3_of_every_piece(disk: Disk, engine: _core.Engine, name: str) -> None:
    state = STATES[name]
    image, expected = state.image, []
    segments = [(0, len(state.header))]
    segments += [(b, a.nbytes) for b, a in zip(state.begins, state.arrays, strict=True)]
    for begin, size in segments:
        at = begin
        while at < begin + size:
            end = min((at // BLOCK + 1) * BLOCK, begin + size)
            expected.append(_core.xxh3_64(image[at:end]))
            at = end
    sums = list(array("Q", save(engine, disk, "f", state)))
    assert sums == expected


def test_overwriting_leaves_nothing_of_the_old(disk: Disk, engine: _core.Engine) -> None:
    save(engine, disk, "f", State(random_arrays(1, 2_000_000)))
    for size in (500_001, 3_000_000):
        state = State(random_arrays(2, size))
        sums = save(engine, disk, "f", state, reuse=True)
        assert disk.fs.read_file(disk.path("f"), 1 << 30) == state.image
        back = state.cleared()
        restore(engine, disk, "f", back, sums)
        assert back.image == state.image


def test_only_what_is_asked_for_is_read(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(3, 1_000_000, 2_000_000, 500_000))
    sums = save(engine, disk, "f", state)
    wanted = np.zeros_like(state.arrays[2])
    begin = state.begins[2]
    tail = 8 * piece_count(begin, wanted.nbytes)
    job = engine.read(
        files=[disk.path("f")],
        file_bytes=[state.file_bytes],
        block_bytes=BLOCK,
        file_index=array("q", [0, 0]),  # into place, and once more to verify only
        begins=array("q", [begin] * 2),
        sizes=array("q", [wanted.nbytes] * 2),
        addresses=array("Q", [wanted.ctypes.data, 0]),
        flags=bytes(2),
        strided={},
        sums=sums[-tail:] * 2,
        owner=wanted,
    )
    must(job.wait(DEADLINE_S))
    assert (wanted == state.arrays[2]).all()
    stats = job.stats
    assert stats["cached_bytes"] + stats["direct_bytes"] == wanted.nbytes


@pytest.mark.parametrize("first_segment", [0, 151])
def test_more_files_than_descriptors(disk: Disk, engine: _core.Engine, first_segment: int) -> None:
    """Files are opened when their blocks are due."""
    states = [State(random_arrays(seed, 3_000, 77)) for seed in range(100)]
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 64, hard))
    try:
        read_together(disk, engine, states, first_segment)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_several_files_at_once(disk: Disk, engine: _core.Engine) -> None:
    read_together(disk, engine, [State(random_arrays(seed, 300_000, 77)) for seed in range(4)])


def read_together(
    disk: Disk, engine: _core.Engine, states: list[State], first_segment: int = 0
) -> None:
    sums = [save(engine, disk, f"f{i}", state) for i, state in enumerate(states)]
    back = [state.cleared() for state in states]
    header_sums = 8 * piece_count(0, 4096)
    flat = [(i, b, a) for i, s in enumerate(back) for b, a in zip(s.begins, s.arrays, strict=True)]
    job = engine.read(
        files=[disk.path(f"f{i}") for i in range(len(states))],
        file_bytes=[state.file_bytes for state in states],
        block_bytes=BLOCK,
        file_index=array("q", [i for i, _, _ in flat]),
        begins=array("q", [b for _, b, _ in flat]),
        sizes=array("q", [a.nbytes for _, _, a in flat]),
        addresses=array("Q", [a.ctypes.data for _, _, a in flat]),
        flags=bytes(len(flat)),
        strided={},
        sums=b"".join(s[header_sums:] for s in sums),
        owner=back,
        first_segment=first_segment,
    )
    must(job.wait(DEADLINE_S))
    assert [s.image for s in back] == [s.image for s in states]


def test_saves_and_restores_at_once(disk: Disk, engine: _core.Engine) -> None:
    kept = State(random_arrays(1, 2_000_000))
    kept_sums = save(engine, disk, "kept", kept)
    failures: list[BaseException] = []

    def trainer(number: int) -> None:
        try:
            state = State(random_arrays(number, 1_500_000, 33))
            sums = save(engine, disk, f"f{number}", state)
            for name, original, known in (
                (f"f{number}", state, sums),
                ("kept", kept, kept_sums),
            ):
                back = original.cleared()
                restore(engine, disk, name, back, known)
                assert back.image == original.image
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=trainer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures


def test_eager_blocks_are_copied_first_and_writing_waits_for_the_file(
    disk: Disk, engine: _core.Engine
) -> None:
    eager_count = 2
    state = State(random_arrays(1, *[BUFFER] * 12), header=b"", flags={7: EAGER, 11: EAGER})
    job = state.write(engine)
    must(job.wait_eager(DEADLINE_S))
    for index in (7, 11):  # whatever happens to them now is not in the step
        state.arrays[index][:] = 0
    assert eager_count < engine.buffer_count < 12
    copied = job.wait_copied(0.0)
    assert not copied
    job.attach(disk.fs.open_write(disk.path("f"), state.file_bytes))
    must(job.wait_written(DEADLINE_S))
    must(job.wait_copied(0.0))
    job.finish()
    original = State(random_arrays(1, *[BUFFER] * 12), header=b"")
    assert disk.fs.read_file(disk.path("f"), 1 << 30) == original.image


def test_bytes_from_python_count_as_copied_before_they_are_hashed(disk: Disk) -> None:
    """Their sources may change then. This is true as soon as filled() returns."""
    count = 64
    engine = _core.Engine(disk.fs, count * BUFFER, BUFFER, copy_threads=1)
    state = State(random_arrays(1, count * BUFFER), header=b"", flags={0: EXTERNAL})
    job = state.write(engine)
    fills = [job.next_fill(DEADLINE_S) for _ in range(count)]
    for fill in fills:
        assert fill is not None
        [(_, offset, at, nbytes)] = fill.pieces
        fill.view[at : at + nbytes] = memoryview(state.arrays[0])[offset : offset + nbytes]
    for fill in fills:
        must(not job.wait_copied(0))
        job.filled(fill)
    assert job.wait_copied(0)
    job.attach(disk.fs.open_write(disk.path("f"), state.file_bytes))
    must(job.wait_written(DEADLINE_S))
    job.finish()
    assert disk.fs.read_file(disk.path("f"), 1 << 30) == state.image
    sums = array("Q", job.checksums())
    assert sums[0] == _core.xxh3_64(state.image[:BLOCK])
    engine.close()


def test_several_buffers_are_lent_at_once(disk: Disk, engine: _core.Engine) -> None:
    count, most = 12, 2
    assert engine.buffer_count == 3
    state = State(random_arrays(1, count * BUFFER), header=b"", flags={0: EXTERNAL})
    job = state.write(engine)
    job.attach(disk.fs.open_write(disk.path("f"), state.file_bytes))
    seen = 0
    while fills := job.next_fills(DEADLINE_S, most):
        assert len(fills) <= most
        for fill in fills:
            [(_, offset, at, nbytes)] = fill.pieces
            fill.view[at : at + nbytes] = memoryview(state.arrays[0])[offset : offset + nbytes]
            job.filled(fill)
        seen += len(fills)
    assert seen == count
    must(job.wait_written(DEADLINE_S))
    job.finish()
    assert disk.fs.read_file(disk.path("f"), 1 << 30) == state.image


def test_the_file_system_lives_as_long_as_its_engine(tmp_path: Path) -> None:
    engine = _core.Engine(_core.open_fs(), 3 * BUFFER, BUFFER)
    gc.collect()
    disk, state = Disk(_core.open_fs(), str(tmp_path)), State(random_arrays(1, 1_000_000))
    save(engine, disk, "f", state)
    assert disk.fs.read_file(disk.path("f"), 1 << 30) == state.image
    engine.close()


def test_a_cancelled_job_lets_go_of_its_file(disk: Disk, engine: _core.Engine) -> None:
    job = State(random_arrays(1, 1000), flags={0: EXTERNAL}).write(engine)
    job.attach(disk.fs.open_write(disk.path("f"), 5096))
    job.cancel()
    assert disk.fs.can_reuse(disk.path("f"))


def test_a_job_that_is_cancelled_when_all_is_written_does_too(
    disk: Disk, engine: _core.Engine
) -> None:
    job = State(random_arrays(1, 1000)).write(engine)
    file = disk.fs.open_write(disk.path("f"), 5096)
    job.attach(file)
    must(job.wait_written(DEADLINE_S))
    job.cancel()
    must(file.close_alone(DEADLINE_S))
    with pytest.raises(ClosedError):
        job.finish()


def test_staging_is_one_block_of_memory(disk: Disk, engine: _core.Engine) -> None:
    assert engine.buffer_count == 3
    assert engine.buffer_bytes == BUFFER
    view = engine.staging
    assert view.nbytes == 3 * BUFFER
    assert np.frombuffer(view, np.uint8).ctypes.data == engine.staging_address
    engine.close()
    view[0] = 1  # a view keeps the memory mapped
    del view


def test_cancel_leaves_the_sources_alone(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(1, *[BUFFER] * 8))
    job = state.write(engine)
    job.cancel()
    job.cancel()
    with pytest.raises(ClosedError):
        job.wait_copied(DEADLINE_S)
    with pytest.raises(ClosedError):
        job.finish()
    after = State(random_arrays(2, 1_000_000))
    save(engine, disk, "f", after)  # the buffers are free again
    assert disk.fs.read_file(disk.path("f"), 1 << 30) == after.image


def test_dropping_a_job_cancels_it(disk: Disk, engine: _core.Engine) -> None:
    for _ in range(10):
        state = State(random_arrays(1, *[BUFFER] * 8))
        job = state.write(engine)
        del job
        del state  # only now: until the job is gone its sources are read
    gc.collect()
    after = State(random_arrays(2, 700_000))
    assert 2 * BUFFER < after.file_bytes <= engine.buffer_count * BUFFER == 3 * BUFFER
    job = after.write(engine)
    must(job.wait_copied(DEADLINE_S), "a buffer is not free again")
    job.attach(disk.fs.open_write(disk.path("f"), after.file_bytes))
    must(job.wait_written(DEADLINE_S))
    job.finish()
    assert disk.fs.read_file(disk.path("f"), 1 << 30) == after.image


def test_close_fails_what_is_running(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(1, *[BUFFER] * 8))
    job = state.write(engine)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        job.wait_written(DEADLINE_S)
    with pytest.raises(ClosedError):
        state.write(engine)


def test_a_fill_that_is_given_back_twice_is_refused(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(1, 1000), flags={0: EXTERNAL})
    job = state.write(engine)
    fill = job.next_fill(DEADLINE_S)
    assert fill is not None
    assert fill.address == np.frombuffer(fill.view, np.uint8).ctypes.data
    assert job.next_fill(0.0) is None
    job.filled(fill)
    with pytest.raises(InvariantError):
        job.filled(fill)
    job.attach(disk.fs.open_write(disk.path("f"), state.file_bytes))
    must(job.wait_written(DEADLINE_S))


def test_finish_before_written_is_refused(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(1, 1000))
    job = state.write(engine)
    with pytest.raises(InvariantError):
        job.finish()
    job.cancel()


@pytest.mark.parametrize(
    "change",
    [
        {"begins": array("q", [0])},
        {"sizes": array("q", [1001])},
        {"sizes": array("i", [1000])},
        {"addresses": array("q", [0])},
        {"flags": b""},
        {"block_bytes": 5000},
        {"strided": {0: (1, (999,), (1,))}},
        {"strided": {1: (1, (1000,), (1,))}},
    ],
)
def test_impossible_requests_are_refused(
    disk: Disk, engine: _core.Engine, change: dict[str, Any]
) -> None:
    state = State(random_arrays(1, 1000))
    arguments = {"file_bytes": state.file_bytes, "header": state.header, **state.arguments()}
    with pytest.raises(ValueError):
        engine.write(**{**arguments, **change})


# What is wrong on disk.


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_changed_byte_is_found_where_it_is(
    disk: Disk, engine: _core.Engine, target: int, cold: bool
) -> None:
    state = State(random_arrays(1, 300_000, 1_000_001, 5))
    sums = save(engine, disk, "f", state)
    at = state.begins[target] + state.arrays[target].nbytes // 2
    corrupt(disk, "f", at, cold)
    back = state.cleared()
    job = back.read(engine, disk.path("f"), sums)
    with pytest.raises(_core.Mismatch) as raised:
        job.wait(DEADLINE_S)
    error = raised.value
    begin = state.begins[target]
    assert error.segment == target
    assert error.piece == at // BLOCK - begin // BLOCK
    assert error.begin == max(begin, at // BLOCK * BLOCK)
    assert error.end == min(begin + state.arrays[target].nbytes, (at // BLOCK + 1) * BLOCK)
    assert error.begin <= at < error.end
    assert error.got != error.expected
    assert error.path == disk.path("f")


@pytest.mark.parametrize("cold", [True, False])
def test_a_file_of_the_wrong_size_touches_nothing(
    disk: Disk, engine: _core.Engine, cold: bool
) -> None:
    state = State(random_arrays(1, 300_000))
    sums = save(engine, disk, "f", state)
    back = state.cleared()
    before = back.image
    for missing in (-1, 1):
        job = back.read(
            engine, disk.path("f"), sums, file_bytes=[state.file_bytes + missing * cold + 8192]
        )
        with pytest.raises(TruncatedFileError) as raised:
            job.wait(DEADLINE_S)
        assert str(state.file_bytes) in str(raised.value)
    assert back.image == before


def test_a_missing_file_touches_nothing(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(1, 300_000))
    sums = save(engine, disk, "f", state)
    back = state.cleared()
    before = back.image
    job = back.read(engine, disk.path("g"), sums)
    with pytest.raises(MissingFileError):
        job.wait(DEADLINE_S)
    assert back.image == before


# Faults of the disk, by simulation.


def sim_engine(**options: Any) -> tuple[Disk, SimFs, _core.Engine]:
    fs = SimFs(seed=11, **options)
    fs.mkdir("run")
    return Disk(fs, "run"), fs, _core.Engine(fs, 3 * BUFFER, BUFFER)


def test_short_transfers_are_resumed() -> None:
    disk, fs, engine = sim_engine(short_io=0.7)
    state = State(random_arrays(1, 2_000_000, 3))
    sums = save(engine, disk, "f", state)
    back = state.cleared()
    restore(engine, disk, "f", back, sums)
    assert back.image == state.image
    assert fs.fired["short"] > 10


@pytest.mark.parametrize("operation", ["write", "sync", "truncate"])
def test_a_failed_write_fails_its_save_only(operation: str) -> None:
    disk, fs, engine = sim_engine()
    state = State(random_arrays(1, 2_000_001))
    fs.fail_next(operation, errno.EIO, skip=3 if operation == "write" else 0)
    with pytest.raises(StorageError) as raised:
        save(engine, disk, "f", state)
    assert raised.value.errno == errno.EIO
    assert raised.value.path == "run/f"
    assert fs.fired["injected"] == 1
    save(engine, disk, "g", state)
    assert fs.read_file("run/g", 1 << 30) == state.image


def test_a_failed_read_fails_its_restore_only() -> None:
    disk, fs, engine = sim_engine()
    state = State(random_arrays(1, 2_000_000))
    sums = save(engine, disk, "f", state)
    fs.fail_next("read", errno.EIO, skip=2)
    with pytest.raises(StorageError) as raised:
        restore(engine, disk, "f", state.cleared(), sums)
    assert raised.value.errno == errno.EIO
    assert fs.fired["injected"] == 1
    back = state.cleared()
    restore(engine, disk, "f", back, sums)
    assert back.image == state.image


def test_random_errors_never_pass_for_success() -> None:
    disk, fs, engine = sim_engine(eio=0.05, short_io=0.2)
    errors: list[int] = []
    for number in range(40):
        state = State(random_arrays(number, 900_000))
        try:
            sums = save(engine, disk, f"f{number}", state)
            back = state.cleared()
            restore(engine, disk, f"f{number}", back, sums)
        except StorageError as error:
            errors.append(error.errno)
        else:
            assert back.image == state.image
    assert 0 < len(errors) < 40
    assert set(errors) == {errno.EIO}
    assert fs.fired["eio"] >= len(errors)


def test_a_full_disk_says_so() -> None:
    disk, fs, engine = sim_engine(capacity=1_000_000)
    state = State(random_arrays(1, 2_000_000))
    job = state.write(engine)
    with pytest.raises(NoSpaceError):
        fs.open_write(disk.path("f"), state.file_bytes)
    job.cancel()
    fs.fail_next("write", errno.ENOSPC)
    small = State(random_arrays(1, 300_000))
    with pytest.raises(NoSpaceError):
        save(engine, disk, "f", small)
    assert (fs.fired["enospc"], fs.fired["injected"]) == (1, 1)


def test_what_was_finished_survives_a_crash() -> None:
    for seed in range(10):
        fs = SimFs(seed=seed, torn=0.3)
        fs.mkdir("run")
        fs.sync_dir("/")
        disk, engine = Disk(fs, "run"), _core.Engine(fs, 3 * BUFFER, BUFFER)
        state = State(random_arrays(seed, 1_000_001))
        sums = save(engine, disk, "f", state)
        fs.sync_dir("run")
        unfinished = State(random_arrays(99, 500_000))
        job = unfinished.write(engine)
        job.attach(fs.open_write("run/unfinished", 504_096))
        fs.crash()
        job.cancel()
        back = state.cleared()
        restore(engine, disk, "f", back, sums)
        assert back.image == state.image
        engine.close()


def test_an_unfinished_file_may_be_anything_but_is_noticed() -> None:
    noticed = 0
    for seed in range(20):
        fs = SimFs(seed=seed, torn=0.5)
        disk, engine = Disk(fs, "/"), _core.Engine(fs, 3 * BUFFER, BUFFER)
        state = State(random_arrays(seed, 500_000))
        job = state.write(engine)
        job.attach(fs.open_write("f", state.file_bytes))
        fs.sync_dir("/")
        must(job.wait_written(DEADLINE_S))
        fs.crash()
        back = state.cleared()
        try:
            restore(engine, disk, "f", back, job.checksums())
        except (_core.Mismatch, TruncatedFileError):
            noticed += 1
        else:
            assert back.image == state.image
        engine.close()
    assert noticed > 15


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what is tested
def test_a_child_process_refuses_and_does_not_hang(disk: Disk) -> None:
    engine = _core.Engine(disk.fs, 3 * BUFFER, BUFFER)
    state = State(random_arrays(1, 1_000_000))
    job = state.write(engine)
    child = os.fork()
    if child == 0:
        try:
            disk.fs.listdir(disk.root)
        except ClosedError:
            del job, engine  # nothing is waited for
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    job.cancel()
    engine.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_misdirected_write_when_no_other_file_is_left(seed: int) -> None:
    """A file may be unlinked while it is written; then there is none that the write could hit."""
    fs = SimFs(seed, misdirected=1.0)
    fs.mkdir("run")
    engine = _core.Engine(fs, 3 * BUFFER, BUFFER)
    state = State(random_arrays(1, BUFFER))
    file = fs.open_write("run/f", len(state.image))
    fs.unlink("run/f")
    job = state.write(engine)
    job.attach(file)
    assert job.wait_written(DEADLINE_S)
    job.finish()
    assert fs.fired["misdirected"] > 0
    engine.close()
