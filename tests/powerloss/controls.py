"""What the campaign must notice: workloads some of whose syncs do nothing, and say that they did.

Needs tests/support/faulty.c in front of libc (__main__).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from support.faulty import SKIP, arm


@dataclass(frozen=True, slots=True)
class Control:
    """function: what does nothing, on all paths that hold `path`. file_systems: those on which that
    must show in a workload of this kind."""

    name: str
    function: str
    file_systems: tuple[str, ...]
    kind: str = "keep"
    path: str = "/"

    @property
    def before(self) -> Callable[[], object]:
        """What to call in a process whose syncs are to do nothing."""
        return partial(arm, self.function, self.path, SKIP)


# Data files are written past the page cache, so on ext4 and xfs the sync of the manifest that comes
# later makes them durable as well: one journal, and one cache of the disk, for all files. On btrfs
# a file is made durable by its own sync only.
ALL = (
    Control("directories", "fsync of directory", ("ext4", "xfs", "btrfs")),
    Control("data", "fdatasync", ("btrfs",)),
    Control("directories, offload", "fsync of directory", ("ext4", "xfs", "btrfs"), "offload"),
    Control("linked files", "fdatasync", ("btrfs",), "offload", "-of-00001-"),
)


def why_not() -> str | None:
    """What stands in the way of controls."""
    return None if "LD_PRELOAD" in os.environ else "there is no C compiler"
