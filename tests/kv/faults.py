"""A store of pages under faults, by seed: what comes back is right, or it does not come back.

    PYTHONPATH=tests python -m kv.faults SEEDS [--first N] [--jobs N]    a campaign, its figures

A seed draws a store, puts and gets, and one fault:

    flipped bit    anywhere in a segment, or in the index
    swapped        two slots change places, or one has a copy of another
    torn slot      a slot whose blocks are partly of another page, or zeros
    truncated      a segment is cut anywhere
    lost           a segment is gone, or the index
    entries        the index is gone, and entries are damaged, older than their slots, or of others
    ENOSPC         the disk has room for some segments
    EIO            reads and writes fail now and then
    beside         a reader beside a writer that evicts, in one store that both have open
    power          each block that was written since the last flush is there or not, memory is gone
    slow           a job ends after the time of its call

Invariants: a fault counts only if it has happened. The fault lies in files, or in what the engine
answers: the engine itself has tests of its own (tests/sim, tests/conformance). A call that takes
longer than HANG_S has hung.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from statehold._core import PAGE_ENTRY_BYTES
from statehold.errors import NoSpaceError, StorageError
from statehold.kv import PageStore, PageVerdict, opened
from statehold.kv.opened import OpenStore
from statehold.kv.page import slot_bytes
from statehold.kv.tiers import FileTier, Geometry
from support.pages import key, page

HANG_S = 30.0
SIZES = (1000, 4096, 9000, 20_000)
MEMORY_SLOTS = 12
FILE_SLOTS = 40


@dataclass
class World:
    """The store of a seed, and what has become of its pages."""

    path: Path
    dice: random.Random
    nbytes: int
    counts: Counter[str] = field(default_factory=Counter)

    def open(self) -> PageStore:
        slot = slot_bytes(self.nbytes)
        return PageStore(
            self.path,
            page_bytes=self.nbytes,
            capacity=(FILE_SLOTS + 8) * slot,
            memory=MEMORY_SLOTS * slot,
            deadline_s=HANG_S,
        )

    def put(self, store: PageStore, numbers: list[int], after: int | None = None) -> None:
        pages, before = [page(n, self.nbytes) for n in numbers], time.monotonic()
        batch = store.put(
            list(map(key, numbers)), pages, after=None if after is None else key(after)
        )
        self.count(batch.wait(), before)

    def get(self, store: PageStore, numbers: list[int], deadline_s: float = HANG_S) -> None:
        into, before = [bytearray(self.nbytes) for _ in numbers], time.monotonic()
        found = store.get([key(n) for n in numbers], into, deadline_s=deadline_s).wait()
        self.count(found, before)
        for number, verdict, got in zip(numbers, found, into, strict=True):
            if verdict is PageVerdict.HIT and got != page(number, self.nbytes):
                self.counts["WRONG"] += 1

    def count(self, found: list[PageVerdict], before: float) -> None:
        """LATE alone is no hang: at once, it says that pages on their way have all the memory."""
        self.counts.update(each.value for each in found)
        if time.monotonic() - before >= HANG_S:
            self.counts["HUNG"] += 1

    def work(self, store: PageStore, rounds: int, first: int = 0) -> None:
        """Put and get pages of prefixes, more than the files have slots for."""
        for _ in range(rounds):
            begin = first + self.dice.randrange(12) * 8
            count = self.dice.randrange(1, 9)
            self.put(store, list(range(begin, begin + count)), begin - 1 if begin else None)
            self.get(store, [first + self.dice.randrange(100) for _ in range(6)])

    def segments(self) -> list[Path]:
        return [each for each in sorted(self.path.glob("segment-*")) if each.stat().st_size]

    def slots(self) -> list[tuple[Path, int]]:
        """Where pages are."""
        size, found = slot_bytes(self.nbytes), []
        for segment in self.segments():
            raw = segment.read_bytes()
            found += [
                (segment, at) for at in range(0, len(raw), size) if raw[at : at + 8] == b"SHKVPAGE"
            ]
        return found


# -- faults in the files of a closed store ---------------------------------------------------------


def _write(path: Path, at: int, raw: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(raw)


def _flip(world: World) -> None:
    where, at = world.dice.choice(world.slots())
    at += world.dice.randrange(slot_bytes(world.nbytes))
    if world.dice.random() < 0.3:
        where = world.path / "index"
        at = world.dice.randrange(where.stat().st_size)
    with open(where, "rb") as file:
        file.seek(at)
        raw = file.read(1)[0]
    _write(where, at, bytes([raw ^ 1 << world.dice.randrange(8)]))


def _swap(world: World) -> None:
    size = slot_bytes(world.nbytes)
    (one, first), (two, second) = world.dice.sample(world.slots(), 2)
    raw = one.read_bytes()[first : first + size], two.read_bytes()[second : second + size]
    _write(two, second, raw[0])
    if world.dice.random() < 0.7:
        _write(one, first, raw[1])


def _tear(world: World) -> None:
    size = slot_bytes(world.nbytes)
    (one, first), (two, second) = world.dice.sample(world.slots(), 2)
    other = two.read_bytes()[second : second + size] if world.dice.random() < 0.7 else bytes(size)
    cut = world.dice.randrange(1, size // 512) * 512  # what a disk writes at once
    _write(one, first + cut, other[cut:]) if world.dice.random() < 0.5 else _write(
        one, first, other[:cut]
    )


def _truncate(world: World) -> None:
    segment = world.dice.choice(world.segments())
    os.truncate(segment, world.dice.randrange(segment.stat().st_size))


def _lose(world: World) -> None:
    world.dice.choice([*world.segments(), world.path / "index"]).unlink()


def _entries(world: World) -> None:
    """Of a store whose table is made again from them."""
    geometry = Geometry.read(os.fspath(world.path))
    for segment in world.segments():
        rows = geometry.segment_slots
        for _ in range(world.dice.randrange(4)):
            one, two = (geometry.entries_at + PAGE_ENTRY_BYTES * world.dice.randrange(rows)
                        for _ in range(2))  # fmt: skip
            other = world.dice.choice(world.segments()).read_bytes()
            raw = bytearray(other[two : two + PAGE_ENTRY_BYTES])
            raw[world.dice.randrange(len(raw))] ^= world.dice.choice([0, 0, 1 << 5])
            _write(segment, one, raw)
    (world.path / "index").unlink()


DAMAGE: dict[str, Callable[[World], None]] = {
    "flipped bit": _flip,
    "swapped": _swap,
    "torn slot": _tear,
    "truncated": _truncate,
    "lost": _lose,
    "entries": _entries,
}


def _damaged(world: World, kind: str) -> None:
    with world.open() as store:
        world.work(store, 6)
    DAMAGE[kind](world)
    world.counts[kind] += 1
    with world.open() as store:
        world.get(store, list(range(100)))
        world.work(store, 3)
    with world.open() as store:
        world.get(store, list(range(100)))


# -- faults of a disk ------------------------------------------------------------------------------


class _Small:
    """A file system that has room for some segments."""

    def __init__(self, fs: Any, room: int, counts: Counter[str]) -> None:
        self._fs, self._room, self._counts = fs, room, counts

    def open_write(self, path: str, nbytes: int, *, reuse: bool) -> Any:
        if int(path[-6:]) >= self._room:
            self._counts["ENOSPC"] += 1
            raise NoSpaceError("cannot write", errno=errno.ENOSPC, path=path)
        return self._fs.open_write(path, nbytes, reuse=reuse)

    def open_read(self, path: str, *, direct: bool = False) -> Any:
        return self._fs.open_read(path, direct=direct)


def _without_room(world: World, _: str) -> None:
    room = world.dice.randrange(4)
    if not room:  # no page is ever written: the store is memory
        world.counts["ENOSPC everywhere"] += 1

    class Tier(FileTier):
        def __init__(self, fs: Any, root: str, geometry: Any) -> None:
            small: Any = _Small(fs, room, world.counts)
            super().__init__(small, root, geometry)

    with mock.patch.object(opened, "FileTier", Tier), world.open() as store:
        world.work(store, 10)
    with world.open() as store:
        world.get(store, list(range(100)))
        world.work(store, 3)


@contextmanager
def _jobs(changed: Callable[[Callable[[], Any], bool], Any]) -> Iterator[None]:
    begin = OpenStore.job

    def job(self: OpenStore, moves: Any, *, is_write: bool = False) -> Any:
        return changed(lambda: begin(self, moves, is_write=is_write), is_write)

    with mock.patch.object(OpenStore, "job", job):
        yield


def _failing(world: World, _: str) -> None:
    often = world.dice.choice([0.1, 0.5, 1.0])

    def changed(begin: Callable[[], Any], is_write: bool) -> Any:
        if world.dice.random() < often:
            world.counts["EIO"] += 1
            if is_write and world.dice.random() < 0.5:  # some of it is on the disk
                begin().wait(None)
            raise StorageError("cannot move", errno=errno.EIO, path="segment")
        return begin()

    with _jobs(changed), world.open() as store:
        world.work(store, 8)
    with world.open() as store:
        world.get(store, list(range(100)))
        with _jobs(changed):
            world.work(store, 3)
        world.work(store, 2)


class _Late:
    """A job that ends once its call was late."""

    def __init__(self, job: Any) -> None:
        self._job, self._is_first = job, True

    def wait(self, timeout: float | None) -> bool:
        if self._is_first and timeout is not None:
            self._is_first = False
            return False
        return bool(self._job.wait(timeout))

    def checksums(self) -> bytes:
        return bytes(self._job.checksums())

    def cancel(self) -> None:
        self._job.cancel()


def _slow(world: World, _: str) -> None:
    with world.open() as store:
        world.work(store, 6)

    def changed(begin: Callable[[], Any], is_write: bool) -> Any:
        if is_write or world.dice.random() < 0.5:
            return begin()
        world.counts["slow"] += 1
        return _Late(begin())

    with _jobs(changed), world.open() as store:
        for _ in range(6):
            world.get(store, [world.dice.randrange(100) for _ in range(6)], deadline_s=0.001)
            world.put(store, [world.dice.randrange(100, 200)])
        world.get(store, [100, 101, 102], deadline_s=0.001)


# -- others beside it ------------------------------------------------------------------------------


def _beside(world: World, _: str) -> None:
    """The writer has pages of its own, so that it evicts those that are read."""
    with world.open() as store:
        world.work(store, 4)
        reader = World(world.path, random.Random(world.dice.random()), world.nbytes)

        def read() -> None:
            with reader.open() as other:
                for _ in range(10):
                    reader.get(other, [reader.dice.randrange(130) for _ in range(8)])

        thread = threading.Thread(target=read)
        thread.start()
        for first in range(100, 200, 10):
            world.put(store, list(range(first, first + 10)))
        thread.join(HANG_S)
        world.counts["HUNG"] += thread.is_alive()
        world.counts += reader.counts
        world.counts["beside"] += store.stats()["evicted"] > 0


def _without_power(world: World, _: str) -> None:
    with world.open() as store:
        world.work(store, 4)
        store.flush()
        before = {each.name: each.read_bytes() for each in world.path.iterdir()}
        world.work(store, 3)
    for each in [*world.segments(), world.path / "index"]:
        old, new = before.get(each.name, b""), bytearray(each.read_bytes())
        old = old.ljust(len(new), b"\0")
        for at in range(0, len(new), 4096):
            if new[at : at + 4096] != old[at : at + 4096] and world.dice.random() < 0.5:
                new[at : at + 4096] = old[at : at + 4096]
                world.counts["power"] += 1
        each.write_bytes(new)
    if world.dice.random() < 0.3:
        (world.path / "index").unlink()
    with mock.patch.object(opened, "boot", return_value=12345), world.open() as store:
        world.get(store, list(range(100)))
        world.work(store, 3)


FAULTS: dict[str, Callable[[World, str], None]] = {
    **dict.fromkeys(DAMAGE, _damaged),
    "ENOSPC": _without_room,
    "EIO": _failing,
    "beside": _beside,
    "power": _without_power,
    "slow": _slow,
}


def run(seed: int, folder: Path) -> tuple[str, Counter[str]]:
    """What happens in the world of a seed. Raises what the store must not raise."""
    kind = list(FAULTS)[seed % len(FAULTS)]
    dice = random.Random(f"page faults {seed}")
    world = World(folder / f"store-{seed}", dice, dice.choice(SIZES))
    FAULTS[kind](world, kind)
    return kind, world.counts


def _run(seed: int, folder: str) -> tuple[int, str, Counter[str], float]:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            kind, counts = run(seed, Path(own))
        except Exception as error:
            kind, counts = "?", Counter({f"RAISED {error!r}"[:200]: 1})
    return seed, kind, counts, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kv.faults", description=__doc__)
    parser.add_argument("seeds", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dir", default="/dev/shm")
    args = parser.parse_args()
    worlds, total, longest, bad = Counter[str](), Counter[str](), 0.0, list[int]()
    with ProcessPoolExecutor(args.jobs) as pool:
        seeds = range(args.first, args.first + args.seeds)
        for seed, kind, counts, took in pool.map(_run, seeds, [args.dir] * len(seeds), chunksize=8):
            worlds[kind] += 1
            total += counts
            longest = max(longest, took)
            if any(each.isupper() or each.startswith("RAISED") for each in counts if each not in
                   ("EIO", "ENOSPC")):  # fmt: skip
                bad.append(seed)
                print(f"seed {seed} ({kind}): {dict(counts)}", flush=True)
    print(f"{args.seeds} seeds from {args.first} on; the longest took {longest:.1f} s")
    for name, of in (("worlds", worlds), ("faults and verdicts", total)):
        print(f"{name}: " + ", ".join(f"{each} {count}" for each, count in sorted(of.items())))
    print(f"wrong pages {total['WRONG']}, hangs {total['HUNG']}, seeds with errors {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
