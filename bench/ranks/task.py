"""What one job of several ranks measures, as plain values that travel to its processes.

Owns: `Task`, and how many ranks a layout needs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

# Layout -> how many ranks it is for. state.py builds them.
LAYOUTS = {
    "fsdp-4": 4,
    "fsdp-3": 3,
    "fsdp-2": 2,
    "whole": 1,
    "tp-4": 4,  # as Llama is split: by rows of some matrices, by columns of others
    "columns-4": 4,  # every matrix by columns
    "tp-2-fsdp-2": 4,
    "share-4": 1,  # what one rank of fsdp-4 holds, as plain tensors of a program that is alone
    "shares-4": 4,  # the same on every rank, each for itself
}


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement by all ranks of a job. Fields that a kind does not use keep their defaults.

    kind: "save", "train", "write" (a step to restore), "restore" or "raw": measure.py.
    """

    kind: str
    peer: str
    layout: str
    directory: str
    size: str = "smoke"
    repetition: int = 0
    staging_bytes: int = 64 << 20
    saves: int = 3
    steps: int = 4
    work: int = 1  # matrix products per training step
    source: str = ""  # restore: the layout of the saved step

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout]

    @property
    def seed(self) -> int:
        """Different for every peer and repetition: a stale file cannot pass for a new one."""
        return zlib.crc32(f"{self.peer} {self.repetition}".encode()) % 10007

    @property
    def smoke(self) -> bool:
        return self.size == "smoke"

    @property
    def path(self) -> Path:
        return Path(self.directory)
