"""Small staging memory, ways to stand between the store and its file system, and Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import statehold
from statehold import Io
from statehold.process.worker import Thread
from support.inside import inside

# Two buffers of 1 MiB: any state of a few MiB cannot be staged before its file is attached.
SMALL: dict[str, Any] = {"staging_bytes": "2MiB", "io": Io(buffer_bytes="1MiB", copy_threads=2)}
DEADLINE_S = 60.0


def small(**io: Any) -> dict[str, Any]:
    """SMALL, with other settings of its Io."""
    return {**SMALL, "io": replace(SMALL["io"], **io)}


def must(holds: object, what: object = "this does not hold, or did not happen in time") -> None:
    """An assertion that also runs under python -O, with the work or the wait in its argument.

    For all that pytest does not rewrite: modules of support, and what runs in other processes. A
    function as `what` is called only if it does not hold.
    """
    if not holds:
        raise AssertionError(what() if callable(what) else what)


class Spy:
    """Stands before a native file system: `before(operation, args)` runs ahead of every call."""

    def __init__(self, fs: Any, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._fs = fs
        self._before = before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fs, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(name, args)
            return value(*args, **kwargs)

        return call


def spy_on(ckpt: statehold.Checkpointer, before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Put a Spy between the store and the file system."""
    store = inside(ckpt).levels.store
    store.fs = Spy(store.fs, before)  # type: ignore[assignment]


class Holdup:
    """Keeps data files from being opened, so that no save gets past its staging memory."""

    def __init__(self, ckpt: statehold.Checkpointer) -> None:
        self.waiting = threading.Event()
        self.go_on = threading.Event()
        spy_on(ckpt, self._before)

    def _before(self, operation: str, _args: tuple[Any, ...]) -> None:
        if operation == "open_write":
            self.waiting.set()
            must(self.go_on.wait(DEADLINE_S))

    def release(self) -> None:
        self.go_on.set()


def ctrl_c_in_join(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Have Ctrl-C interrupt the first wait for the end of a thread; returns the waits, as they
    come."""
    join, waits = Thread.join, list[str]()

    def interrupted(thread: Thread, timeout: float | None = None) -> None:
        if thread.name == name:
            waits.append(name)
            if len(waits) == 1:
                raise KeyboardInterrupt
        join(thread, timeout)

    patch.setattr(Thread, "join", interrupted)
    return waits
