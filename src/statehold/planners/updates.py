"""How long an update of an offloaded optimizer takes, what bounds it, and the tiers to use.

The state of P parameters has s bytes each: 4 for each of the fields of the rule, and 4 for the
fp32 master of a 16-bit parameter. An update reads what memory does not hold, computes, and writes
as much again, all at the same time:

    c          = memory for state / (s P), at most 1                 the share that memory holds
    b_j        = 1 / (1/r_j + 1/w_j), or min(r_j, w_j) if full duplex      bandwidth of path j
    n_j        = largest remainders of N b_j / sum b                       its part of N subgroups
    storage_s  = max over j of n_j (s P / N) (1 - c) / b_j
    host_s     = P / U                                     U: parameters a second on the host
    update_s   = max(storage_s, host_s) + the update of one subgroup

The volume s (1 - c) each way and the shares are those of MLP-Offload (arXiv 2509.02480); its
released code has fixed shares. ZeRO-Infinity moves 16 bytes a parameter each way, because it
writes gradients, too (measured with DeepSpeed 0.19.8).

Invariants: sizes are in bytes, times in seconds, rates per second. Pure.
Not here: which subgroup goes to which path (placement), updates on a device (interleaving),
measured rates (io/profile).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from statehold.errors import UsageError
from statehold.planners import placement
from statehold.planners.interleaving import Carried, Device, Period, best_period
from statehold.units import MiB, format_bytes

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
    """A plan. counts: subgroups of each path. buffers: bytes of host memory in transit, which
    hold state between updates, too. cached: the share of the state that memory holds."""

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
