"""A store of pages, looked at from outside: nothing is changed, and no seat is taken.

Invariants: a store may be in use. A slot is reported as bad only if its page could be found all the
while that it was read, as the table of the store says. Without a table, any slot is.
Not here: the store itself (store).
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from statehold import _core
from statehold._core import PageTable
from statehold.kv.page import HEADER_BYTES, Header, whole_blocks
from statehold.kv.tiers import INDEX, Geometry, no_store


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
    table = _table(root, seen.geometry.slots)
    for segment in sorted(root.glob("segment-" + 6 * "[0-9]")):
        _look_at(segment, seen, table, verify=verify)
    seen.file_bytes = sum(each.stat().st_blocks * 512 for each in root.iterdir())
    return seen


def _table(root: Path, slots: int) -> PageTable | None:
    """The table of the files, which others change; None if it is lost."""
    try:
        with open(root / INDEX, "rb") as file:
            raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            table = PageTable(memoryview(raw), slots)
    except (OSError, TypeError, ValueError):
        return None
    return None if table.is_new else table


def _findable(table: PageTable | None, slot: int) -> int | None:
    """The generation of a slot whose page can be found; 0 for a slot that is in no table."""
    if table is None or slot >= table.slots:
        return 0
    generation = table.generation(slot)
    return generation if table.find(table.index(slot)) == slot else None


def _look_at(segment: Path, seen: PagesSeen, table: PageTable | None, *, verify: bool) -> None:
    if not segment.stat().st_size:
        return
    begin, size = int(segment.name[-6:]) * seen.geometry.segment_slots, seen.geometry.slot_bytes
    with open(segment, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        for slot, at in enumerate(range(0, len(raw) - HEADER_BYTES + 1, size), begin):
            generation = _findable(table, slot)
            first, payload = raw[at : at + HEADER_BYTES], at + HEADER_BYTES
            header = Header.decode(first)
            is_bad = header is None and first != bytes(HEADER_BYTES)
            if header is not None and verify:
                end = payload + whole_blocks(header.nbytes)
                is_bad = _core.xxh3_64(raw[payload:end]) != header.checksum
            if is_bad:
                if generation is not None and generation == _findable(table, slot):
                    seen.bad.append(f"{segment.name} at {at}")
            elif header is not None:
                seen.pages[header.identity.hex()] += 1
                seen.payload_bytes += header.nbytes
