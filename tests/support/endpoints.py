"""Readers and writers of torch.distributed.checkpoint, from inside."""

from __future__ import annotations

from statehold.integrations.dcp import StorageReader, StorageWriter
from statehold.integrations.dcp.machine import Machine


def machine_of(endpoint: StorageReader | StorageWriter) -> Machine:
    """What it stands on. `borrowed_fs`, if it is set before the first use, is its file system."""
    return endpoint._machine
