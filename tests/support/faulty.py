"""A process whose libc fails, does less than asked, or waits, as a test asks (faulty.c).

The compiled library is preloaded into a process and driven from inside of it: a Faults arms one
rule, for the calls of some functions on the paths of one run. What io_uring does goes past libc, so
data files are only reached with backend="threads"; everything else is reached with both.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.faults import DEADLINE_S, must

SOURCE = Path(__file__).with_suffix(".c")
COUNT, FAIL, CUT, HOLD, INTERRUPT, SKIP = range(6)


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def compile_into(folder: Path) -> Path:
    """The library, built with the compiler of this machine."""
    library = folder / "faulty.so"
    command = [compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    """The library as this process has it loaded."""
    loaded = ctypes.CDLL(os.environ["LD_PRELOAD"])
    loaded.faulty_set_clock.argtypes = [ctypes.c_longlong]
    return loaded


class Fault:
    """The rule that is armed: what has come of it so far."""

    @property
    def calls(self) -> int:
        return int(_library().faulty_calls())

    @property
    def fired(self) -> int:
        return int(_library().faulty_fired())

    def wait_fired(self) -> None:
        must(_library().faulty_wait_fired(int(DEADLINE_S)) > 0, "no call was held")

    def release(self) -> None:
        """Let go whoever is held; the rule is over."""
        _library().faulty_disarm()


def arm(functions: str, path: object, kind: int, *, nth: int = 0, value: int = 0) -> Fault:
    """As `fault`, for as long as this process and its forks live."""
    _library().faulty_arm(functions.encode(), str(path).encode(), nth, kind, value)
    return Fault()


@contextmanager
def fault(
    functions: str, path: object, kind: int = COUNT, *, nth: int = 0, value: int = 0
) -> Iterator[Fault]:
    """Let the `nth` call (0: every one) of `functions` on a path that holds `path` meet `kind`.

    value: the errno of FAIL and INTERRUPT, the most bytes of CUT.
    """
    arm(functions, path, kind, nth=nth, value=value)
    try:
        yield Fault()
    finally:
        _library().faulty_disarm()


def move_clock(seconds: int) -> None:
    """Let the wall clock show the time of this many seconds later."""
    _library().faulty_set_clock(seconds)
