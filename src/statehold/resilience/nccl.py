"""NCCL groups that can be given up: for sums of tensors on a device.

NCCL can abort what runs: the kernels that wait for a peer end then. But an abort waits for a lock
that connecting holds, and NCCL connects in the first operation of a group. So that operation is
made where the group is built (groups), and it ends after CONNECT_S.

Invariants: an error of NCCL does not end the process (torch's default); it makes an operation fail.
Not here: anything that was run. NCCL wants a device for each rank, and no machine of this project's
tests has two. It is written from the documentation of torch 2.13, and tested with a stand-in.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from statehold.resilience import gloo

# The longest time for ranks that have met to connect, by way of switches and other hosts.
CONNECT_S = 60
_POLL_S = 0.001
_POLL_MOST_S = 0.05
# For the constructor of a group. It reads them, and torchrun sets the first one to 1: an error
# would then end the process. The third one would turn that on, too.
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
_setting = threading.Lock()


def build(meeting: gloo.Meeting, rank: int, size: int, host: str, device: torch.device) -> Any:
    """A group of `size` ranks, with a store of rank 0. Blocks while a rank is missing.

    It is not connected yet.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(CONNECT_S))  # torch reads it once
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    says = meeting(json.dumps([host, server.port if server else 0]))
    store = server
    if store is None:
        host, port = json.loads(says[0])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=gloo.CONNECT_S))
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0  # a communicator that blocks cannot be aborted while it connects
    options._timeout = gloo.OPERATION
    with _set_for_constructor():
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _set_for_constructor() -> Iterator[None]:
    """Inside, the variables have these values, whatever they were."""
    with _setting:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def poll(work: Any) -> None:
    """Wait until an operation has ended on the device. Raises when it has failed."""
    pause = _POLL_S
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MOST_S)
    error = work.exception()
    if error is not None:
        raise RuntimeError(str(error))


def abort(group: Any) -> None:
    """End what runs on the device."""
    if group is not None:
        group.abort()
