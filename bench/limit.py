"""Limit: what the storage and the memory of this machine can do, with nothing in the way.

Invariants: O_DIRECT, 16 MiB blocks, 32 in flight, as many bytes as the state has: writing a new
file (preallocated), overwriting an allocated one, reading; fsync included in the writes. By the
engine's own raw mode where it is built and by fio where it is installed: the denominators are the
better of the two. Beside them, what plain threads reach that also copy each block (`copied`). That
is a comparison and no bound: a library that overlaps more can be faster. Memory copy between warm
pages with one and two threads. Also calibrates the compute of a training step.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.case import Case
from bench.harness import GB, drop_caches
from bench.peers import Unavailable
from bench.state import build
from bench.train import Compute

BLOCK_BYTES = 16 << 20
DEPTH = 32
COPY_BYTES = 1 << 30
# Of copied(): its blocks, the memory that they are copied through, and how many threads it tries.
COPIED_BYTES = 2 << 20
COPIED_MEMORY = 256 << 20
COPIERS = (3, 6)


def measure(case: Case) -> dict[str, Any]:
    state_bytes = build(case.size).total_bytes()
    file_bytes = max(BLOCK_BYTES, -(-state_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    storage = {}
    for name, found in (
        ("native", native(case.path, file_bytes, gently=case.smoke)),
        ("fio", _fio(case, file_bytes)),
    ):
        if found is not None:
            storage[name] = found
    if not storage:
        raise Unavailable("neither statehold._core nor fio is here to measure the storage")
    copy_bytes = BLOCK_BYTES if case.smoke else COPY_BYTES
    return {
        "bytes": file_bytes,
        "storage": storage,
        "copied": copied(case.path, file_bytes, 1, gently=case.smoke),
        "memory_copy": {str(threads): _copy(copy_bytes, threads) for threads in (1, 2)},
        "work": Compute().calibrate(case.step_s),
    }


def native(directory: Path, file_bytes: int, gently: bool) -> dict[str, float] | None:
    """GB/s by the engine's raw mode, for whole blocks; None where it is not built."""
    try:
        from statehold import _core
    except ImportError:
        return None
    path = str(directory / "limit.native")
    fs = _core.open_fs("auto", DEPTH)
    try:
        fresh = _core.raw_write(fs, path, file_bytes, BLOCK_BYTES, DEPTH, False)
        over = _core.raw_write(fs, path, file_bytes, BLOCK_BYTES, DEPTH, True)
        drop_caches(directory, gently)
        read = _core.raw_read(fs, path, BLOCK_BYTES, DEPTH)
    finally:
        fs.close()
        Path(path).unlink(missing_ok=True)
    rates = {"fresh": fresh, "overwrite": over, "read": read}
    return {key: file_bytes / seconds / GB for key, seconds in rates.items()}


class _Copier:
    """Threads that each move one block after the other: directly between a file and a buffer, and
    by `copies` copies between that buffer and the memory of a caller. Nothing is verified."""

    def __init__(self, path: Path, file_bytes: int, copies: int) -> None:
        self._path, self._nbytes = path, file_bytes
        self._mine = threading.local()
        # What a host shares, then what the caller alone has: mapped and written once.
        shared = [mmap.mmap(-1, COPIED_MEMORY) for _ in range(copies - 1)]
        alone = [self._huge(COPIED_MEMORY) for _ in range(min(1, copies))]
        self._memory = [ctypes.c_char.from_buffer(each) for each in shared + alone]
        self._at = [ctypes.addressof(each) for each in self._memory]
        for address in self._at:
            ctypes.memset(address, 1, COPIED_MEMORY)

    @staticmethod
    def _huge(nbytes: int) -> mmap.mmap:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _buffer(self) -> tuple[mmap.mmap, int]:
        if not hasattr(self._mine, "buffer"):
            self._mine.buffer = self._huge(COPIED_BYTES)
            self._mine.at = ctypes.addressof(ctypes.c_char.from_buffer(self._mine.buffer))
        return self._mine.buffer, self._mine.at

    def _chain(self, block: int) -> list[int]:
        """The addresses that a block passes, from the buffer on."""
        at = block * COPIED_BYTES % COPIED_MEMORY
        return [self._buffer()[1], *(address + at for address in self._at)]

    def _read(self, fd: int, block: int) -> None:
        os.preadv(fd, [self._buffer()[0]], block * COPIED_BYTES)
        chain = self._chain(block)
        for source, target in pairwise(chain):
            ctypes.memmove(target, source, COPIED_BYTES)

    def _write(self, fd: int, block: int) -> None:
        chain = self._chain(block)[::-1]
        for source, target in pairwise(chain):
            ctypes.memmove(target, source, COPIED_BYTES)
        os.pwritev(fd, [self._buffer()[0]], block * COPIED_BYTES)

    def _seconds(self, move: Callable[[int, int], None], threads: int) -> float:
        begin = time.perf_counter()
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._nbytes)
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda block: move(fd, block), range(self._nbytes // COPIED_BYTES)))
            if move == self._write:
                os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - begin

    def measure(self, threads: int, gently: bool) -> dict[str, float]:
        """GB/s, as native() has them."""
        try:
            fresh, over = (self._seconds(self._write, threads) for _ in range(2))
            drop_caches(self._path.parent, gently)
            read = self._seconds(self._read, threads)
        finally:
            self._path.unlink(missing_ok=True)
        rates = {"fresh": fresh, "overwrite": over, "read": read}
        return {key: self._nbytes / seconds / GB for key, seconds in rates.items()}


def copied(directory: Path, file_bytes: int, copies: int, *, gently: bool) -> dict[str, float]:
    """GB/s of whole blocks that are also copied so many times, with as many threads as are best.
    Empty where the file system refuses direct I/O."""
    copier = _Copier(directory / "limit.copied", file_bytes, copies)
    try:
        found = [copier.measure(threads, gently) for threads in COPIERS]
    except OSError:
        return {}
    return {key: max(each[key] for each in found) for key in found[0]}


def _fio(case: Case, file_bytes: int) -> dict[str, float] | None:
    """GB/s by fio; None where it is not installed or refused.

    Registered buffers double its reads here, but need more locked memory than some users may have.
    """
    if shutil.which("fio") is None:
        return None
    for buffers in ("--fixedbufs=1", "--fixedbufs=0"):
        path = case.path / "limit.fio"
        try:
            rates = {
                "fresh": _fio_job(path, file_bytes, "write", buffers),
                "overwrite": _fio_job(path, file_bytes, "write", buffers),
            }
            drop_caches(case.path, gently=case.smoke)
            return rates | {"read": _fio_job(path, file_bytes, "read", buffers)}
        except (subprocess.CalledProcessError, ValueError):
            continue  # refused: locked memory, io_uring or O_DIRECT
        finally:
            path.unlink(missing_ok=True)
    return None


def _fio_job(path: Path, file_bytes: int, direction: str, buffers: str) -> float:
    words = ["fio", "--name=limit", f"--filename={path}", f"--rw={direction}", "--direct=1"]
    words += ["--ioengine=io_uring", f"--bs={BLOCK_BYTES}", f"--iodepth={DEPTH}", buffers]
    words += [
        f"--size={file_bytes}",
        "--fallocate=posix",
        "--scramble_buffers=0",
        "--output-format=json",
    ]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0][direction]
    begin = time.perf_counter()
    if direction == "write":
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = max(job["runtime"], 1) / 1000 + time.perf_counter() - begin
    return float(job["io_bytes"] / seconds / GB)


def _copy(copy_bytes: int, threads: int) -> float:
    """GB/s of the best of three copies between warm pages."""
    torch.set_num_threads(threads)
    source = torch.ones(copy_bytes, dtype=torch.uint8, device="cpu")
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return copy_bytes / best / GB
