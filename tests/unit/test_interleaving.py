"""The model of updates on host and device in turn."""

from __future__ import annotations

import random

import pytest

from statehold.planners.interleaving import ADAMW, PERIOD_MAX, Carried, Device, best_period, period

GB = 1e9


def test_the_period_that_h100_nodes_measured() -> None:
    """k = 2 was the best of every sweep; 55.2 GB/s of link, 2.2e9 parameters a second."""
    found = best_period(2.2e9, Device.full_duplex(55.2 * GB, rate=1e11))
    assert found is not None
    assert found.length == 2


def test_the_period_balances_host_and_link() -> None:
    """k* = 1 + 12 / (B/U - 2): at it both lanes are equally long."""
    rate, link = 1e9, 14e9  # k* = 2
    lanes = period(2, rate, Device.full_duplex(link, 1e12))
    assert lanes.host_s == pytest.approx(lanes.to_device_s)


def test_the_best_period_is_the_best_of_all() -> None:
    rng = random.Random(3)
    for _ in range(100):
        rate = 10 ** rng.uniform(7, 10)
        into, out = 10 ** rng.uniform(9, 11), 10 ** rng.uniform(9, 11)
        both = rng.uniform(max(into, out), into + out)
        device = Device(into, out, both, 10 ** rng.uniform(8, 12))
        found = best_period(rate, device)
        every = [period(k, rate, device).parameter_s for k in range(2, PERIOD_MAX + 1)]
        if found is not None:
            assert found.parameter_s == min(every)
        else:
            assert min(every) >= 1 / rate or min(every) >= ADAMW.weights / device.to_device


def test_directions_that_slow_each_other_leave_the_device_less() -> None:
    """The same link, where both directions together are no faster than one alone."""
    rate, link = 1e9, 14e9
    free = best_period(rate, Device.full_duplex(link, 1e12))
    shared = best_period(rate, Device(link, link, link, 1e12))
    assert free is not None
    assert shared is not None
    assert free.length < shared.length
    assert shared.both_s == pytest.approx((24 + 2 * (shared.length - 1)) / link)
    assert free.parameter_s < shared.parameter_s < 1 / rate


@pytest.mark.parametrize(
    ("device", "lane"),
    [
        (Device(1e9, 9e10, 1e12, 1e12), "to_device_s"),
        (Device(9e10, 1e9, 1e12, 1e12), "from_device_s"),
        (Device(9e10, 9e10, 1e9, 1e12), "both_s"),
        (Device(9e10, 9e10, 1e12, 1e8), "device_s"),
    ],
)
def test_a_period_takes_as_long_as_its_longest_lane(device: Device, lane: str) -> None:
    found = period(4, 1e10, device)
    assert found.parameter_s == getattr(found, lane) / 4


def test_what_the_link_carries_decides() -> None:
    """A float32 parameter has less state and larger weights; a drained gradient goes up again."""
    device = Device.full_duplex(14e9, 1e12)
    lanes = period(3, 1e9, device, Carried(state=8, weights=4, gradient=2))
    assert lanes.to_device_s == pytest.approx((8 + 2 + 2 * 4) / 14e9)
    assert lanes.from_device_s == pytest.approx(8 / 14e9)
    assert lanes.both_s == pytest.approx((2 * 8 + 2 + 2 * 4) / 28e9)
