"""Training steps that survive the loss of ranks, exactly (docs/resilience.md).

    replicas, step    the public face: the user's loop
    driver, seat      the protocol, executed with torch; a place in the job under one name
    protocol          the decisions, pure; control: the coordinator's process, and links to it
    sums              gradients and losses, summed over microbatches and replicas
    data              samples and seeds of a microbatch, a loader, and checksums of what was drawn
    groups, gloo, nccl, lost    torch.distributed's groups of one membership
    transfer          the state of a run, from live replicas to a joiner
    identity, progress    names, what a job has in common, and whether a thread is stuck

Importing this package loads no torch: the coordinator needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statehold.resilience.replicas import Replicas as Replicas
    from statehold.resilience.step import Microbatch as Microbatch
    from statehold.resilience.step import Step as Step

__all__ = ["Microbatch", "Replicas", "Step"]

_HOMES = {"Replicas": "replicas", "Microbatch": "step", "Step": "step"}


if not TYPE_CHECKING:  # otherwise a type checker accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
