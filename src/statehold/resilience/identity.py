"""Identity: the name of a replica's life, and what all replicas of a job must have in common.

Invariants: a process that starts again gets another name (R10). The ranks of a replica agree on it
over their own process group, which spans this replica and nothing else.
Not here: the comparison (protocol/coordinator).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from statehold._version import __version__

_DIGITS = 16


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The place of this rank in its replica, and the number of ranks of the replica."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def among(width: int) -> tuple[int, int] | None:
    """The rank and the number of ranks in torch's default group, which hold a state together."""
    return (dist.get_rank(), dist.get_world_size()) if width > 1 else None


def new_name(group: dist.ProcessGroup | None, width: int) -> str:
    """Another one for each call; the same on all ranks of the group."""
    name = [f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"]
    if width > 1:
        dist.broadcast_object_list(name, group=group, group_src=0)
    return name[0]


def model_digest(modules: Iterable[nn.Module]) -> str:
    """Of the names, global shapes and types of all parameters."""
    lines = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for module in modules
        for name, parameter in module.named_parameters()
    ]
    return _digest("\n".join(lines).encode())


def code_digest() -> str:
    """Of the program that was started, and of the versions of torch and statehold."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    content = b""
    if file is not None and Path(file).is_file():
        content = Path(file).read_bytes()
    return _digest(content + f"{torch.__version__} {__version__}".encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
