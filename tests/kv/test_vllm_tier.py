"""The tier below vLLM's offloading, driven over a memoryview: right chunks, or a miss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statehold.errors import UsageError, WaitTimeout
from statehold.kv.opened import OpenStore
from statehold.kv.vllm.opening import PagesOptions
from statehold.kv.vllm.tier import Tier
from support.faults import must
from support.pages import PAGE, SLOT, key, page

CHUNKS = 16
A, B = "request a", "request b"


class ToldTier(Tier):
    """Its results have the fields of vLLM's JobResult."""

    Result = SimpleNamespace


class Driven:
    """A tier, and the memory of its manager."""

    def __init__(self, path: Path, deadline_s: float = 60.0) -> None:
        self.memory = bytearray(CHUNKS * PAGE)
        view = memoryview(self.memory).cast("B", shape=[CHUNKS, PAGE])
        self.tier = ToldTier()
        given = {
            "path": str(path),
            "capacity": "2MiB",
            "memory": 16 * SLOT,
            "deadline_s": deadline_s,
        }
        self.pages = PagesOptions.of(given).opened(PAGE, bytes(16))
        self.tier.begin(self.pages, view)
        self.jobs = 0

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.shutdown()

    def chunk(self, at: int) -> bytes:
        return bytes(self.memory[at * PAGE : (at + 1) * PAGE])

    def job(self, numbers: Sequence[int], chunks: Sequence[int], request: str = A) -> Any:
        self.jobs += 1
        return SimpleNamespace(
            job_id=self.jobs,
            keys=[key(n) for n in numbers],
            chunk_ids=list(chunks),
            req_context=SimpleNamespace(req_id=request),
        )

    def store(self, *numbers: int) -> Any:
        for at, number in enumerate(numbers):
            self.memory[at * PAGE : (at + 1) * PAGE] = page(number)
        self.tier.submit_store(self.job(numbers, range(len(numbers))))
        return self.over()

    def load(self, *numbers: int, request: str = A) -> Any:
        self.memory[:] = bytes(len(self.memory))
        self.tier.submit_load(self.job(numbers, range(len(numbers)), request))
        return self.over()

    def over(self) -> Any:
        assert self.tier.has_pending_work()
        found = list[Any]()
        while not found:
            found += self.tier.get_finished_jobs()
            os.sched_yield()  # to the threads of the store
        assert [each.job_id for each in found] == [self.jobs]
        assert not self.tier.has_pending_work()
        return found[0]

    def has(self, number: int, request: str = A) -> bool:
        return bool(self.tier.lookup(key(number), SimpleNamespace(req_id=request)))


def flip(path: Path, number: int) -> None:
    """A bit of the page, in the files."""
    (segment,) = [each for each in path.glob("segment-*") if page(number) in each.read_bytes()]
    raw = bytearray(segment.read_bytes())
    raw[raw.index(page(number)) + 7] ^= 4
    segment.write_bytes(raw)


def test_chunks_come_back_in_another_process_of_vllm(tmp_path: Path) -> None:
    with Driven(tmp_path) as tier:
        assert tier.store(*range(8)).success
        assert tier.has(3)
        assert not tier.has(9)
    with Driven(tmp_path) as tier:
        found = tier.load(*range(8))
        assert found.success
        assert found.successful_keys is None
        assert found.transfer_bytes == 8 * PAGE
        assert [tier.chunk(n) for n in range(8)] == [page(n) for n in range(8)]


def test_a_chunk_that_is_there_already_is_stored(tmp_path: Path) -> None:
    with Driven(tmp_path) as tier:
        assert tier.store(1, 2).success
        assert tier.store(1, 2, 3).success


def test_a_flipped_bit_is_a_miss_and_the_other_chunks_are_right(tmp_path: Path) -> None:
    with Driven(tmp_path) as tier:
        tier.store(*range(8))
    flip(tmp_path, 5)
    with Driven(tmp_path) as tier:
        must(tier.has(5))
        found = tier.load(*range(8))
        assert not found.success
        good = [n for n in range(8) if n != 5]
        assert found.successful_keys == tuple(key(n) for n in good)
        assert all(tier.chunk(n) == page(n) for n in good)
        assert not tier.has(5)
        tier.tier.on_request_finished(SimpleNamespace(req_id=A))
        assert not tier.has(5)
        assert tier.store(5).success
        assert tier.has(5)


def test_a_chunk_that_is_gone_fails_alone(tmp_path: Path) -> None:
    with Driven(tmp_path) as tier:
        tier.store(1)
        found = tier.load(1, 99)
        assert (found.success, found.successful_keys) == (False, (key(1),))
        found = tier.load(98)
        assert (found.success, found.successful_keys) == (False, None)


def test_a_reset_of_vllm_finds_no_chunk_of_before(tmp_path: Path) -> None:
    """vLLM's manager drains the jobs of a tier, and says nothing else. What comes then is found by
    this tier alone; the next engine has what was there before."""
    with Driven(tmp_path) as tier, Driven(tmp_path) as other:
        tier.store(1, 2)
        tier.tier.submit_store(tier.job([3], [0]))
        tier.tier.drain_jobs()
        assert tier.over().success  # the job was over, and vLLM still hears of it
        assert not any(map(tier.has, (1, 2, 3)))
        found = tier.load(1, 2)
        assert (found.success, found.successful_keys) == (False, None)
        assert tier.store(1, 4).success
        must(tier.has(4))
        assert not other.has(4)
        tier.tier.drain_jobs()
        assert not tier.has(4)
        assert other.has(1)
    with Driven(tmp_path) as tier:
        assert tier.load(1, 2, 3).success


def test_a_reset_that_the_store_has_no_place_for_is_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise WaitTimeout("no place")

    with Driven(tmp_path) as tier:
        tier.store(1)
        monkeypatch.setattr(OpenStore, "use", refuses)
        tier.tier.drain_jobs()
        assert not tier.has(1)
        assert "may not stay" in caplog.text


def test_a_shutdown_keeps_the_identity(tmp_path: Path) -> None:
    tier = Driven(tmp_path)
    tier.store(1)
    tier.tier.shutdown()
    assert tier.pages.identity == bytes(16)


class Stuck:
    def wait(self, timeout: float | None) -> bool:
        return False

    def cancel(self) -> None: ...


def test_a_storage_that_hangs_is_a_miss_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driven(tmp_path) as tier:
        tier.store(1)
    with Driven(tmp_path, deadline_s=0.1) as tier:
        with monkeypatch.context() as patched:
            patched.setattr(OpenStore, "job", lambda *_, **__: Stuck())
            assert not tier.load(1).success
        assert tier.chunk(0) == bytes(PAGE)
        assert not tier.has(1)  # this request computes it, and does not ask for ever
        assert tier.has(1, B)
        tier.tier.on_request_finished(SimpleNamespace(req_id=A))
        assert tier.has(1)


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="no such option"):
        PagesOptions.of({"path": "p", "capacty": 1})
    with pytest.raises(UsageError, match="need a directory"):
        PagesOptions.of({})
    with pytest.raises(UsageError, match="not an identity"):
        PagesOptions.of({"path": "p", "identity": "xyz"}).identity_of("m")
    with pytest.raises(UsageError, match="not known"):
        PagesOptions.of({"path": "p"}).identity_of("organization/model")
