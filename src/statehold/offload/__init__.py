"""Optimizers whose state is larger than memory: it lies on tiers, and passes through memory.

from statehold import offload

optimizer = offload.AdamW(
    model.parameters(), lr=3e-4, tiers=[offload.Host("4GiB"), offload.Path("/nvme0/opt")]
)
"""

from statehold.offload.optimizer import SGD, Adam, AdamW
from statehold.offload.stats import Event, PathStats, Stats
from statehold.offload.tiers import Host, Path

__all__ = ["SGD", "Adam", "AdamW", "Event", "Host", "Path", "PathStats", "Stats"]
