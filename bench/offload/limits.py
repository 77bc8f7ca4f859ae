"""What a path can do: the seconds in which it writes and reads so many bytes.

Invariants: a limit is measured on the directory of the case, with as many bytes. One allocated file
is overwritten while another one is read, or one after the other if that is faster. Both are
O_DIRECT, as the engine's raw mode does it. A path with a RATE has this as its limit.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from bench.offload.cases import directory_of, rate_of
from statehold import _core

BUFFER_BYTES, DEPTH = 16 << 20, 32


def bandwidth(path: str, each_way: int) -> float:
    """Bytes a second of a path that reads `each_way` bytes and writes as many."""
    return rate_of(path) or 2 * each_way / both_ways_s(directory_of(path), each_way)


def both_ways_s(directory: str, nbytes: int) -> float:
    whole = max(BUFFER_BYTES, nbytes // BUFFER_BYTES * BUFFER_BYTES)
    with (
        contextlib.closing(_core.open_fs()) as fs,
        tempfile.TemporaryDirectory(dir=directory) as folder,
    ):
        one, other = f"{folder}/one", f"{folder}/other"

        def write(path: str, reuse: bool) -> float:
            return _core.raw_write(fs, path, whole, BUFFER_BYTES, DEPTH, reuse)

        def read(path: str) -> float:
            return _core.raw_read(fs, path, BUFFER_BYTES, DEPTH)

        for path in (one, other):
            write(path, False)
        apart_s = write(one, True) + read(other)
        begin = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            for each in (pool.submit(write, one, True), pool.submit(read, other)):
                each.result()
        together_s = time.perf_counter() - begin
    return min(apart_s, together_s) * nbytes / whole
