"""The storage of a path, from the kernel's list of mounts.

Invariants: the answer is equal for every path below one mount, and outlives a reboot: it has no
device numbers, which change.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_KEY_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: what is mounted (`device`), where, and its type."""

    device: str
    point: str
    kind: str

    @property
    def key(self) -> str:
        """A name for this storage that can be part of a file name."""
        text = json.dumps([self.device, self.point, self.kind])
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


UNKNOWN = Mount("unknown", "", "unknown")


def mount_of(path: str) -> Mount:
    """The mount that a path lies in, whether the path exists or not."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return UNKNOWN
    real, found = os.path.realpath(path), UNKNOWN
    for line in lines:
        device, point, kind, *_ = (_unescaped(word) for word in line.split(" "))
        # Of several mounts on one point the last one counts, because it hides the others.
        if _is_inside(real, point) and len(point) >= len(found.point):
            found = Mount(device, point, kind)
    return found


def _is_inside(path: str, point: str) -> bool:
    return point[:1] == "/" and os.path.commonpath([path, point]) == point


def _unescaped(word: str) -> str:
    """The kernel writes white space and backslashes in a word as three octal digits."""
    for char in " \t\n\\":
        word = word.replace(f"\\{ord(char):03o}", char)
    return word
