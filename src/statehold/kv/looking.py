"""A store of pages, looked at from outside: nothing is changed, and no seat is taken.

Invariants: a store may be in use. A page that is written or removed meanwhile is not reported.
Not here: the store itself (store).
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from statehold import _core
from statehold.errors import UsageError
from statehold.kv.page import HEADER_BYTES, Header, whole_blocks
from statehold.kv.tiers import Geometry


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

    Raises UsageError if the directory is no store of pages.
    """
    root = Path(path)
    try:
        geometry = Geometry(**json.loads((root / "store.json").read_bytes())["geometry"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "give the directory of a PageStore"
        facts = {"path": os.fspath(root)}
        raise UsageError("the directory is no store of pages", facts=facts, hint=hint) from error
    seen = PagesSeen(geometry)
    for segment in sorted(root.glob("segment-*")):
        _look_at(segment, seen, verify=verify)
    seen.file_bytes = sum(each.stat().st_blocks * 512 for each in root.iterdir())
    return seen


def _look_at(segment: Path, seen: PagesSeen, *, verify: bool) -> None:
    size = seen.geometry.slot_bytes
    with open(segment, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for at in range(0, len(mapped) - HEADER_BYTES + 1, size):
                raw = mapped[at : at + HEADER_BYTES]
                header = Header.decode(raw)
                payload = at + HEADER_BYTES
                if header is None:
                    is_bad = raw != bytes(HEADER_BYTES)
                else:
                    end = payload + whole_blocks(header.nbytes)
                    is_bad = verify and _core.xxh3_64(mapped[payload:end]) != header.checksum
                if is_bad:
                    seen.bad.append(f"{segment.name} at {at}")
                elif header is not None:
                    seen.pages[header.identity.hex()] += 1
                    seen.payload_bytes += header.nbytes
