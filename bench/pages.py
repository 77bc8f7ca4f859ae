"""Pages of a KV cache: what a PageStore stores and loads, beside the raw disk of the same run.

    python -m bench.pages PATH [--total 1GiB] [--repeat 5] [--page 1MiB ...]
                                                               by page size: store, load, lookup
    python -m bench.pages PATH --pages 1000000                 the tables of very many pages

A store ends when the pages are durable. A load comes from the disk: the store is closed in between,
so its memory is gone, and it reads with O_DIRECT. Both are verified. The limit is that of the same
bytes in whole blocks (limit.native). A page needs two copies: between the disk and memory that a
host shares, and between that and the caller. `copied` is the share of the limit that threads reach
with these two and nothing else (limit.copied). `files` is a file for each page. All are measured in
turns with the store. With --vllm it is vLLM's `fs` tier, which then has to be installed. Medians.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.harness import GB, drop_caches
from bench.limit import copied, native
from statehold._core import PAGE_ENTRY_BYTES, PageTable
from statehold.kv import PageStore, PageVerdict
from statehold.kv.tiers import Geometry
from statehold.units import format_bytes, format_seconds, parse_bytes

PAGE_BYTES = ("128KiB", "360KiB", "1MiB", "8MiB")
BATCH_BYTES = 32 << 20
KEYS = 1024


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Pages:
    """`count` pages of so many bytes, whose bytes come from one block of random ones."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self._noise = np.random.default_rng(1).integers(0, 256, nbytes + (1 << 20), dtype=np.uint8)
        self.batch = max(1, BATCH_BYTES // nbytes)

    def page(self, number: int) -> memoryview:
        begin = number * 64 % (1 << 20)
        return memoryview(self._noise[begin : begin + self.nbytes])

    def batches(self) -> list[range]:
        ends = range(0, self.count, self.batch)
        return [range(first, min(first + self.batch, self.count)) for first in ends]

    def open(self, path: Path, memory: int) -> PageStore:
        capacity = (self.nbytes + 8192) * (self.count + 1) * 5 // 4 + (64 << 20)
        return PageStore(path, page_bytes=self.nbytes, capacity=capacity, memory=memory)

    def store(self, path: Path) -> float:
        """Seconds until all pages are durable."""
        with self.open(path, 4 * BATCH_BYTES) as pages:
            begin = time.perf_counter()
            for batch in self.batches():
                views = [self.page(number) for number in batch]
                put = pages.put(list(map(key, batch)), views, deadline_s=60)
                _expect(put.wait(), PageVerdict.STORED)
            pages.flush()
            return time.perf_counter() - begin

    def load(self, path: Path) -> float:
        """Seconds until all pages are in memory of the caller."""
        with self.open(path, 2 * BATCH_BYTES) as pages:
            into = [bytearray(b"1" * self.nbytes) for _ in range(2 * self.batch)]
            begin, before = time.perf_counter(), None
            for turn, batch in enumerate(self.batches()):
                half = into[turn % 2 * self.batch :][: len(batch)]
                now = pages.get(list(map(key, batch)), half, deadline_s=60)
                if before is not None:
                    _expect(before.wait(), PageVerdict.HIT)
                before = now
            if before is not None:
                _expect(before.wait(), PageVerdict.HIT)
            return time.perf_counter() - begin

    def look_up(self, path: Path, count: int) -> float:
        """Seconds of contains() for so many keys, half of them there."""
        keys = [key(number * 2 * self.count // count) for number in range(count)]
        with self.open(path, BATCH_BYTES) as pages:
            taken = []
            for _ in range(21):
                begin = time.perf_counter()
                pages.contains(keys)
                taken.append(time.perf_counter() - begin)
            return statistics.median(taken)


class Files:
    """A file for each page, as vLLM's `fs` tier has them: one of four threads writes it directly
    under another name, renames it, and reads it directly. Nothing is verified, nothing is made
    durable, and nothing bounds the files."""

    def __init__(self, root: Path, pages: Pages) -> None:
        self.root, self.pages = root, pages
        self.whole = -(-pages.nbytes // 4096) * 4096
        self._mine = threading.local()

    def _buffer(self) -> mmap.mmap:
        if not hasattr(self._mine, "buffer"):
            self._mine.buffer = mmap.mmap(-1, self.whole)
        found: mmap.mmap = self._mine.buffer
        return found

    def _path(self, number: int) -> Path:
        name = key(number).hex()
        return self.root / name[-3:] / f"{name}.bin"

    def _write(self, number: int) -> None:
        buffer, path = self._buffer(), self._path(number)
        buffer[: self.pages.nbytes] = self.pages.page(number)
        path.parent.mkdir(exist_ok=True)
        fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.write(fd, buffer)
        os.close(fd)
        os.rename(f"{path}.tmp", path)

    def _read(self, number: int) -> None:
        fd = os.open(self._path(number), os.O_RDONLY | os.O_DIRECT)
        if os.readv(fd, [self._buffer()]) != self.whole:
            raise SystemExit("a file is too short")
        os.close(fd)

    def _seconds(self, action: Callable[[int], None]) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(action, range(self.pages.count)))
        return time.perf_counter() - begin

    def measure(self) -> tuple[float, float, float]:
        """Seconds to store and to load all pages, and to look up KEYS keys, half of them there."""
        self.root.mkdir()
        stored, loaded = self._seconds(self._write), self._seconds(self._read)
        begin = time.perf_counter()
        for number in range(KEYS):
            self._path(number * 2 * self.pages.count // KEYS).exists()
        looked_up = time.perf_counter() - begin
        shutil.rmtree(self.root)
        return stored, loaded, looked_up


class VllmTier:
    """vLLM's own `fs` tier, driven over a memoryview as its manager drives it: 32 pages a job, four
    threads each way, O_DIRECT. Nothing is verified or made durable. Its pages lie in memory that it
    shares with the engine already, so that it copies nothing."""

    def __init__(self, root: Path, pages: Pages) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self.root, self.pages, self._job = root, pages, TransferJob
        self._request = base.ReqContext(req_id="bench")
        self._keys = [
            base.make_offload_key(hashlib.sha256(key(n)).digest(), 0)
            for n in range(2 * pages.count)
        ]
        self._pool = mmap.mmap(-1, pages.batch * pages.nbytes)
        of_page = np.frombuffer(pages.page(0), dtype=np.uint8)
        chunks = np.frombuffer(self._pool, dtype=np.uint8).reshape(pages.batch, pages.nbytes)
        chunks[:] = of_page
        group = SimpleNamespace(tokens_per_block=16, layer_names=["layer"])
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
        )
        config = SimpleNamespace(
            groups=[group], parallel=parallel, canonical_layout=False, replicated_layout=False,
            model=SimpleNamespace(name="model", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self._tier = FileSystemTierManager(spec, memoryview(chunks), "fs", str(root), 4, 4)

    def _move(self, submit: Callable[[Any], None], *, is_load: bool) -> float:
        begin, waiting = time.perf_counter(), set[int]()
        for batch in self.pages.batches():
            for first in range(0, len(batch), 32):
                part = batch[first : first + 32]
                chunks = np.arange(first, first + len(part))
                keys = [self._keys[number] for number in part]
                submit(self._job(batch[first], keys, chunks, is_load, self._request))
                waiting.add(batch[first])
            while waiting:
                for done in self._tier.get_finished_jobs():
                    if not done.success:
                        raise SystemExit("vLLM's tier has failed")
                    waiting.remove(done.job_id)
                time.sleep(0.0002)
        return time.perf_counter() - begin

    def measure(self) -> tuple[float, float, float]:
        """Seconds to store and to load all pages, and to look up KEYS keys, half of them there."""
        stored = self._move(self._tier.submit_store, is_load=False)
        loaded = self._move(self._tier.submit_load, is_load=True)
        asked = [self._keys[number * 2 * self.pages.count // KEYS] for number in range(KEYS)]
        begin, left = time.perf_counter(), asked
        while left:
            found = [self._tier.lookup(each, self._request).name for each in left]
            left = [each for each, said in zip(left, found, strict=True) if said == "RETRY"]
            self._tier.on_schedule_end(None)
            time.sleep(0.0002)
        looked_up = time.perf_counter() - begin
        self._tier.shutdown()
        shutil.rmtree(self.root)
        return stored, loaded, looked_up


def _expect(verdicts: list[PageVerdict], wanted: PageVerdict) -> None:
    other = [each for each in verdicts if each is not wanted]
    if other:
        raise SystemExit(f"{len(other)} pages are {other[0]} instead of {wanted}")


def compare(root: Path, page: str, total: int, repeat: int, *, vllm: bool) -> str:
    """A row of the table."""
    pages = Pages(parse_bytes(page), max(1, total // parse_bytes(page)))
    path, ratios = root / "store", dict[str, list[float]]()
    for _ in range(repeat):
        limit = native(root, total, gently=True)
        if limit is None:
            raise SystemExit("statehold._core is not built")
        plain = copied(root, total, 2, gently=True)
        shutil.rmtree(path, ignore_errors=True)
        nbytes = pages.count * pages.nbytes
        stored, loaded = nbytes / pages.store(path) / GB, nbytes / pages.load(path) / GB
        look_up_s = pages.look_up(path, KEYS)
        shutil.rmtree(path)
        peer = (VllmTier if vllm else Files)(root / "files", pages)
        files_s, loaded_s, looked_up_s = peer.measure()
        files = [nbytes / seconds / GB for seconds in (files_s, loaded_s)]
        for name, value in {
            "store": stored,
            "of fresh": stored / limit["fresh"],
            "copied fresh": plain["fresh"] / limit["fresh"],
            "of stored": stored / files[0],
            "load": loaded,
            "of read": loaded / limit["read"],
            "copied read": plain["read"] / limit["read"],
            "of loaded": loaded / files[1],
            "look-up": 1000 * look_up_s,
            "their look-up": 1000 * looked_up_s,
        }.items():
            ratios.setdefault(name, []).append(value)
    found = {name: statistics.median(values) for name, values in ratios.items()}
    return (
        f"{page:>8}  {found['store']:7.2f}  {found['of fresh']:5.2f}  {found['copied fresh']:6.2f}"
        f"  {found['of stored']:5.2f}  {found['load']:7.2f}  {found['of read']:5.2f}"
        f"  {found['copied read']:6.2f}  {found['of loaded']:5.2f}"
        f"  {found['look-up']:6.2f}  {found['their look-up']:6.2f}"
    )


def _kill_in_a_change(path: Path) -> None:
    """Leave the table of the files as a process does that is killed while it changes the table."""
    with open(path / "index", "r+b") as file, mmap.mmap(file.fileno(), 0) as index:
        slots = int.from_bytes(index[8:16], "little")
        table = PageTable(memoryview(index), slots)
        table.begin_change()
        del table


def _cut_entries(path: Path) -> None:
    """Leave files without a table and without entries, as an earlier build has made them."""
    (path / "index").unlink()
    at = Geometry.read(str(path)).entries_at
    for segment in path.glob("segment-*"):
        os.truncate(segment, at)


def very_many(root: Path, count: int, repeat: int) -> None:
    """How long a store of so many pages opens: with its table, after a kill, and without it."""
    pages, path = Pages(512, count), root / "store"
    shutil.rmtree(path, ignore_errors=True)
    stored = pages.store(path)
    print(f"{count} pages stored in {format_seconds(stored)}, {1e6 * stored / count:.1f} us each")
    for keys in (1000, KEYS):
        print(f"lookup of {keys} keys: {1000 * pages.look_up(path, keys):.2f} ms")
    of_table = PageTable.nbytes(count) / count
    print(f"index: {of_table:.0f} bytes a page, and {PAGE_ENTRY_BYTES} of its entry")
    limit = native(root, 1 << 30, gently=True)
    if limit is not None:
        files = sum(each.stat().st_size for each in path.iterdir()) / GB
        rate = f"{limit['read']:.2f} GB/s in whole blocks (limit.native)"
        print(f"the files have {files:.2f} GB; the disk reads {rate}")
    for name, before in {
        "with its table": lambda: None,
        "after a kill in a change of its table": lambda: _kill_in_a_change(path),
        "without its table": (path / "index").unlink,
        "without its table and its entries": lambda: _cut_entries(path),
    }.items():
        taken = []
        for _ in range(repeat):
            before()
            drop_caches(path, gently=True)
            begin = time.perf_counter()
            with pages.open(path, BATCH_BYTES) as opened:
                taken.append(time.perf_counter() - begin)
                found = opened.stats()["pages"]
        spread = f"{format_seconds(min(taken))} to {format_seconds(max(taken))}"
        print(
            f"opened {name} in {format_seconds(statistics.median(taken))} ({spread}): {found} pages"
        )
    shutil.rmtree(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__)
    parser.add_argument("path", type=Path, help="a directory on the disk")
    parser.add_argument("--total", type=parse_bytes, default=1 << 30, help="bytes of all pages")
    parser.add_argument("--page", action="append", default=[], help="only this size; any number")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; medians are shown")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's `fs` tier itself")
    parser.add_argument("--pages", type=int, help="measure the tables of so many pages instead")
    given = parser.parse_args(arguments)
    given.path.mkdir(parents=True, exist_ok=True)
    if given.pages:
        very_many(given.path, given.pages, given.repeat)
        return 0
    print(f"{format_bytes(given.total)} of pages, medians of {given.repeat}; GB/s and ratios")
    peer = "vLLM" if given.vllm else "files"
    ways = (f"{way}  limit  copied  {peer}" for way in ("  store", "   load"))
    print(f"    page  {'  '.join(ways)}  lookup, ms   {peer}")
    for page in given.page or PAGE_BYTES:
        print(compare(given.path, page, given.total, given.repeat, vllm=given.vllm), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
