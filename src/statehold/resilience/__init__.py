"""Training steps that survive the loss of ranks, exactly (docs/resilience.md).

    replicas, step    the public face: the user's loop
    driver, seat      the protocol, executed with torch; a place in the job under one name
    protocol          the decisions, pure; control: the coordinator's process, and links to it
    sums              gradients and losses, summed over microbatches and replicas
    data              samples and seeds of a microbatch, a loader, and checksums of what was drawn
    groups, gloo, nccl    torch.distributed's groups of one membership
    transfer          the state of a run, from live replicas to a joiner
    identity, progress    names, what a job has in common, and whether a thread is stuck

Importing this package loads no torch: the coordinator needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statehold._version import lazily

if TYPE_CHECKING:
    from statehold.resilience.replicas import Replicas as Replicas
    from statehold.resilience.step import Microbatch as Microbatch
    from statehold.resilience.step import Step as Step
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "statehold.resilience.replicas": "Replicas",
            "statehold.resilience.step": "Microbatch Step",
        },
    )
