"""The model of an update: its lanes, its bounds, and what published systems measured."""

from __future__ import annotations

import random

import pytest

from statehold.errors import UsageError
from statehold.planners import placement
from statehold.planners.interleaving import Device, PathRates, UpdateWork, best_period, plan
from statehold.units import GiB, MiB

GB = 1e9


def adamw(parameters: float, rate: float = 1e12) -> UpdateWork:
    return UpdateWork(int(parameters), fields=3, gradient_bytes=2, rate=rate)


def memory_for(work: UpdateWork, cached: float) -> int:
    return int(work.parameters * work.gradient_bytes + cached * work.state_bytes)


# -- storage ---------------------------------------------------------------------------------------


def test_a_path_reads_and_writes_in_turns_or_at_once() -> None:
    assert PathRates("a", 6 * GB, 3 * GB).bandwidth == pytest.approx(2 * GB)
    assert PathRates("a", 6 * GB, 3 * GB, is_full_duplex=True).bandwidth == 3 * GB


def test_one_path_takes_the_bytes_over_its_bandwidth() -> None:
    work = adamw(1e9)
    found = plan(work, memory_for(work, 0.25), [PathRates("a", 4 * GB, 4 * GB)])
    assert found.cached == pytest.approx(0.25)
    assert found.storage_s == pytest.approx(12e9 * 0.75 / (2 * GB))
    assert found.bound == "paths"
    assert found.update_s == pytest.approx(found.storage_s, rel=0.01)


def test_paths_share_by_bandwidth() -> None:
    work = adamw(7e9)
    slow, fast = PathRates("slow", 2 * GB, 2 * GB), PathRates("fast", 6 * GB, 6 * GB)
    both = plan(work, memory_for(work, 0.1), [slow, fast])
    alone = plan(work, memory_for(work, 0.1), [fast])
    assert both.counts[1] == pytest.approx(3 * both.counts[0], abs=2)
    assert alone.storage_s / both.storage_s == pytest.approx(4 / 3, rel=0.02)


def test_the_published_gain_of_two_paths() -> None:
    """MLP-Offload: 2:1 placement, about 0.12 cached, against 16 bytes each way on one path:
    1.9 to 2.6 times faster updates in its table."""
    work = adamw(70e9 / 4)
    nvme, pfs = PathRates("nvme", 6 * GB, 6 * GB), PathRates("pfs", 3 * GB, 3 * GB)
    found = plan(work, memory_for(work, 0.12), [nvme, pfs])
    zero_infinity_s = work.parameters * 16 / nvme.bandwidth
    assert zero_infinity_s / found.storage_s == pytest.approx(2.27, rel=0.02)


def test_arithmetic_bounds_what_memory_holds() -> None:
    work = adamw(1e9, rate=5e8)
    found = plan(work, memory_for(work, 1.0), [])
    assert (found.storage_s, found.compute_s, found.bound) == (0.0, 2.0, "host")
    assert found.cached == 1.0


def test_more_memory_and_more_bandwidth_are_never_slower() -> None:
    rng = random.Random(7)
    for _ in range(200):
        work = adamw(rng.uniform(1e9, 1e10), rng.uniform(1e8, 1e10))
        paths = [PathRates("p", *(rng.uniform(1, 9) * GB for _ in "rw")) for _ in range(3)]
        memory = memory_for(work, rng.uniform(0.2, 0.9))
        size = 64 * MiB
        here = plan(work, memory, paths, subgroup_bytes=size)
        assert plan(work, 2 * memory, paths, subgroup_bytes=size).update_s <= here.update_s
        faster = [PathRates(p.name, 2 * p.read, 2 * p.write) for p in paths]
        assert plan(work, memory, faster, subgroup_bytes=size).update_s <= here.update_s
        assert sum(here.counts) * size >= work.state_bytes


def test_memory_is_divided_without_rest() -> None:
    work = adamw(1e9)
    memory = memory_for(work, 0.5)
    found = plan(work, memory, [PathRates("a", GB, GB)])
    assert found.gradients_bytes + found.host_bytes + found.buffers_bytes == memory
    assert found.buffers_bytes == placement.buffers_in_transit(1) * found.subgroup_bytes


def test_subgroups_shrink_until_their_buffers_fit() -> None:
    work = adamw(1e10)
    gradients = work.parameters * 2
    roomy = plan(work, gradients + 8 * GiB, [PathRates("a", GB, GB)])
    tight = plan(work, gradients + 200 * MiB, [PathRates("a", GB, GB)])
    assert roomy.subgroup_bytes == placement.SUBGROUP_BYTES_MAX
    assert tight.subgroup_bytes == 200 * MiB // placement.buffers_in_transit(1)


def test_memory_that_holds_all_needs_no_buffers() -> None:
    work = adamw(1e8)
    found = plan(work, memory_for(work, 1.1), [PathRates("a", GB, GB)], subgroup_bytes=GiB)
    assert (found.host_bytes, found.buffers_bytes) == (work.state_bytes, 0)
    assert found.storage_s == 0


def test_too_little_memory_is_refused_with_the_figures() -> None:
    work = adamw(1e9)
    with pytest.raises(UsageError, match=r"at least 1.89 GiB: 1.86 GiB of gradients") as caught:
        plan(work, GiB, [PathRates("a", GB, GB)])
    assert "buffers of the paths" in str(caught.value)
    with pytest.raises(UsageError, match="has no path"):
        plan(work, 8 * GiB, [])


# -- a device --------------------------------------------------------------------------------------


def test_a_slow_link_leaves_the_device_out() -> None:
    assert best_period(2e9, Device.full_duplex(2 * GB, 1e12)) is None
    work = adamw(1e9, rate=2e9)
    found = plan(work, memory_for(work, 1), [], Device.full_duplex(2 * GB, 1e12))
    assert (found.period, found.bound) == (None, "host")
