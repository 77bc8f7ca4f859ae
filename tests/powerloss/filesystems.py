"""The file systems that are put on the disk: how each is made and mounted, and what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from powerloss.linux import is_loop_available

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSystem:
    """name: of this way to use it. kind: for mount. options: of the mount."""

    name: str
    kind: str
    size_bytes: int
    make: tuple[str, ...]
    options: str = ""

    @property
    def tool(self) -> str:
        return self.make[0]

    def format(self, image: Path) -> None:
        """Make an empty one in a sparse file."""
        with image.open("wb") as file:
            file.truncate(self.size_bytes)
        made = subprocess.run([*self.make, str(image)], capture_output=True, text=True)
        if made.returncode:
            raise OSError(f"{' '.join(self.make)}: {made.stdout}{made.stderr}")


_EXT4 = (
    *("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4"),
    *("-E", "lazy_itable_init=1,lazy_journal_init=1"),
)
_XFS = ("mkfs.xfs", "--unsupported", "-q", "-f", "-s", "size=4096", "-d", "agcount=2")
_BTRFS = ("mkfs.btrfs", "-q", "-f", "-m", "single")

# xfs and btrfs refuse to be smaller.
ALL = (
    FileSystem("ext4", "ext4", 64 * MiB, _EXT4),
    FileSystem("ext4-discard", "ext4", 64 * MiB, _EXT4, "discard"),
    FileSystem("ext4-writeback", "ext4", 64 * MiB, _EXT4, "data=writeback"),
    FileSystem("ext4-journal", "ext4", 64 * MiB, _EXT4, "data=journal"),
    FileSystem("xfs", "xfs", 64 * MiB, _XFS, "nouuid"),
    FileSystem("xfs-discard", "xfs", 64 * MiB, _XFS, "nouuid,discard"),
    FileSystem("btrfs", "btrfs", 128 * MiB, _BTRFS),
    FileSystem("btrfs-discard", "btrfs", 128 * MiB, _BTRFS, "discard=sync"),
)
BY_NAME = {each.name: each for each in ALL}


def why_not(file_system: FileSystem) -> str | None:
    """What stands in the way of using this file system here."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    if not is_loop_available():
        return "there are no loop devices"
    return None if shutil.which(file_system.tool) else f"there is no {file_system.tool}"
