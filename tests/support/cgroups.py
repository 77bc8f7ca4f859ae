"""Memory control groups for tests, of version 1 or 2: a script joins one by its own hand.

The script's first lines are JOIN, with the path of the group as its first word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

JOIN = 'import os, sys; open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))'
_ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
          (Path("/sys/fs/cgroup"), "memory.max"))  # fmt: skip


def why_no_group() -> str | None:
    """What stands in the way of making one here."""
    try:
        with memory_group("try", 1 << 30):
            return None
    except OSError as error:
        return f"a memory control group cannot be made: {error}"


@contextmanager
def memory_group(name: str, limit_bytes: int, *inner: str) -> Iterator[str]:
    """A group with a limit; or a group inside it that has none of its own."""
    root, limit = next((each for each in _ROOTS if (each[0] / each[1]).exists()), _ROOTS[1])
    made = [root / f"statehold-test-{os.getpid()}-{name}"]
    made += [made[0].joinpath(*inner[: index + 1]) for index in range(len(inner))]
    try:
        for each in made:
            each.mkdir()
        (made[0] / limit).write_text(str(limit_bytes))
        yield str(made[-1])
    finally:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()
