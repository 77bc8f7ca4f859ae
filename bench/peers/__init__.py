"""One adapter per checkpoint library, behind the same five calls (base.py).

Invariants: `PEERS` names them all. Importing this package imports no checkpoint library: an adapter
is imported when it is opened, so that no peer pays for another's imports or memory.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Peer, PeerOptions, Unavailable
from bench.state import TrainingState

__all__ = ["DEFAULT_PEERS", "PEERS", "Peer", "PeerOptions", "Unavailable", "load_peer", "open_peer"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an adapter lives, and the extra memory it needs as a multiple of the state."""

    title: str
    module: str
    factory: str
    extra_states: float = 0.0
    restores: bool = False  # has a reader of its own: the others read what these write


PEERS = {
    "statehold": Entry("statehold, 1 GiB staging", "own", "Statehold", 0.25, True),
    "statehold-full": Entry("statehold, staging = state", "own", "StateholdFull", 1.1),
    "statehold-default": Entry("statehold, default staging", "own", "StateholdDefault", 1.4),
    "torch-save": Entry("torch.save", "files", "TorchSave", 0.0, True),
    "safetensors": Entry("safetensors save_file", "files", "Safetensors", 0.0, True),
    "dcp-1": Entry("DCP save, 1 thread", "dcp", "DcpOneThread"),
    "dcp-2": Entry("DCP save, 2 threads", "dcp", "DcpTwoThreads", 0.0, True),
    "dcp-hf": Entry("DCP save, HuggingFaceStorageWriter", "dcp", "DcpHuggingFace", 1.1, True),
    "dcp-async": Entry("DCP async_save, thread", "dcp", "DcpAsync", 1.2),
    "dcp-async-cached": Entry(
        "DCP async_save, thread, cached stager", "dcp", "DcpAsyncCached", 1.2
    ),
    "dcp-process": Entry("DCP async_save, process", "dcp", "DcpProcess", 3.0),
    "dcp-process-shm": Entry(
        "DCP async_save, process, shared memory", "dcp", "DcpProcessShared", 2.2
    ),
    "torchsnapshot": Entry("TorchSnapshot take", "snapshot", "TorchSnapshotTake", 1.1, True),
    "torchsnapshot-async": Entry("TorchSnapshot async_take", "snapshot", "TorchSnapshotAsync", 1.1),
}
# The Hugging Face writer takes most of a minute per save: it is run when it is asked for by name.
DEFAULT_PEERS = tuple(name for name in PEERS if name != "dcp-hf")


def load_peer(name: str) -> type[Peer]:
    """Import the named adapter with its library."""
    entry = PEERS[name]
    factory: type[Peer] = getattr(
        importlib.import_module(f"bench.peers.{entry.module}"), entry.factory
    )
    return factory


def open_peer(name: str, directory: Path, state: TrainingState, options: PeerOptions) -> Peer:
    """The named adapter on `directory`; raises Unavailable with the reason when it cannot run."""
    directory.mkdir(parents=True, exist_ok=True)
    return load_peer(name)(directory, state, options)
