"""Small real file systems for a test: ext4 in a file, mounted through a loop device, and tmpfs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def why_no_ext4() -> str | None:
    """What stands in the way of mounting one here."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    return None if shutil.which("mkfs.ext4") else "there is no mkfs.ext4"


@contextmanager
def ext4(folder: Path, size_bytes: int, *options: str, kind: str = "ext4") -> Iterator[Path]:
    """An empty ext4, or ext2, with no blocks kept for root, mounted below `folder`."""
    image, mounted = folder / "image", folder / "mounted"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-t", kind, "-m", "0", *options, str(image)], check=True)
    mounted.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    try:
        yield mounted
    finally:
        # At once, also where a test that has failed still has files open there.
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def why_no_tmpfs() -> str | None:
    """What stands in the way of mounting one here."""
    return None if os.geteuid() == 0 else "mounting a file system needs root"


@contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """An empty tmpfs, mounted below `folder`."""
    mounted = folder / "memory"
    mounted.mkdir()
    options = f"size={size_bytes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mounted)], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


@contextmanager
def nearly_full(root: Path, free_bytes: int) -> Iterator[None]:
    """Another file takes all space but this much, also while others write there."""
    ballast = root / "ballast"
    with ballast.open("wb") as file:
        end, part = 0, 16 << 20
        while part:
            room = os.statvfs(root)
            taken = min(part, room.f_bavail * room.f_frsize - free_bytes)
            if taken <= 0:
                break
            try:
                os.posix_fallocate(file.fileno(), end, taken)
                end += taken
            except OSError:  # others were quicker, or it is needed to say where the file is
                part = taken // 2
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def few_inodes(root: Path, free: int) -> Iterator[None]:
    """Empty files take all inodes but this many."""
    folder = root / "many"
    folder.mkdir()
    for index in range(os.statvfs(root).f_ffree - free):
        (folder / str(index)).touch()
    try:
        yield
    finally:
        shutil.rmtree(folder)
