"""How large subgroups are, how many buffers there are, and what does not fit.

Invariants: what an optimizer needs is known at its construction, in bytes, and what cannot work is
refused there. Nothing grows later. Pure, but for the look at the memory of the host, and the
mapping of buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from statehold.errors import UsageError
from statehold.offload.subgroups import ITEM_BYTES, PAGE_BYTES, Extent, Subgroup, cut
from statehold.offload.workers import STRIP
from statehold.planners.placement import buffers_in_transit, choose_subgroup_bytes
from statehold.process.host_memory import available
from statehold.tensors.devices.pinning import mapped
from statehold.units import format_bytes

# -- sizes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """subgroups: the cut. each_bytes: of a buffer, which holds the largest subgroup.

    cached: buffers that Host pays for. buffers: with those of the pipeline. threads: that update.
    pinned_bytes: for weights and gradients of parameters on devices.
    """

    subgroups: Sequence[Subgroup]
    each_bytes: int
    cached: int
    buffers: int
    threads: int
    pinned_bytes: int

    @classmethod
    def of(
        cls,
        extents: Sequence[Extent],
        host_bytes: int,
        paths: int,
        subgroup_bytes: int | None,
        threads: int,
        pinned_bytes: int = 0,
        order: Iterable[int] | None = None,
        lanes: int = 0,
    ) -> Sizes:
        """The sizes for these parameters and tiers.

        subgroup_bytes: None chooses it. order: in which the parameters are cut. lanes: those of a
        device, each with the buffer of a subgroup.
        """
        state_bytes = sum(each.numel * ITEM_BYTES * len(each.fields) for each in extents)
        wanted = subgroup_bytes or choose_subgroup_bytes(state_bytes)
        subgroups = cut(extents, wanted // PAGE_BYTES * PAGE_BYTES, order)
        each_bytes = max((each.nbytes for each in subgroups), default=0)
        count = len(subgroups)
        cached = min(count, host_bytes // each_bytes) if each_bytes else 0
        if cached < count and not paths:
            raise UsageError(
                "the state does not fit into Host, and there is no Path",
                facts={
                    "needed": f"{format_bytes(count * each_bytes)}: {count} subgroups of "
                    f"{format_bytes(each_bytes)}",
                    "Host": format_bytes(host_bytes),
                },
                hint="add a Path to tiers, or give Host more bytes",
            )
        buffers = min(count, cached + buffers_in_transit(paths) + lanes)
        found = cls(subgroups, each_bytes, cached, buffers, threads, pinned_bytes)
        found._check_room()
        return found

    @property
    def state_bytes(self) -> int:
        """All subgroups."""
        return sum(each.nbytes for each in self.subgroups)

    @property
    def cache_bytes(self) -> int:
        """The buffers that Host pays for."""
        return self.cached * self.each_bytes

    @property
    def pipeline_bytes(self) -> int:
        """The other buffers, and the memory for gradients in float32."""
        return (self.buffers - self.cached) * self.each_bytes + self.threads * STRIP * ITEM_BYTES

    def _check_room(self) -> None:
        room, needed = available(), self.cache_bytes + self.pipeline_bytes + self.pinned_bytes
        if needed > room.nbytes:
            raise UsageError(
                "there is not enough memory for the buffers of this optimizer",
                facts={
                    "needed": f"{format_bytes(needed)}: {self.cached} buffers of Host and "
                    f"{self.buffers - self.cached} of the pipeline, "
                    f"{format_bytes(self.each_bytes)} each, and "
                    f"{format_bytes(self.pinned_bytes)} for parameters on devices",
                    "available": f"{format_bytes(room.nbytes)} {room.limit}",
                },
                hint="give Host fewer bytes, or lower subgroup_bytes",
            )


# -- buffers ---------------------------------------------------------------------------------------


class Buffers:
    """`count` buffers of host memory, of `nbytes` each, as float32 tensors.

    The memory is mapped once, at construction. Each buffer begins on a page, so that transfers go
    straight between it and a file. The size is exact.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self._items = mapped(count * nbytes).view(torch.float32)
        self._each = nbytes // ITEM_BYTES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._items[index * self._each : (index + 1) * self._each]
