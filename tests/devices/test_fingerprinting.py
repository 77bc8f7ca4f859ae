"""Fingerprints of device tensors: of the right bytes, in the right order, with little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from bench.gpu import order

import statehold
from statehold.errors import ClosedError
from statehold.tensors import captured
from statehold.tensors.captured import Tensors
from statehold.tensors.devices import Devices, fingerprinting
from statehold.tensors.devices.copying import DeviceCopies
from statehold.tensors.devices.jobs import JobSource
from statehold.tensors.kinds import capture
from support.cuda import Machine
from support.faults import DEADLINE_S
from support.in_memory import SimFs
from support.ranks import Ranks


class NoFills:
    """A job that writes nothing of a device."""

    fills_left = 0

    def next_fills(self, timeout: float | None, most: int) -> list[None]:
        return []

    def filled_all(self, fills: list[None]) -> None:
        raise AssertionError("nothing was lent")

    def wait_eager(self, timeout: float | None) -> bool:
        return True


class Cancelled(NoFills):
    """A job that was cancelled once the fingerprints were under way."""

    def next_fills(self, timeout: float | None, most: int) -> list[None]:
        raise ClosedError("cancelled")


def copies_of(tensors: dict[str, torch.Tensor], job: NoFills | None = None) -> DeviceCopies:
    found = capture({name: statehold.Gated(tensor) for name, tensor in tensors.items()})
    source = JobSource(job or NoFills(), Tensors())  # type: ignore[arg-type]
    copies = Devices().copies([source], found, found.tensors)
    assert copies is not None
    return copies


def fingerprint(tensor: torch.Tensor) -> int:
    copies = copies_of({"t": tensor})
    copies.run()
    return copies.fingerprints["t"]


def expected(content: bytes) -> int:
    """The definition, by NumPy."""
    words = np.frombuffer(content + bytes(-len(content) % 8), np.int64)
    odd = np.int64(0x9E3779B97F4A7C15 - (1 << 64))
    with np.errstate(over="ignore"):
        places = np.arange(len(words), dtype=np.int64)
        mixed = words + places * odd
        mixed = (mixed ^ (mixed >> 29)) * odd
        mixed = (mixed ^ (mixed >> 32)) * (2 * places + 1)
        return int(mixed.sum()) & ((1 << 64) - 1)


def test_the_value_is_as_it_was(machine: Machine) -> None:
    """That of the first version, written down: a job of many ranks may have several versions."""
    assert fingerprint(machine.put(torch.arange(100, dtype=torch.float32))) == 0xBD85A7CA6AD28D39
    assert expected(b"") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
@pytest.mark.parametrize("count", [0, 1, 7, 4096, 10_003])
def test_the_bytes_count_and_nothing_else(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    monkeypatch.setattr(fingerprinting, "WORDS", 500)
    tensor = torch.arange(count).remainder(251).to(dtype)
    content = bytes(tensor.view(torch.uint8).tolist()) if count else b""
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    for each in (tensor, strided):
        assert fingerprint(machine.put(each)) == expected(content)


def test_strided_tensors_are_read_in_the_order_of_their_elements(machine: Machine) -> None:
    tensor = torch.arange(2 * 3 * 5 * 7.0).reshape(2, 3, 5, 7)
    last = tensor.to(memory_format=torch.channels_last)
    assert not machine.put(last).is_contiguous()
    assert fingerprint(machine.put(last)) == fingerprint(machine.put(tensor))
    assert fingerprint(machine.put(tensor.flip(0))) != fingerprint(machine.put(tensor))


def test_one_bit_changes_it(machine: Machine) -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    seen = {fingerprint(machine.put(tensor))}
    for index in range(0, 1000, 37):
        changed = tensor.clone()
        changed[index] ^= 1 << (index % 31)
        seen.add(fingerprint(machine.put(changed)))
    assert len(seen) == 1 + len(range(0, 1000, 37))


def test_many_are_read_at_once_with_bounded_scratch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprinting, "WORDS", 1 << 10)
    tensors = {str(i): machine.put(torch.randn(1 << 16)) for i in range(4)}
    copies = copies_of(tensors)
    machine.reset_peak()
    before = machine.bytes_on()
    waits = len(machine.timeline.host_waits)
    copies.run()
    found = copies.fingerprints
    assert len(machine.timeline.host_waits) - waits == 1
    assert machine.peak_on() - before <= 5 * 8 << 10
    for name, tensor in tensors.items():
        assert found[name] == expected(machine.read(tensor).numpy().tobytes())


def test_torch_waits_for_nothing_when_they_are_read(machine: Machine, reads: list[bool]) -> None:
    fingerprint(machine.put(torch.ones(1000)))
    assert reads == [True]


def test_a_device_with_little_memory_gets_less_scratch(machine: Machine) -> None:
    tensor = machine.put(torch.randn(1 << 20))
    machine.memory.limits[0] = machine.bytes_on() + (1 << 20)
    assert fingerprint(tensor) == expected(machine.read(tensor).numpy().tobytes())


def test_nothing_is_read_any_more_after_a_failure(machine: Machine) -> None:
    """The trainer may free the tensors then, and the allocator unmap their memory."""
    copies = copies_of({"t": machine.put(torch.randn(1 << 10))}, Cancelled())
    launches = machine.timeline.launches
    with pytest.raises(ClosedError):
        copies.run()
    assert machine.timeline.launches > launches
    [side] = machine.created.values()
    assert not side.queue


@pytest.fixture
def job(machine: Machine) -> Iterator[Ranks]:
    """Two ranks, whose threads work on streams of their own, as trainers may."""
    with Ranks(SimFs(1), 2) as job:
        job.each(lambda _: machine.enter())
        job.each(lambda _: machine.cuda.set_stream(machine.cuda.Stream(0)))
        yield job
        machine.timeline.may_finish.set()


def check_that_it_is_learned(job: Ranks, machine: Machine, change: Callable[..., None]) -> None:
    """Equal tensors of two ranks are written once, from the third save on."""

    def train(rank: int) -> list[int]:
        weight = machine.put(torch.zeros(1000))
        written = []
        for step in range(1, 6):
            with torch.no_grad():
                weight.fill_(float(step))  # on the stream of this rank
            save = job.ckpts[rank].save(step, {"w": weight, "g": statehold.Gated(weight * 2)})
            change(weight, rank)  # after save(): not in the step
            written.append(save.wait("committed", DEADLINE_S).stats.written_bytes)
        return written

    first, second = job.each(train)
    assert min(first[-1], second[-1]) < min(first[0], second[0]) - 3000


def spoil(weight: torch.Tensor, rank: int) -> None:
    with torch.no_grad():
        weight.fill_(-1.0 - rank)


def test_ranks_find_that_they_hold_the_same(job: Ranks, machine: Machine) -> None:
    check_that_it_is_learned(job, machine, spoil)


def test_ranks_find_that_they_hold_different_tensors(job: Ranks, machine: Machine) -> None:
    """What both read too early is equal: one of the tensors would be lost."""

    def train(rank: int) -> float:
        weight = machine.put(torch.zeros(1000))
        for step in range(1, 6):
            with torch.no_grad():
                weight.fill_(float(step + 100 * rank))
            save = job.ckpts[rank].save(step, {"w": weight})
        save.wait("committed", DEADLINE_S)
        live = machine.put(torch.zeros(1000))
        job.ckpts[rank].restore({"w": live}, 5)
        return machine.read(live)[0].item()

    assert job.each(train) == [5, 105]


def test_eager_tensors_without_clones_are_fingerprinted_before_save_returns(
    job: Ranks, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "CLONED_BYTES_MAX", 0)
    check_that_it_is_learned(job, machine, spoil)


def test_updates_pass_only_after_the_fingerprints_of_lazy_tensors(
    job: Ranks, machine: Machine
) -> None:
    def train(rank: int) -> int:
        ckpt = job.ckpts[rank]
        weight = machine.put(torch.zeros(1000))
        for step in range(1, 6):
            with torch.no_grad():
                weight.fill_(float(step))
            save = ckpt.save(step, {"w": statehold.Gated(weight)})
            ckpt.gate(DEADLINE_S)
            spoil(weight, rank)
        return save.wait("committed", DEADLINE_S).stats.written_bytes

    first, second = job.each(train)
    assert abs(first - second) == 1000 * 4  # one of them wrote it


def test_the_check_of_the_benchmark_reads_them_behind_queued_work(machine: Machine) -> None:
    """The benchmark runs on devices only, which these tests do not have."""
    tensor = machine.put(torch.ones(64, dtype=torch.int64))
    one = order.begun(tensor)()
    with machine.cuda.stream(machine.cuda.Stream()):
        pending = order.begun(tensor.fill_(2))
    two = pending()
    assert one != two == order.begun(machine.put(torch.full((64,), 2)))()
