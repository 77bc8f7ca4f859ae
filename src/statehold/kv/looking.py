"""A store of pages from outside: what is in it, what its processes have counted, and what goes.

Invariants: no seat is taken, so a store may be in use, and no memory is made. A slot is reported as
bad only if its page could be found all the while that it was read, as the table of the store says.
Then it is bad with anything but this page in it. Without a table, any slot with bytes is. A prune
changes the tables as a process of the store does, in short changes: a page is forgotten before its
bytes go, and its slot is free only after that. So a kill loses no other page, and who reads the
page notices by its generation.
Not here: the store itself (store).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from statehold._core import PageTable
from statehold.errors import refused
from statehold.kv.batch import COUNTED
from statehold.kv.opened import LOCK_S, held, refuse_other_host
from statehold.kv.page import HEADER_BYTES, Header
from statehold.kv.tiers import INDEX, LOCK, Geometry, boot, memory_path, no_store, slots_there
from statehold.process.file_locks import LockFile
from statehold.process.whole_files import open_regular

# Pages that go in one change, and the time between two. The processes of the store wait for a
# change, and take their turn between two.
DROP_PAGES, TURN_S = 256, 0.005


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
    seen = PagesSeen(_geometry(root))
    table = _table(f"{root}/{INDEX}", seen.geometry.slots, mmap.ACCESS_COPY)
    for number in range(seen.geometry.slots // seen.geometry.segment_slots):
        _look_at(root / f"segment-{number:06d}", seen, table, verify=verify)
    seen.file_bytes = sum(each.stat().st_blocks * 512 for each in root.iterdir())
    return seen


def counts(path: str | os.PathLike[str]) -> dict[str, dict[str, int]]:
    """By identity in hex: its pages, and what all processes have COUNTED since the index was made.
    "others": identities whose place in the index another one has. Raises as look() does, and
    UsageError without an index."""
    _, index = _opened(Path(path), mmap.ACCESS_COPY)
    return {
        name.hex() or "others": {"pages": pages, **dict(zip(COUNTED, found, strict=True))}
        for name, pages, found in index.counted()
    }


def _geometry(root: Path) -> Geometry:
    try:
        return Geometry.read(os.fspath(root))
    except FileNotFoundError as error:
        raise no_store(os.fspath(root)) from error


def _table(path: str, slots: int, access: int) -> PageTable | None:
    """A table that others change; None if it is lost, or of another build."""
    try:
        with open(path, "rb" if access == mmap.ACCESS_COPY else "r+b") as file:
            table = PageTable(memoryview(mmap.mmap(file.fileno(), 0, access=access)), slots)
    except (FileNotFoundError, TypeError, ValueError):
        return None
    return None if table.is_new else table


def _opened(root: Path, access: int) -> tuple[Geometry, PageTable]:
    geometry = _geometry(root)
    index = _table(f"{root}/{INDEX}", geometry.slots, access)
    if index is None:
        hint = "open the store with PageStore: it makes the index again from the pages"
        summary = "the index of the store of pages is lost, or of another build"
        safe = {"path": f"{root}/{INDEX}", "still safe": "all pages"}
        raise refused(summary, "an index of this build", "none", hint, **safe)
    return geometry, index


def _findable(table: PageTable | None, slot: int) -> int | None:
    """The generation of a slot whose page can be found; 0 without a table."""
    generation = 0 if table is None else table.generation(slot)
    is_found = table is None or table.find(table.index(slot)) == slot
    return generation if is_found else None


def _look_at(segment: Path, seen: PagesSeen, table: PageTable | None, *, verify: bool) -> None:
    raw: bytes | mmap.mmap = b""
    is_gone = contextlib.suppress(FileNotFoundError, ValueError)
    with is_gone, open(segment, "rb", opener=open_regular) as file:
        raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin, size = int(segment.name[-6:]) * seen.geometry.segment_slots, seen.geometry.slot_bytes
    for slot, at in enumerate(range(0, seen.geometry.entries_at, size), begin):
        if (generation := _findable(table, slot)) is None:
            continue
        first = raw[at : at + HEADER_BYTES]
        header = Header.proven(raw[at : at + size]) if verify else Header.decode(first)
        if header is not None and table is not None and header.index != table.index(slot):
            header = None  # it proves another page
        if generation != _findable(table, slot):
            continue  # it was evicted or pruned meanwhile
        if header is not None:
            seen.pages[header.identity.hex()] += 1
            seen.payload_bytes += header.nbytes
        elif table is not None or first.strip(b"\0"):
            seen.bad.append(f"{segment.name} at {at}")


# -- pages that go ---------------------------------------------------------------------------------


def prune(
    path: str | os.PathLike[str], *, identities: Sequence[bytes] = (), before_s: float = math.inf,
    to: int | None = None, is_done: bool = False,
) -> tuple[Counter[str], int]:  # fmt: skip
    """Let pages go, from files and memory: those of these identities (of all, without one) that
    were not used since `before_s`, in Unix time. Returns how many go from the files, by identity in
    hex, and the bytes that they take.

    Pages on their way to a file stay. With `to` the least used go, only from the files, and only
    until the others take at most so many bytes. is_done: False changes nothing.

    Raises UsageError, RunBusyError if another host uses the store, WaitTimeout, and OSError.
    """
    root, seconds = Path(os.path.abspath(path)), int(min(max(before_s, 0), 2**32 - 1))
    geometry, index = _opened(root, mmap.ACCESS_WRITE if is_done else mmap.ACCESS_COPY)
    size, tables, dropped = geometry.slot_bytes, [index], Counter[str]()
    keep = 0 if to is None else to // size
    if not is_done:
        copy = PageTable(memoryview(bytearray((root / INDEX).read_bytes())), geometry.slots)
        copy.mend()  # others may have changed it while it was read
        gone = copy.drop([*identities], seconds, geometry.slots, keep)
        return Counter(name.hex() for _, name in gone), len(gone) * size
    in_memory = memory_path(os.fspath(root), size)
    if to is None and (memory := _table(in_memory, slots_there(in_memory), mmap.ACCESS_WRITE)):
        tables.append(memory)
    with contextlib.closing(LockFile(f"{root}/{LOCK}")) as lock:
        for table in tables:
            left = table.pages()  # a process that puts pages meanwhile does not keep this going
            while left > 0:
                with held(lock, LOCK_S, threading.RLock()):
                    refuse_other_host(index, lock)
                    if index.boot not in (0, boot()):  # it may be older than the pages
                        index.mend()
                        index.boot = 0
                    table.begin_change()
                    gone = table.drop([*identities], seconds, min(DROP_PAGES, left), keep)
                    if table is index:
                        _punch(root, geometry, [slot for slot, _ in gone])
                        geometry.note(os.fspath(root), index, (slot for slot, _ in gone))
                        dropped.update(name.hex() for _, name in gone)
                    table.end_change()
                left = left - len(gone) if gone else 0
                time.sleep(TURN_S)
    return dropped, dropped.total() * size


def _punch(root: Path, geometry: Geometry, slots: Sequence[int]) -> None:
    """Give the bytes of free slots back to the file system, if it can take them."""
    for slot in slots:
        segment, at = divmod(slot, geometry.segment_slots)
        path, size = root / f"segment-{segment:06d}", geometry.slot_bytes
        is_lost = contextlib.suppress(OSError, ValueError)
        with is_lost, open(path, "r+b", opener=open_regular) as file:
            mmap.mmap(file.fileno(), 0).madvise(mmap.MADV_REMOVE, at * size, size)
