"""Reading a box of a saved chunk, reading what other processes read too, and where to begin."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from statehold import _core
from support.disks import (
    BLOCK,
    BUFFER,
    DEADLINE_S,
    EXTERNAL,
    SHARED,
    Disk,
    State,
    corrupt,
    piece_count,
    random_arrays,
    save,
)
from support.faults import must
from support.in_memory import SimFs

Array = np.ndarray[Any, Any]
DTYPES = [np.uint8, np.int16, np.float32, np.float64, np.complex128, np.dtype("V3")]


def segment_arguments(
    disk: Disk, state: State, sums: bytes, begin: int, end: int
) -> dict[str, Any]:
    """Arguments that read the file's range [begin, end), whose ends cut no piece, as one segment
    without a destination."""
    first = piece_count(0, len(state.header)) + begin // BLOCK - state.begins[0] // BLOCK
    count = piece_count(begin, end - begin)
    return {
        "files": [disk.path("f")],
        "file_bytes": [state.file_bytes],
        "block_bytes": BLOCK,
        "file_index": array("q", [0]),
        "begins": array("q", [begin]),
        "sizes": array("q", [end - begin]),
        "addresses": array("Q", [0]),
        "flags": bytes(1),
        "strided": {},
        "sums": sums[8 * first : 8 * (first + count)],
        "owner": None,
    }


def strides_of(target: Array) -> tuple[int, ...]:
    return tuple(s // target.itemsize for s in target.strides)


def read_box(
    engine: _core.Engine,
    arguments: dict[str, Any],
    chunk: Array,
    low: Any,
    target: Array,
    skip: int,
) -> _core.ReadJob:
    box = (chunk.itemsize, chunk.shape, low, target.shape, strides_of(target), skip)
    addresses = array("Q", [target.__array_interface__["data"][0]])
    changes = {"addresses": addresses, "boxes": {0: box}, "owner": target}
    return engine.read(**{**arguments, **changes})


def random_chunk(rng: random.Random) -> Array:
    """A few pieces of bytes, in up to four dimensions."""
    dtype = np.dtype(rng.choice(DTYPES))
    shape = [rng.choice([1, 2, 3, 5, 16, 40]) for _ in range(rng.randrange(4))]
    rest = rng.randrange(1, 400_000) // (dtype.itemsize * int(np.prod(shape, dtype=int))) + 1
    shape.insert(rng.randrange(len(shape) + 1), rest)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return np.frombuffer(rng.randbytes(count), dtype).reshape(shape).copy()


def random_box(rng: random.Random, shape: tuple[int, ...]) -> tuple[slice, ...]:
    def cut(extent: int) -> slice:
        low = rng.choice([0, rng.randrange(extent)])
        return slice(low, rng.choice([extent, rng.randint(low, extent)]))

    return tuple(cut(extent) for extent in shape)


def random_target(rng: random.Random, shape: tuple[int, ...], dtype: Any) -> Array:
    """Permuted, and with gaps between its elements; all bytes are 0xAB."""
    order = rng.sample(range(len(shape)), len(shape))
    gaps = [rng.choice([1, 1, 2, 3]) for _ in shape]
    base = np.full([max(shape[d], 1) * gaps[d] for d in order], 0).astype(dtype)
    base.view(np.uint8)[...] = 0xAB
    target = base.transpose(np.argsort(order))
    return target[tuple(slice(0, n * g, g) for n, g in zip(shape, gaps, strict=True))]


def random_range(rng: random.Random, begin: int, size: int) -> tuple[int, int]:
    """Ends of pieces of the segment [begin, begin + size)."""
    grid = [begin, *range((begin // BLOCK + 1) * BLOCK, begin + size, BLOCK), begin + size]
    low = rng.randrange(len(grid) // 2)
    return grid[low], rng.choice(grid[low + 1 :])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_a_box_of_a_chunk(disk: Disk, engine: _core.Engine, seed: int) -> None:
    rng = random.Random(seed)
    chunk = random_chunk(rng)
    state = State([chunk], header=rng.randbytes(rng.choice([0, 100, 4096, 70_001])))
    sums = save(engine, disk, "f", state)
    begin, end = random_range(rng, state.begins[0], chunk.nbytes)
    skip = begin - state.begins[0]
    box = random_box(rng, chunk.shape)
    target = random_target(rng, chunk[box].shape, chunk.dtype)
    outside = target.base if target.base is not None else target

    expected = np.zeros_like(chunk)  # what the target says, then what is read, of the whole chunk
    expected[box] = target
    image = expected.reshape(-1).view(np.uint8)
    read = slice(skip, skip + end - begin)
    image[read] = chunk.reshape(-1).view(np.uint8)[read]
    whole = outside.copy(order="K")
    assert whole.strides == outside.strides
    np.ndarray(target.shape, target.dtype, whole.data, 0, target.strides)[...] = expected[box]

    arguments = segment_arguments(disk, state, sums, begin, end)
    arguments["flags"] = bytes([rng.choice([0, SHARED])])
    job = read_box(engine, arguments, chunk, tuple(s.start for s in box), target, skip)
    must(job.wait(DEADLINE_S))
    assert outside.tobytes() == whole.tobytes()


def matrix() -> tuple[Array, State]:
    chunk = np.random.default_rng(1).random((400, 300))
    return chunk, State([chunk])


@pytest.mark.parametrize("flags", [0, SHARED])
@pytest.mark.parametrize("cold", [True, False])
def test_what_is_not_placed_is_verified_too(
    disk: Disk, engine: _core.Engine, flags: int, cold: bool
) -> None:
    chunk, state = matrix()
    sums = save(engine, disk, "f", state)
    corrupt(disk, "f", state.begins[0] + chunk[200:].nbytes + 8 * 299, cold)
    target = np.zeros((400, 2))
    arguments = segment_arguments(disk, state, sums, state.begins[0], state.file_bytes)
    arguments["flags"] = bytes([flags])
    job = read_box(engine, arguments, chunk, (0, 0), target, 0)
    with pytest.raises(_core.Mismatch):
        job.wait(DEADLINE_S)


def test_a_box_without_a_destination_is_only_verified(disk: Disk, engine: _core.Engine) -> None:
    chunk, state = matrix()
    sums = save(engine, disk, "f", state)
    arguments = segment_arguments(disk, state, sums, state.begins[0], state.file_bytes)
    job = engine.read(**arguments, boxes={0: (8, (400, 300), (0, 0), (400, 2), (2, 1), 0)})
    must(job.wait(DEADLINE_S))
    assert job.stats["bytes"] == chunk.nbytes


@pytest.mark.parametrize(
    "box",
    [
        (8, (400, 300), (1, 0), (400, 2), (2, 1), 0),  # outside the chunk
        (8, (400, 300), (-1, 0), (1, 2), (2, 1), 0),
        (8, (400, 300), (0, 0), (-1, 2), (2, 1), 0),
        (8, (400, 299), (0, 0), (400, 2), (2, 1), 0),  # a smaller chunk than the segment
        (8, (400, 300), (0, 0), (400, 2), (2, 1), 1),  # the segment ends behind the chunk
        (8, (400, 300), (0, 0), (400, 2), (2, 1), 1 << 63),
        (8, (1 << 62, 1 << 62), (0, 0), (1, 2), (2, 1), 0),
        (8, (400, 300), (0,), (400, 2), (2, 1), 0),  # different numbers of dimensions
        (8, (400, 300), (0, 0), (400, 2), (2,), 0),
        (0, (400, 300), (0, 0), (400, 2), (2, 1), 0),
    ],
)
def test_impossible_boxes_are_refused(disk: Disk, engine: _core.Engine, box: Any) -> None:
    _, state = matrix()
    sums = save(engine, disk, "f", state)
    arguments = segment_arguments(disk, state, sums, state.begins[0], state.file_bytes)
    good = (8, (400, 300), (0, 0), (400, 2), (2, 1), 0)
    for boxes in ({0: box}, {1: good}):
        with pytest.raises(ValueError):
            engine.read(**arguments, boxes=boxes)
    for change in ({"flags": bytes([EXTERNAL])}, {"strided": {0: (8, (400, 300), (1, 400))}}):
        with pytest.raises(ValueError):
            engine.read(**{**arguments, **change}, boxes={0: good})


# What is shared, and what is counted.


def test_a_shared_read_goes_through_the_page_cache(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(3, 900_000, 5, 2_000_000))
    sums = save(engine, disk, "f", state)
    others = [_core.Engine(disk.fs, 3 * BUFFER, BUFFER) for _ in range(3)]
    backs = [state.cleared() for _ in others]
    jobs = [
        back.read(other, disk.path("f"), sums, flags=bytes([SHARED] * 3), first_segment=i)
        for i, (other, back) in enumerate(zip(others, backs, strict=True))
    ]
    for job, back, other in zip(jobs, backs, others, strict=True):
        must(job.wait(DEADLINE_S))
        assert back.image == state.image
        assert job.stats == {"bytes": 2_900_005, "cached_bytes": 2_900_005, "direct_bytes": 0}
        other.close()


def test_shared_and_external_goes_through_a_buffer(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(3, 900_000))
    sums = save(engine, disk, "f", state)
    back = state.cleared()
    job = back.read(engine, disk.path("f"), sums, flags=bytes([SHARED | EXTERNAL]))
    target = memoryview(back.arrays[0])
    while (ready := job.next_ready(DEADLINE_S)) is not None:
        for _, offset, at, count in ready.pieces:
            target[offset : offset + count] = ready.view[at : at + count]
        job.release(ready)
    must(job.wait(DEADLINE_S))
    assert back.image == state.image
    assert job.stats["cached_bytes"] == 900_000


@pytest.mark.parametrize(("flags", "gap_bytes"), [(SHARED, 0), (EXTERNAL, 50_000)])
def test_gaps_count_where_they_are_read(
    disk: Disk, engine: _core.Engine, flags: int, gap_bytes: int
) -> None:
    sizes = [20_000, 50_000, 10_000]
    state = State(random_arrays(3, *sizes), header=b"h" * BLOCK)
    sums = save(engine, disk, "f", state)
    counts = [piece_count(b, n) for b, n in zip(state.begins, sizes, strict=True)]
    last = 8 * counts[-1]
    first = len(sums) - 8 * sum(counts)
    back = state.cleared()
    job = engine.read(
        files=[disk.path("f")],
        file_bytes=[state.file_bytes],
        block_bytes=BLOCK,
        file_index=array("q", [0, 0]),
        begins=array("q", [state.begins[0], state.begins[2]]),
        sizes=array("q", [sizes[0], sizes[2]]),
        addresses=array("Q", [back.arrays[0].ctypes.data, back.arrays[2].ctypes.data]),
        flags=bytes([flags] * 2),
        strided={},
        sums=sums[first : first + 8 * counts[0]] + sums[-last:],
        owner=back,
    )
    while (ready := job.next_ready(DEADLINE_S)) is not None:
        job.release(ready)
    must(job.wait(DEADLINE_S))
    stats = job.stats
    assert stats["bytes"] == 30_000
    assert stats["cached_bytes"] + stats["direct_bytes"] == 30_000 + gap_bytes


# Where to begin.


def order_of_segments(first_segment: int, sizes: list[int]) -> list[int]:
    """As one worker hands them out that reads all of them from the page cache."""
    disk = Disk(SimFs(seed=1, reorder=False), ".")
    state = State(random_arrays(3, *sizes), b"h" * BUFFER, dict.fromkeys(range(9), EXTERNAL))
    engine = _core.Engine(disk.fs, 2 * BUFFER, BUFFER, copy_threads=1)
    sums = save(engine, disk, "f", state)
    flags = bytes([SHARED | EXTERNAL] * len(sizes))
    job = state.read(engine, disk.path("f"), sums, flags=flags, first_segment=first_segment)
    order = []
    while (ready := job.next_ready(DEADLINE_S)) is not None:
        order += [segment for segment, *_ in ready.pieces]
        job.release(ready)
    engine.close()
    return order


@pytest.mark.parametrize(
    ("first_segment", "order"),
    [(0, [0, 2, 3, 3]), (1, [2, 3, 3, 0]), (2, [2, 3, 3, 0]), (3, [3, 3, 0, 2]), (4, [0, 2, 3, 3])],
)
def test_blocks_are_taken_cyclically(first_segment: int, order: list[int]) -> None:
    sizes = [BUFFER, 0, BUFFER, 2 * BUFFER, 0]
    assert order_of_segments(first_segment, sizes) == order


def test_an_impossible_start_is_refused(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(3, 1000))
    sums = save(engine, disk, "f", state)
    with pytest.raises(ValueError):
        state.read(engine, disk.path("f"), sums, first_segment=1)


@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_001])
def test_memory_is_hashed_like_bytes(size: int) -> None:
    (data,) = random_arrays(1, size + 1)
    assert _core.hash_memory(data.ctypes.data + 1, size) == _core.xxh3_64(data.tobytes()[1:])


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        ((EXTERNAL, EXTERNAL | SHARED, EXTERNAL), 1),  # 5 bytes go with their neighbours
        ((EXTERNAL, EXTERNAL, EXTERNAL | SHARED), 2),  # long ranges do not
    ],
)
def test_only_long_ranges_decide_what_is_shared(
    disk: Disk, engine: _core.Engine, flags: tuple[int, ...], blocks: int
) -> None:
    state = State(random_arrays(3, 200_000, 5, 200_000))
    sums = save(engine, disk, "f", state)
    large = _core.Engine(disk.fs, 4 << 20, 1 << 20)
    job = state.cleared().read(large, disk.path("f"), sums, flags=bytes(flags))
    assert job.ready_left == blocks
    job.cancel()
    large.close()
