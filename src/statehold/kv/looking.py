"""A store of pages, looked at from outside: nothing is changed, and no seat is taken.

Invariants: a store may be in use. A page that is written or removed meanwhile is not reported.
Not here: the store itself (store).
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from statehold import _core
from statehold.kv.page import HEADER_BYTES, Header, whole_blocks
from statehold.kv.tiers import Geometry, no_store


@dataclass
class PagesSeen:
    """What is in the files of a store. bad: slots whose bytes do not prove a page."""

    geometry: Geometry
    file_bytes: int = 0
    pages: Counter[str] = field(default_factory=Counter)  # by identity, in hex
    payload_bytes: int = 0
    bad: list[str] = field(default_factory=list)


def look(path: str | os.PathLike[str], *, verify: bool = False) -> PagesSeen:
    """Read the headers of all pages; verify: the pages, too.

    Raises UsageError if the directory is no store of pages, and FormatVersionError.
    """
    root = Path(path)
    try:
        seen = PagesSeen(Geometry.read(os.fspath(root)))
    except FileNotFoundError as error:
        raise no_store(os.fspath(root)) from error
    for segment in sorted(root.glob("segment-*")):
        _look_at(segment, seen, verify=verify)
    seen.file_bytes = sum(each.stat().st_blocks * 512 for each in root.iterdir())
    return seen


def _look_at(segment: Path, seen: PagesSeen, *, verify: bool) -> None:
    if not segment.stat().st_size:
        return
    with open(segment, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        for at in range(0, len(raw) - HEADER_BYTES + 1, seen.geometry.slot_bytes):
            first, payload = raw[at : at + HEADER_BYTES], at + HEADER_BYTES
            header = Header.decode(first)
            is_bad = header is None and first != bytes(HEADER_BYTES)
            if header is not None and verify:
                end = payload + whole_blocks(header.nbytes)
                is_bad = _core.xxh3_64(raw[payload:end]) != header.checksum
            if is_bad:
                seen.bad.append(f"{segment.name} at {at}")
            elif header is not None:
                seen.pages[header.identity.hex()] += 1
                seen.payload_bytes += header.nbytes
