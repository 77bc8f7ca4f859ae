"""Processes of tests that are forked from one server, which has imported torch once for all."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

__all__ = ["forked"]

# What ranks of these tests import; the server has no threads that a fork would lose.
PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


def forked() -> ForkServerContext:
    """The server starts with the first process, and ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
