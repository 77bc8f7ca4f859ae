"""Ranges of long-lived files, in and out, on every file system."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statehold import _core
from statehold.errors import ClosedError, StorageError, TruncatedFileError
from support.disks import BUFFER, DEADLINE_S, Disk, corrupt
from support.faults import must
from support.in_memory import SimFs

PAGE = 4096
FILE_BYTES = 8 * BUFFER

Array = np.ndarray[Any, Any]


@dataclass
class Range:
    file: int
    offset: int
    memory: Array

    def filled_with(self, seed: int) -> Range:
        rng = np.random.default_rng(seed)
        self.memory[:] = np.frombuffer(rng.bytes(self.memory.nbytes), np.uint8)
        return self

    def like(self) -> Range:
        """The same range of the file, into other memory that is aligned as this one is."""
        at = self.memory.ctypes.data % PAGE
        return Range(self.file, self.offset, memory_at(at, self.memory.nbytes))


def memory_at(lead: int, nbytes: int) -> Array:
    """Memory that begins `lead` bytes after a page does."""
    base = np.full(nbytes + 2 * PAGE, 0xAB, np.uint8)
    begin = -base.ctypes.data % PAGE + lead
    return base[begin : begin + nbytes]


def aligned(file: int, offset: int, nbytes: int) -> Range:
    return Range(file, offset, memory_at(0, nbytes))


def ragged(file: int, offset: int, nbytes: int) -> Range:
    return Range(file, offset, memory_at(24, nbytes))


class Paths:
    """Two files that stay open, for writing and for reading."""

    def __init__(self, disk: Disk, *, direct: bool = True) -> None:
        self.names = ["one", "two"]
        self.writers = [
            disk.fs.open_write(disk.path(name), FILE_BYTES, False) for name in self.names
        ]
        self.readers = [open_for_reading(disk, name, direct=direct) for name in self.names]

    def write(self, engine: _core.Engine, ranges: Sequence[Range], **more: Any) -> _core.RangesJob:
        return start(engine, self.writers, ranges, write=True, **more)

    def read(
        self, engine: _core.Engine, ranges: Sequence[Range], sums: bytes, **more: Any
    ) -> _core.RangesJob:
        return start(engine, self.readers, ranges, write=False, sums=sums, **more)

    def close(self) -> None:
        for file in self.writers + self.readers:
            file.close()


def open_for_reading(disk: Disk, name: str, *, direct: bool) -> _core.File:
    try:
        return disk.fs.open_read(disk.path(name), direct=direct)
    except StorageError as error:
        if error.errno != errno.EINVAL:  # a file system that knows no O_DIRECT
            raise
        return disk.fs.open_read(disk.path(name))


def start(
    engine: _core.Engine,
    files: Sequence[_core.File],
    ranges: Sequence[Range],
    *,
    write: bool,
    **more: Any,
) -> _core.RangesJob:
    return engine.ranges(
        write=write,
        files=files,
        file_index=array("Q", [r.file for r in ranges]),
        offsets=array("Q", [r.offset for r in ranges]),
        sizes=array("Q", [r.memory.nbytes for r in ranges]),
        addresses=array("Q", [r.memory.ctypes.data for r in ranges]),
        **{"owner": [r.memory for r in ranges], **more},
    )


def write_all(engine: _core.Engine, paths: Paths, ranges: Sequence[Range]) -> bytes:
    job = paths.write(engine, ranges)
    must(job.wait(DEADLINE_S))
    for file in paths.writers:
        file.sync()
    return job.checksums()


def some_ranges() -> list[Range]:
    """What offload does, and everything that is not a multiple of anything."""
    ranges = [
        aligned(0, 0, BUFFER),
        aligned(1, 3 * PAGE, 2 * BUFFER),  # across the grid of buffers
        aligned(0, BUFFER, 5 * PAGE),
        aligned(0, 2 * BUFFER, BUFFER + 100),  # a tail that is no page
        ragged(1, 4 * BUFFER, BUFFER),  # memory that is not aligned
        ragged(0, 5 * BUFFER, 3),
        aligned(1, 7 * BUFFER, 0),
    ]
    return [each.filled_with(i) for i, each in enumerate(ranges)]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through the page cache"])
def test_what_is_written_is_read(disk: Disk, engine: _core.Engine, direct: bool) -> None:
    paths = Paths(disk, direct=direct)
    ranges = some_ranges()
    sums = write_all(engine, paths, ranges)
    assert list(array("Q", sums)) == [_core.xxh3_64(r.memory.tobytes()) for r in ranges]
    back = [each.like() for each in ranges]
    must(paths.read(engine, back, sums).wait(DEADLINE_S))
    for wrote, read in zip(ranges, back, strict=True):
        assert (wrote.memory == read.memory).all()


def test_reads_begin_and_end_anywhere(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    whole = aligned(0, 0, 3 * BUFFER).filled_with(1)
    write_all(engine, paths, [whole])
    wanted = [
        ragged(0, offset, nbytes)
        for offset in (0, 1, PAGE, BUFFER - 1, BUFFER)
        for nbytes in (1, PAGE - 1, PAGE, BUFFER + 7)
    ]
    cuts = [whole.memory[r.offset : r.offset + r.memory.nbytes] for r in wanted]
    sums = array("Q", [_core.xxh3_64(cut.tobytes()) for cut in cuts]).tobytes()
    must(paths.read(engine, wanted, sums).wait(DEADLINE_S))
    for read, cut in zip(wanted, cuts, strict=True):
        assert (read.memory == cut).all()


def test_a_write_changes_nothing_but_its_pages(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    before = aligned(0, 0, 4 * PAGE).filled_with(1)
    write_all(engine, paths, [before])
    middle = aligned(0, PAGE, PAGE + 10).filled_with(2)
    write_all(engine, paths, [middle])
    data = disk.fs.read_file(disk.path("one"), FILE_BYTES)
    assert data[:PAGE] == before.memory[:PAGE].tobytes()
    assert data[PAGE : 2 * PAGE + 10] == middle.memory.tobytes()
    if paths.writers[0].direct:
        assert data[2 * PAGE + 10 : 3 * PAGE] == bytes(PAGE - 10)
    assert data[3 * PAGE : 4 * PAGE] == before.memory[3 * PAGE :].tobytes()


def test_aligned_ranges_are_not_copied(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    ranges = [aligned(0, 0, BUFFER), aligned(1, BUFFER, 3 * PAGE)]
    job = paths.write(engine, ranges)
    assert job.stats == {"bytes": BUFFER + 3 * PAGE, "copied_bytes": 0}
    must(job.wait(DEADLINE_S))
    job = paths.write(engine, [ragged(0, 0, BUFFER), aligned(1, BUFFER, 3 * PAGE)])
    assert job.stats["copied_bytes"] == (BUFFER if paths.writers[0].direct else 0)
    must(job.wait(DEADLINE_S))


def test_ranges_side_by_side_are_moved_together(tmp_path: Path) -> None:
    """A transfer that fails names all of them. Each still has a checksum of its own."""
    fs = SimFs(seed=1)
    fs.mkdir("run")
    engine = _core.Engine(fs, 3 * BUFFER, BUFFER)
    paths = Paths(Disk(fs, "run"))
    memory = memory_at(0, 4 * BUFFER)
    memory[:] = np.arange(4 * BUFFER, dtype=np.uint64).astype(np.uint8)
    cuts = [0, BUFFER // 2, BUFFER, 2 * BUFFER, 3 * BUFFER + PAGE, 4 * BUFFER]
    ranges = [Range(0, a, memory[a:b]) for a, b in itertools.pairwise(cuts)]
    fs.fail_next("write", errno.EIO, 1, 0)
    with pytest.raises(StorageError, match=r"range (0 to 2|3 to 4)"):  # whichever is first
        paths.write(engine, ranges, transfer_bytes=2 * BUFFER).wait(DEADLINE_S)
    must(fs.fired["injected write"] == 1)
    job = paths.write(engine, ranges, transfer_bytes=2 * BUFFER)
    must(job.wait(DEADLINE_S))
    sums = job.checksums()
    assert list(array("Q", sums)) == [_core.xxh3_64(r.memory.tobytes()) for r in ranges]
    whole = memory_at(0, 4 * BUFFER)
    back = [Range(0, a, whole[a:b]) for a, b in itertools.pairwise(cuts)]
    must(paths.read(engine, back, sums, transfer_bytes=3 * BUFFER).wait(DEADLINE_S))
    assert (whole == memory).all()
    wrong = bytearray(sums)
    wrong[8 * 3] ^= 1
    with pytest.raises(_core.Mismatch) as caught:
        paths.read(engine, back, bytes(wrong), transfer_bytes=4 * BUFFER).wait(DEADLINE_S)
    assert caught.value.segment == 3
    engine.close()


def side_by_side(*sizes: int) -> list[Range]:
    """Ranges of one file, in memory of their own."""
    offsets = itertools.accumulate((-(-size // PAGE) * PAGE for size in sizes), initial=0)
    made = [aligned(0, offset, size) for offset, size in zip(offsets, sizes, strict=False)]
    return [each.filled_with(seed) for seed, each in enumerate(made)]


STAGED = {
    "small": (PAGE, 3 * PAGE) * 20,
    "as large as a buffer": (BUFFER, PAGE, BUFFER, BUFFER),
    "larger than a buffer": (PAGE, 2 * BUFFER, PAGE, 2 * BUFFER, PAGE),
    "with tails and gaps": (PAGE, 100, PAGE + 1, 0, BUFFER - 1, 5),
}


@pytest.mark.parametrize("kind", STAGED)
def test_staged_ranges_pass_through_buffers(disk: Disk, engine: _core.Engine, kind: str) -> None:
    paths, ranges = Paths(disk), side_by_side(*STAGED[kind])
    job = paths.write(engine, ranges, staged=True)
    if paths.writers[0].direct:
        assert job.stats["copied_bytes"] == job.stats["bytes"]
    must(job.wait(DEADLINE_S))
    sums = job.checksums()
    assert list(array("Q", sums)) == [_core.xxh3_64(r.memory.tobytes()) for r in ranges]
    back = [each.like() for each in ranges]
    must(paths.read(engine, back, sums, staged=True).wait(DEADLINE_S))
    mixed = [ragged(0, each.offset, each.memory.nbytes) for each in ranges]
    must(paths.read(engine, mixed, sums, staged=True).wait(DEADLINE_S))
    for wrote, read, other in zip(ranges, back, mixed, strict=True):
        assert (wrote.memory == read.memory).all()
        assert (wrote.memory == other.memory).all()


def test_staged_ranges_share_a_buffer(tmp_path: Path) -> None:
    """A transfer that fails names all of them."""
    fs = SimFs(seed=1)
    fs.mkdir("run")
    engine = _core.Engine(fs, 3 * BUFFER, BUFFER)
    paths, ranges = Paths(Disk(fs, "run")), side_by_side(*(BUFFER // 4,) * 6)
    sums = write_all(engine, paths, ranges)
    for kind, move in (("write", paths.write), ("read", paths.read)):
        fs.fail_next(kind, errno.EIO, 1, 0)
        more = {"sums": sums} if kind == "read" else {}
        with pytest.raises(StorageError, match=r"range (0 to 3|4 to 5)"):  # whichever is first
            move(engine, ranges, staged=True, **more).wait(DEADLINE_S)
    engine.close()


def test_a_flipped_bit_of_a_staged_range_names_it(disk: Disk, engine: _core.Engine) -> None:
    paths, ranges = Paths(disk), side_by_side(*(BUFFER // 4,) * 6)
    sums = write_all(engine, paths, ranges)
    corrupt(disk, "one", BUFFER + 17, cold=True)
    with pytest.raises(_core.Mismatch) as caught:
        paths.read(engine, [each.like() for each in ranges], sums, staged=True).wait(DEADLINE_S)
    assert (caught.value.path, caught.value.segment) == (disk.path("one"), 4)


def test_each_range_is_told_once_when_it_is_done(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    ranges = some_ranges()
    job = paths.write(engine, ranges)
    told: list[int] = []
    while done := job.next_done(DEADLINE_S):
        told += done
    assert sorted(told) == list(range(len(ranges)))
    assert job.unreturned == 0
    must(job.wait(0))
    assert job.next_done(0) == []


def test_a_range_is_right_when_it_is_told(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    ranges = some_ranges()
    sums = write_all(engine, paths, ranges)
    back = [each.like() for each in ranges]
    job = paths.read(engine, back, sums)
    while done := job.next_done(DEADLINE_S):
        for index in done:
            assert (back[index].memory == ranges[index].memory).all()
    must(job.unreturned == 0)


@pytest.mark.parametrize("shape", [aligned, ragged])
def test_a_flipped_bit_names_file_and_range(disk: Disk, engine: _core.Engine, shape: Any) -> None:
    paths = Paths(disk)
    ranges = [shape(1, i * BUFFER, BUFFER).filled_with(i) for i in range(3)]
    sums = write_all(engine, paths, ranges)
    corrupt(disk, "two", BUFFER + 17, cold=True)
    with pytest.raises(_core.Mismatch) as caught:
        paths.read(engine, [r.like() for r in ranges], sums).wait(DEADLINE_S)
    error = caught.value
    assert (error.path, error.segment) == (disk.path("two"), 1)
    assert (error.begin, error.end) == (BUFFER, 2 * BUFFER)
    assert error.expected == array("Q", sums)[1]


def test_a_file_that_ends_too_early_is_named(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    there = aligned(0, 0, PAGE).filled_with(1)
    sums = write_all(engine, paths, [there]) + bytes(8)
    beyond = aligned(1, FILE_BYTES, PAGE)
    with pytest.raises(TruncatedFileError, match="two") as caught:
        paths.read(engine, [there, beyond], sums).wait(DEADLINE_S)
    assert "range 1" in str(caught.value)


def test_a_transfer_that_fails_names_file_and_range(tmp_path: Path) -> None:
    fs = SimFs(seed=1)
    fs.mkdir("run")
    engine = _core.Engine(fs, 3 * BUFFER, BUFFER)
    paths = Paths(Disk(fs, "run"))
    fs.fail_next("write", errno.EIO, 1, 0)
    with pytest.raises(StorageError, match=r"run/one") as caught:
        paths.write(engine, [aligned(0, 0, PAGE).filled_with(1)]).wait(DEADLINE_S)
    assert caught.value.errno == errno.EIO
    assert "range 0" in str(caught.value)
    # The engine and the files go on.
    write_all(engine, paths, [aligned(0, 0, PAGE).filled_with(1)])
    engine.close()


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([aligned(2, 0, PAGE)], "range 0: there is no such file"),
        ([aligned(0, 0, PAGE)] * 2, "range 1: it overlaps range 0"),
        ([aligned(0, 0, PAGE + 1), aligned(0, PAGE, PAGE)], "range 1: it overlaps range 0"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    disk: Disk, engine: _core.Engine, ranges: list[Range], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Paths(disk).write(engine, ranges)


def test_one_file_given_twice_is_one_file(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    paths.writers[1] = paths.writers[0]
    with pytest.raises(ValueError, match="range 1: it overlaps range 0"):
        paths.write(engine, [aligned(0, 0, PAGE), aligned(1, 0, PAGE)])


def test_two_ranges_are_not_read_into_one_place(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    memory = memory_at(0, 2 * PAGE)
    ranges = [Range(0, 0, memory[: PAGE + 1]), Range(1, 0, memory[PAGE:])]
    with pytest.raises(ValueError, match="range 1: it overlaps range 0"):
        paths.read(engine, ranges, bytes(16))


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_written_unverified_is_written_and_not_hashed(
    disk: Disk, engine: _core.Engine, staged: bool
) -> None:
    paths = Paths(disk)
    ranges = [each.filled_with(1) for each in some_ranges()]
    sums = write_all(engine, paths, ranges)
    again = [each.filled_with(2) for each in some_ranges()]
    job = paths.write(engine, [*again, aligned(0, 0, 0)], verified=False, staged=staged)
    must(job.wait(DEADLINE_S))
    hashed = zip(again, array("Q", job.checksums()), strict=False)
    assert not any(checksum for each, checksum in hashed if each.memory.nbytes)
    assert sorted(job.next_done(0)) == list(range(len(again) + 1))
    with pytest.raises(_core.Mismatch):
        must(paths.read(engine, some_ranges(), sums).wait(DEADLINE_S))
    found = some_ranges()
    must(paths.read(engine, found, b"", verified=False).wait(DEADLINE_S))
    assert all(bytes(a.memory) == bytes(b.memory) for a, b in zip(found, again, strict=True))
    paths.close()


def test_an_empty_range_overlaps_nothing(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    write_all(engine, paths, [aligned(0, 0, 2 * PAGE), aligned(0, PAGE, 0)])


def test_checksums_are_there_when_the_job_is_done(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    engine.set_limit(0, None, 1)
    write_all(engine, paths, [aligned(0, 0, PAGE)])
    job = paths.write(engine, [aligned(0, 0, PAGE)])
    with pytest.raises(ValueError, match=r"after wait\(\)"):
        job.checksums()
    job.cancel()


def test_a_raised_limit_wakes_what_waits(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    engine.set_limit(0, None, 1)
    write_all(engine, paths, [aligned(0, 0, PAGE)])
    held = paths.write(engine, [aligned(0, 0, BUFFER)])
    must(not held.wait(0))
    engine.set_limit(0, None, 1 << 30)
    must(held.wait(DEADLINE_S))


def test_times_that_no_clock_can_hold_are_for_ever(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    for timeout_s in (float("nan"), float("inf"), 1e300):
        must(paths.write(engine, [aligned(0, 0, PAGE)]).wait(timeout_s))
    must(paths.write(engine, []).wait(-1e300))


def test_a_job_without_ranges_lets_go_of_its_files(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    job = paths.write(engine, [])
    must(job.wait(DEADLINE_S))
    for file in paths.writers:
        must(file.close_alone(DEADLINE_S))


def test_direct_writes_begin_on_a_page(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    if not paths.writers[0].direct:
        pytest.skip("this file system knows no O_DIRECT")
    with pytest.raises(ValueError, match=r"range 0: .*multiple of 4096"):
        paths.write(engine, [aligned(0, 100, PAGE)])


def test_a_cancelled_job_touches_nothing_any_more(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    ranges = [aligned(0, 0, 4 * BUFFER), ragged(1, 0, 4 * BUFFER)]
    sums = write_all(engine, paths, [r.filled_with(1) for r in ranges])
    back = [r.like() for r in ranges]
    for _ in range(20):
        for each in back:
            each.memory[:] = 0
        job = paths.read(engine, back, sums)
        job.cancel()
        # From here on the memory is ours: nothing may store into it.
        for each in back:
            each.memory[:] = 0x55
        assert all((each.memory == 0x55).all() for each in back)
        with contextlib.suppress(ClosedError):  # unless it was done by then
            job.wait(DEADLINE_S)
    for each in back:
        assert (each.memory == 0x55).all()
    must(paths.read(engine, back, sums).wait(DEADLINE_S))


def test_a_cancelled_job_leaves_the_queue_of_the_disk(disk: Disk, engine: _core.Engine) -> None:
    """Its transfers wait for a limit that lets nothing through for years."""
    paths = Paths(disk)
    engine.set_limit(0, 0, 1)
    first = paths.write(engine, [aligned(0, 0, PAGE).filled_with(1)])
    must(first.wait(DEADLINE_S))  # what comes first is not held back
    job = paths.write(engine, [aligned(0, 0, BUFFER), ragged(1, 0, BUFFER)])
    must(not job.wait(0))
    job.cancel()
    engine.set_limit(0, 0, 0)
    must(paths.write(engine, [aligned(0, 0, BUFFER)]).wait(DEADLINE_S))
    assert engine.client_stats(0)["buffers"] == 0


def test_a_limit_holds_back_its_path_only(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    engine.set_limit(7, None, 1)
    must(paths.write(engine, [aligned(0, 0, PAGE)], paths=[7, 8]).wait(DEADLINE_S))
    held = paths.write(engine, [aligned(0, 0, PAGE)], paths=[7, 8])
    other = paths.write(engine, [aligned(1, 0, BUFFER)], paths=[7, 8])
    must(other.wait(DEADLINE_S))
    must(not held.wait(0))
    engine.set_limit(7, None, 0)
    must(held.wait(DEADLINE_S))


def test_a_job_keeps_its_owner_until_it_is_done(disk: Disk, engine: _core.Engine) -> None:
    class Owner:
        pass

    paths = Paths(disk)
    for end in ("waits", "cancels", "is dropped"):
        ranges = [aligned(0, 0, BUFFER).filled_with(1)]
        owner = Owner()
        alive = weakref.ref(owner)
        job = paths.write(engine, ranges, owner=owner)
        del owner
        assert alive() is not None
        if end == "waits":
            must(job.wait(DEADLINE_S))
        elif end == "cancels":
            job.cancel()
        else:
            del job
        gc.collect()
        assert alive() is None


def test_nothing_to_move(disk: Disk, engine: _core.Engine) -> None:
    job = Paths(disk).write(engine, [])
    must(job.wait(DEADLINE_S))
    assert job.next_done(0) == []
    assert job.checksums() == b""


@pytest.mark.parametrize("sizes", [(PAGE, 0, PAGE), (0, PAGE, 0, 0, PAGE, 0), (0,)])
def test_empty_ranges_between_others(
    disk: Disk, engine: _core.Engine, sizes: tuple[int, ...]
) -> None:
    paths = Paths(disk)
    memory = memory_at(0, 2 * PAGE)
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    pairs = list(zip(begins, sizes, strict=True))
    for _ in range(2):  # the engine goes on
        sums = write_all(engine, paths, [Range(0, at, memory[at : at + n]) for at, n in pairs])
    whole = memory_at(0, 2 * PAGE)
    back = [Range(0, at, whole[at : at + n]) for at, n in pairs]
    must(paths.read(engine, back, sums).wait(DEADLINE_S))
    assert (whole[: sum(sizes)] == memory[: sum(sizes)]).all()


def test_many_small_ranges(disk: Disk, engine: _core.Engine) -> None:
    paths = Paths(disk)
    slots = itertools.product(range(2), range(0, 200 * PAGE, PAGE))
    ranges = [ragged(f, at, 1 + at // 7 % 4000) for f, at in slots]
    for i, each in enumerate(ranges):
        each.filled_with(i)
    sums = write_all(engine, paths, ranges)
    back = [each.like() for each in ranges]
    must(paths.read(engine, back, sums).wait(DEADLINE_S))
    assert all((a.memory == b.memory).all() for a, b in zip(ranges, back, strict=True))
