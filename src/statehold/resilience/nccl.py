"""NCCL groups that can be given up: for sums of tensors on a device.

NCCL can abort what runs. `poll` waits on the host, and ends when the groups are revoked. `abort`
ends the kernels that wait for a peer.

Invariants: an error of NCCL does not end the process (torch's default); it makes an operation fail.
Not here: anything that was run. No machine of this project's tests has a device: written from the
documentation of torch 2.13 and reviewed.
"""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from statehold.resilience.gloo import CONNECT_S, Meeting
from statehold.resilience.lost import GroupLostError

_POLL_S = 0.001
# 0: torch's watchdog leaves errors to `poll`.
_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def build(meeting: Meeting, rank: int, size: int, host: str, device: torch.device) -> Any:
    """A group of `size` ranks, with a store of rank 0. Blocks while a rank is missing."""
    os.environ.setdefault(*_HANDLING)
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    says = meeting(json.dumps([host, server.port if server else 0]))
    store = server
    if store is None:
        host, port = json.loads(says[0])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0  # a communicator that blocks cannot be aborted while it connects
    group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def poll(work: Any, revoked: threading.Event) -> None:
    """Wait until an operation has run on the device. Raises when it fails, or when revoked."""
    while not work.is_completed():
        if revoked.wait(_POLL_S):
            raise GroupLostError("the epoch has ended during an operation on the device")
    error = work.exception()
    if error is not None:
        raise RuntimeError(str(error))


def abort(group: Any) -> None:
    """End what runs on the device."""
    if group is not None:
        group.abort()
