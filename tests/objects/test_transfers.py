"""Files up and down: parts, throttles, blocks that fail, memory that is used again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from statehold.errors import InvariantError, MissingFileError, StorageError, TruncatedFileError
from statehold.io.objects.client import IN_FLIGHT_BYTES, PARTS_MAX, PIECE_BYTES, parts_of
from statehold.steps.objects import ObjectSteps, directory_name
from statehold.units import GiB, MiB, TiB
from support import s3
from support.faults import DEADLINE_S, must

ATTEMPT, NAME = "5f3a09c1-7", "rank-00000-of-00001.safetensors"
PART = 5 * MiB
CONTENT = random.Random(1).randbytes(2 * PART + 3)


def blocks_of(data: bytes, block_bytes: int) -> Iterator[memoryview]:
    """`data` through one buffer that is used again for every block."""
    buffer = bytearray(block_bytes)
    for begin in range(0, len(data), block_bytes):
        block = data[begin : begin + block_bytes]
        buffer[: len(block)] = block
        yield memoryview(buffer)[: len(block)]


def publish(steps: ObjectSteps, data: bytes, block_bytes: int = 3 * MiB) -> None:
    steps.upload(1, ATTEMPT, NAME, len(data), blocks_of(data, block_bytes))
    steps.publish(1, ATTEMPT, b"manifest")


def test_read_only_blocks_are_sent_from_where_they_are(steps: ObjectSteps) -> None:
    blocks = [memoryview(CONTENT)[:PART], memoryview(b""), memoryview(CONTENT)[PART:]]
    steps.upload(1, ATTEMPT, NAME, len(CONTENT), blocks)
    steps.publish(1, ATTEMPT, b"manifest")
    memory = bytearray(len(CONTENT))
    steps.fetch(1, NAME, [(0, memoryview(memory))])
    assert memory == CONTENT


def objects_of(steps: ObjectSteps) -> list[str]:
    return steps.client.list(directory_name(1, ATTEMPT))[0]


@pytest.mark.thorough
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 3])
def test_a_file_comes_back_as_it_was(steps: ObjectSteps, size: int) -> None:
    publish(steps, CONTENT[:size])
    assert steps.size(1, NAME) == size
    memory = bytearray(size)
    steps.fetch(1, NAME, [(0, memoryview(memory))])
    assert memory == CONTENT[:size]


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (7, 8), (PART - 1, PART + 1), (3, 2 * PART)])
def test_any_range_goes_into_the_memory_given(steps: ObjectSteps, begin: int, end: int) -> None:
    publish(steps, CONTENT)
    memory = bytearray(end - begin + 2)
    steps.fetch(1, NAME, [(begin, memoryview(memory)[1:-1])])
    assert memory == b"\0" + CONTENT[begin:end] + b"\0"


@pytest.mark.thorough
@pytest.mark.parametrize("begin", [1, PART, 2 * PART + 3, 2 * PART + 4, 10 * PART])
def test_a_range_past_the_end_is_an_error(steps: ObjectSteps, begin: int) -> None:
    publish(steps, CONTENT)
    with pytest.raises(TruncatedFileError):
        steps.fetch(1, NAME, [(begin, memoryview(bytearray(len(CONTENT))))])


def test_a_file_that_is_not_there(steps: ObjectSteps) -> None:
    publish(steps, b"")
    for size in (10, 2 * PART):
        with pytest.raises(MissingFileError):
            steps.fetch(1, "rank-00001-of-00002.safetensors", [(0, memoryview(bytearray(size)))])


def test_the_throttle_is_asked_before_every_piece(steps: ObjectSteps) -> None:
    asked: list[int] = []
    steps.upload(1, ATTEMPT, NAME, len(CONTENT), [memoryview(CONTENT)], asked.append)
    assert sum(asked) == len(CONTENT)
    assert max(asked) == PIECE_BYTES


class Broken(Exception):
    """What the maker of blocks, or the throttle, raises."""


@pytest.mark.parametrize("size", [100, 2 * PART + 3])
def test_blocks_that_fail_leave_nothing(steps: ObjectSteps, size: int) -> None:
    def blocks() -> Iterator[memoryview]:
        yield memoryview(CONTENT)[: size - 1]
        raise Broken

    with pytest.raises(Broken):
        steps.upload(1, ATTEMPT, NAME, size, blocks())
    assert not steps.has(1, ATTEMPT, NAME, size)
    assert objects_of(steps) == []


def test_a_throttle_that_fails_ends_the_upload(steps: ObjectSteps) -> None:
    def before(_: int) -> None:
        raise Broken

    with pytest.raises(Broken):
        steps.upload(1, ATTEMPT, NAME, len(CONTENT), [memoryview(CONTENT)], before)
    assert objects_of(steps) == []


@pytest.mark.parametrize("said", [len(CONTENT) - 1, len(CONTENT) + 1, 0, 50])
def test_more_or_fewer_bytes_than_said_leave_nothing(steps: ObjectSteps, said: int) -> None:
    with pytest.raises(InvariantError):
        steps.upload(1, ATTEMPT, NAME, said, blocks_of(CONTENT, 3 * MiB))
    assert objects_of(steps) == []


@pytest.mark.parametrize("size", [1, 100 * MiB, 70 * GiB, 1 * TiB, 5 * TiB])
def test_parts_of_any_file_are_few_enough(size: int) -> None:
    part_bytes, in_flight = parts_of(size, 8 * MiB)
    assert part_bytes * PARTS_MAX >= size
    assert part_bytes >= 8 * MiB
    assert in_flight == 2 or in_flight * part_bytes <= IN_FLIGHT_BYTES


def test_no_parts_are_left_behind_where_blocks_fail(
    s3_port: int, s3_environment: None, s3_url: str
) -> None:
    steps = ObjectSteps(
        s3_url, options={"endpoint": f"http://127.0.0.1:{s3_port}"}, part_bytes=PART
    )
    seen: list[bytes] = []

    def blocks() -> Iterator[memoryview]:
        yield memoryview(CONTENT)
        seen.append(s3.request(s3_port, "GET", "/bucket?uploads"))
        raise Broken

    with pytest.raises(Broken):
        steps.upload(1, ATTEMPT, NAME, 3 * PART, blocks())
    assert b"<UploadId>" in seen[0]
    assert b"<UploadId>" not in s3.request(s3_port, "GET", "/bucket?uploads")


def test_memory_is_bounded_while_the_store_stalls(proxy: s3.Proxy, s3_url: str) -> None:
    """The parts under way fill up, and then no further block is asked for."""
    endpoint = f"http://127.0.0.1:{proxy.port}"
    steps = ObjectSteps(s3_url, options={"endpoint": endpoint}, part_bytes=PART, deadline_s=4)
    most = IN_FLIGHT_BYTES + 2 * PART
    taken: list[int] = []
    proxy.fault = lambda method, target: "stall" if "partNumber" in target else None
    block = memoryview(bytes(MiB))
    with pytest.raises(StorageError):
        steps.upload(
            1, ATTEMPT, NAME, 4 * most, (block for _ in range(4 * most // MiB)), taken.append
        )
    assert proxy.fired["stall"] > 1
    assert IN_FLIGHT_BYTES / 2 < sum(taken) < most


def test_many_threads_share_one_store(steps: ObjectSteps) -> None:
    publish(steps, CONTENT)
    wrong: list[int] = []

    def read(begin: int) -> None:
        memory = bytearray(PART + 10)
        steps.fetch(1, NAME, [(begin, memoryview(memory))])
        if memory != CONTENT[begin : begin + len(memory)]:
            wrong.append(begin)

    threads = [threading.Thread(target=read, args=(begin,)) for begin in range(0, 40, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        must(not thread.is_alive())
    assert wrong == []
