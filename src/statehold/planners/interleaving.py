"""How many subgroups a device should update, how long an update takes, and what bounds it.

Owns: the period of updates on a device; the plan of an update over memory and paths.
Invariants: sizes are in bytes, times in seconds, rates per second. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from statehold.errors import UsageError
from statehold.planners import placement
from statehold.units import MiB, format_bytes

# -- updates on a device ---------------------------------------------------------------------------

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
    """Every `length`-th subgroup is updated on the device (Deep Optimizer States, arXiv
    2410.21316).

    A period of k subgroups of S parameters has these lanes at once. U and V are the parameters a
    second that host and device update. B_in and B_out are the bytes a second to the device and from
    it, each alone. B_both is the sum of both directions at once. It is less than B_in + B_out where
    the memory of the host, or the link, is the limit. A parameter has s bytes of state and w of
    weights, and g of a gradient that the device does not have any more: 12, 2 and 0 for AdamW in 16
    bit.

        host    (k - 1) S / U            to the device    (s + g + w (k - 1)) S / B_in
        device  S / V                    from the device  s S / B_out
                                         both             (2 s + g + w (k - 1)) S / B_both

    The period takes as long as its longest lane; k is the one with the least time for each
    subgroup. The lanes are derived from the published code, not from the equations of the paper,
    and agree with its logs (k = 2 on H100 nodes). B_both is added here.

    The lanes of this class are for one parameter.
    """

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


# -- updates of an offloaded optimizer -------------------------------------------------------------


FIELD_BYTES = 4


@dataclass(frozen=True, slots=True)
class PathRates:
    """What a path can do, in bytes a second."""

    name: str
    read: float
    write: float
    is_full_duplex: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes a second that are read and written again."""
        if self.is_full_duplex:
            return min(self.read, self.write)
        return 1 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """What is updated.

    fields: float32 arrays of a parameter on the tiers. gradient_bytes: of a parameter, in host
        memory. rate: parameters a second that the host updates.
    """

    parameters: int
    fields: int
    gradient_bytes: int
    rate: float

    @property
    def state_bytes(self) -> int:
        return self.parameters * self.fields * FIELD_BYTES


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """A plan of an update, which reads what memory does not hold, computes, and writes as much
    again.

    The state of P parameters has s bytes each: 4 for each of the fields of the rule, and 4 for the
    fp32 master of a 16-bit parameter. All of this happens at the same time:

        c          = memory for state / (s P), at most 1                 the share that memory holds
        b_j        = 1 / (1/r_j + 1/w_j), or min(r_j, w_j) if full duplex      bandwidth of path j
        n_j        = largest remainders of N b_j / sum b                    its part of N subgroups
        storage_s  = max over j of n_j (s P / N) (1 - c) / b_j
        host_s     = P / U                                     U: parameters a second on the host
        update_s   = max(storage_s, host_s) + the update of one subgroup

    The volume s (1 - c) each way and the shares are those of MLP-Offload (arXiv 2509.02480); its
    released code has fixed shares. ZeRO-Infinity moves 16 bytes a parameter each way, because it
    writes gradients, too (measured with DeepSpeed 0.19.8).

    counts: subgroups of each path. buffers: bytes of host memory in transit, which hold state
    between updates, too. cached: the share of the state that memory holds.
    """

    subgroup_bytes: int
    counts: tuple[int, ...]
    host_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    cached: float
    storage_s: float
    compute_s: float
    update_s: float
    period: Period | None

    @property
    def bound(self) -> str:
        if self.storage_s > self.compute_s:
            return "paths"
        return "host" if self.period is None else "host and device"


def plan(
    work: UpdateWork,
    memory_bytes: int,
    paths: Sequence[PathRates],
    device: Device | None = None,
    subgroup_bytes: int | None = None,
) -> UpdatePlan:
    """The fastest update with so much host memory for gradients and state.

    Raises UsageError with the figures if the memory is too small for the buffers, or for the state
    where there are no paths.
    """
    gradients = work.parameters * work.gradient_bytes
    room = memory_bytes - gradients
    size = subgroup_bytes or _subgroup_bytes(work, room, len(paths))
    needs_paths = bool(paths) and room < work.state_bytes
    transit = placement.buffers_in_transit(len(paths)) * size if needs_paths else 0
    _check_room(work, room, transit, gradients, has_paths=bool(paths))
    subgroups = math.ceil(work.state_bytes / size)
    held = min(room, work.state_bytes)
    cached = held / work.state_bytes
    counts = placement.shares(subgroups, [each.bandwidth for each in paths]) if paths else []
    storage_s = max(
        (
            count / subgroups * work.state_bytes * (1 - cached) / path.bandwidth
            for count, path in zip(counts, paths, strict=True)
        ),
        default=0.0,
    )
    carried = Carried(work.fields * FIELD_BYTES, weights=work.gradient_bytes)
    lanes = best_period(work.rate, device, carried) if device else None
    parameter_s = lanes.parameter_s if lanes else 1 / work.rate
    compute_s = work.parameters * parameter_s
    return UpdatePlan(
        subgroup_bytes=size,
        counts=tuple(counts),
        host_bytes=held - transit,
        buffers_bytes=transit,
        gradients_bytes=gradients,
        cached=cached,
        storage_s=storage_s,
        compute_s=compute_s,
        update_s=max(storage_s, compute_s) + compute_s / subgroups,
        period=lanes,
    )


def _subgroup_bytes(work: UpdateWork, room: int, paths: int) -> int:
    """What the optimizer chooses, but no more than memory has buffers for."""
    size = placement.choose_subgroup_bytes(work.state_bytes)
    if not paths:
        return size
    fits = room // placement.buffers_in_transit(paths) // MiB * MiB
    return max(placement.SUBGROUP_BYTES_MIN, min(size, fits))


def _check_room(
    work: UpdateWork, room: int, transit: int, gradients: int, *, has_paths: bool
) -> None:
    needed = min(transit, work.state_bytes) if has_paths else work.state_bytes
    if room >= needed:
        return
    what = "the buffers of the paths" if has_paths else "the state, which has no path"
    raise UsageError(
        f"there is too little host memory for {what}",
        facts={"expected": f"at least {format_bytes(needed + gradients)}: "
               f"{format_bytes(gradients)} of gradients, and {format_bytes(needed)}",
               "got": format_bytes(max(0, room + gradients))},
        hint="give more memory, or smaller subgroups" if has_paths else "give a path",
    )  # fmt: skip
