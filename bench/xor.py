"""What parity across hosts would compute, beside the plain copy that a copy on another host is.

`python -m bench.xor`. In processor seconds, which a busy machine changes least; in blocks of 64 KiB
so that what is combined stays in the cache. Medians. What follows from it:
docs/decisions/0007-levels-of-each-host.md.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.harness import GB

BLOCK = (64 << 10) // 8
GROUPS = (4, 8)


def rate(nbytes: int, body: Callable[[], object]) -> float:
    """GB of result a processor second."""
    taken = []
    for _ in range(5):
        begin = time.thread_time()
        body()
        taken.append(time.thread_time() - begin)
    return nbytes / GB / statistics.median(taken)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.xor", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of each member of a group")
    nbytes = parser.parse_args(arguments).mib << 20
    members = [np.full(nbytes // 8, index + 1, np.uint64) for index in range(max(GROUPS))]
    out = np.zeros(nbytes // 8, np.uint64)

    def copy() -> None:
        ctypes.memmove(out.ctypes.data, members[0].ctypes.data, nbytes)

    def combine(count: int) -> None:
        for begin in range(0, len(out), BLOCK):
            part = slice(begin, begin + BLOCK)
            found = members[0][part] ^ members[1][part]
            for member in members[2:count]:
                found ^= member[part]
            out[part] = found

    print(f"plain copy: {rate(nbytes, copy):.2f} GB a processor second")
    for group in GROUPS:
        own = rate(nbytes, lambda group=group: combine(group - 1))
        print(f"parity of {group - 1} members: {own:.2f} GB of parity a processor second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
