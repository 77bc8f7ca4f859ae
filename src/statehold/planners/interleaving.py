"""How many subgroups a device should update, and how many the host.

With a device, every k-th subgroup is updated there (Deep Optimizer States, arXiv 2410.21316). A
period of k subgroups of S parameters has four lanes at once. Of a link with B bytes/s one way, and
V parameters a second on the device:

    host    (k - 1) S / U            to the device    (12 + 2 (k - 1)) S / B
    device  S / V                    from the device  12 S / B

The period takes as long as its longest lane; k is the one with the least time for each subgroup.
The lanes are derived from the published code and agree with its logs (k = 2 on H100 nodes).

Invariants: sizes are in bytes, times in seconds, rates per second. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

EXCHANGED_BYTES = 12  # of a parameter, between host and device: master and two moments
HALF_BYTES = 2
PERIOD_MAX = 64


@dataclass(frozen=True, slots=True)
class Device:
    """link: bytes a second one way; rate: parameters a second that the device updates."""

    link: float
    rate: float


@dataclass(frozen=True, slots=True)
class Period:
    """Every `length`-th subgroup is updated on the device. The lanes are for one parameter."""

    length: int
    host_s: float
    device_s: float
    to_device_s: float
    from_device_s: float

    @property
    def parameter_s(self) -> float:
        lanes = (self.host_s, self.device_s, self.to_device_s, self.from_device_s)
        return max(lanes) / self.length


def period(length: int, rate: float, device: Device) -> Period:
    """The lanes of one period, for a parameter of each of its subgroups."""
    on_host = length - 1
    return Period(
        length,
        host_s=on_host / rate,
        device_s=1 / device.rate,
        to_device_s=(EXCHANGED_BYTES + HALF_BYTES * on_host) / device.link,
        from_device_s=EXCHANGED_BYTES / device.link,
    )


def best_period(rate: float, device: Device) -> Period | None:
    """The best period; None if the host alone, which still sends 16-bit parameters, is faster."""
    found = min(
        (period(length, rate, device) for length in range(2, PERIOD_MAX + 1)),
        key=lambda each: each.parameter_s,
    )
    host_only_s = max(1 / rate, HALF_BYTES / device.link)
    return found if found.parameter_s < host_only_s else None
