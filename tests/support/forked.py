"""Processes of tests that are forked from one server, which has imported torch once for all."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

__all__ = ["PRELOADED", "forked"]

# What processes of tests import; none of these starts a thread, which a fork would lose.
PRELOADED = [
    "torch._dynamo",  # by the first optimizer, in a second
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "statehold.checkpoint.checkpointer",
    "statehold.offload",
    "pytest",  # by modules of support
]


def forked() -> ForkServerContext:
    """The server starts with the first process, and ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
