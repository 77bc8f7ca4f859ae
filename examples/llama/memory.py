"""A limit of the memory of a run, which the kernel enforces: RLIMIT_DATA.

It counts private writable memory, touched or not: weights, gradients, buffers, stacks of threads.
It counts no page cache. What goes beyond gets ENOMEM, and torch raises an error. Leaves to the
caller what the limit is.
"""

from __future__ import annotations

import resource
from pathlib import Path


def data_bytes() -> int:
    """What the limit counts now, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def limit_memory(nbytes: int) -> None:
    """At most `nbytes` in all, from now on."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
