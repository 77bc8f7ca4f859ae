"""What a power cut leaves of files that Python writes: no more than was synced."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


class SyncedDisk:
    """Notes every sync by Python below `root`: of the bytes of a file, or the names in a directory.

    What is there at the beginning is durable.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._names: dict[int, dict[str, int]] = {}  # by the inode of a directory
        self._bytes: dict[int, bytes] = {}  # by the inode of a file
        self.trust(root)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, partial(self._sync, getattr(os, name)))

    def _sync(self, sync: Callable[[int], None], fd: int) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_relative_to(self._root.resolve()):  # above it, names of other programs go
            self._note(path)

    def trust(self, directory: Path) -> None:
        """What is there now is durable, such as what the core has synced."""
        for path in (directory, *directory.rglob("*")):
            self._note(path)

    def _note(self, path: Path) -> None:
        if path.is_dir():
            names = {each.name: each.stat().st_ino for each in path.iterdir()}
            self._names[path.stat().st_ino] = names
        elif path.is_file():
            self._bytes[path.stat().st_ino] = path.read_bytes()

    def undurable(self) -> list[Path]:
        """The files whose bytes a power cut may take. It may leave their names."""
        files = filter(Path.is_file, self._root.rglob("*"))
        return [p for p in files if self._bytes.get(p.stat().st_ino) != p.read_bytes()]

    def cut(self, into: Path) -> Path:
        """Make the tree that a power cut leaves now, in another place: files that were never
        synced are empty, and so are directories."""
        self._leave(self._root.stat().st_ino, into)
        return into

    def _leave(self, directory: int, into: Path) -> None:
        into.mkdir()
        for name, inode in self._names[directory].items():
            if inode in self._names:
                self._leave(inode, into / name)
            else:
                (into / name).write_bytes(self._bytes.get(inode, b""))
