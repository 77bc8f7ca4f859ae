"""How many subgroups a device should update, and how many the host.

With a device, every k-th subgroup is updated there (Deep Optimizer States, arXiv 2410.21316). A
period of k subgroups of S parameters has these lanes at once. U and V are the parameters a second
that host and device update. B_in and B_out are the bytes a second to the device and from it, each
alone. B_both is the sum of both directions at once. It is less than B_in + B_out where the memory
of the host, or the link, is the limit. A parameter has s bytes of state and w of weights, and g of
a gradient that the device does not have any more: 12, 2 and 0 for AdamW in 16 bit.

    host    (k - 1) S / U            to the device    (s + g + w (k - 1)) S / B_in
    device  S / V                    from the device  s S / B_out
                                     both             (2 s + g + w (k - 1)) S / B_both

The period takes as long as its longest lane; k is the one with the least time for each subgroup.
The lanes are derived from the published code, not from the equations of the paper, and agree with
its logs (k = 2 on H100 nodes). B_both is added here.

Invariants: sizes are in bytes, times in seconds, rates per second. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

PERIOD_MAX = 64


@dataclass(frozen=True, slots=True)
class Carried:
    """The bytes of a parameter that the link carries.

    state: each way, if the device updates it. weights: to the device, if the host updates it.
    gradient: with the state, if the device does not have it any more.
    """

    state: float = 12
    weights: float = 2
    gradient: float = 0


ADAMW = Carried()  # of parameters in 16 bit


@dataclass(frozen=True, slots=True)
class Device:
    """to_device, from_device, both: bytes a second of its link in one direction, and the sum of
    both at once. rate: parameters a second that the device updates."""

    to_device: float
    from_device: float
    both: float
    rate: float

    @classmethod
    def full_duplex(cls, link: float, rate: float) -> Device:
        """With so many bytes a second in each direction, also at once."""
        return cls(link, link, 2 * link, rate)


@dataclass(frozen=True, slots=True)
class Period:
    """Every `length`-th subgroup is updated on the device. The lanes are for one parameter."""

    length: int
    host_s: float
    device_s: float
    to_device_s: float
    from_device_s: float
    both_s: float

    @property
    def parameter_s(self) -> float:
        link = (self.to_device_s, self.from_device_s, self.both_s)
        return max(self.host_s, self.device_s, *link) / self.length


def period(length: int, rate: float, device: Device, carried: Carried = ADAMW) -> Period:
    """The lanes of one period, for a parameter of each of its subgroups."""
    on_host = length - 1
    sent = carried.state + carried.gradient + carried.weights * on_host
    return Period(
        length,
        host_s=on_host / rate,
        device_s=1 / device.rate,
        to_device_s=sent / device.to_device,
        from_device_s=carried.state / device.from_device,
        both_s=(sent + carried.state) / device.both,
    )


def best_period(rate: float, device: Device, carried: Carried = ADAMW) -> Period | None:
    """The best period; None if the host alone, which still sends weights, is faster."""
    found = min(
        (period(length, rate, device, carried) for length in range(2, PERIOD_MAX + 1)),
        key=lambda each: each.parameter_s,
    )
    host_only_s = max(1 / rate, carried.weights / device.to_device)
    return found if found.parameter_s < host_only_s else None
