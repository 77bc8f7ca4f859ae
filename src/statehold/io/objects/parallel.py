"""Calls on threads of their own: several at once, or one whose end nobody has to wait for.

Invariants: when side_by_side() or move() returns or raises, none of its work is under way any more,
so the caller may use its memory again. The end of the program waits for no call, because a request
to a store that never answers takes minutes. There is no pool, so a fork needs nothing.
Not here: how a part is moved (client, checkpoint/levels/hosts/remote).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

# Bytes of a file from an offset on, and their destination in memory.
Extent = tuple[int, memoryview]

POLL_S = 0.1

T = TypeVar("T")


def apart(call: Callable[[], T], look: Callable[[float], None] = lambda _: None) -> T:
    """The result of `call`, on a thread of its own.

    look: called every POLL_S with the seconds so far. What it raises, or a signal's handler, ends
        the waiting: the call goes on alone, and its result is dropped.
    """
    (answer,) = _begun([call], 1)
    begin_s = time.monotonic()
    try:
        while not wait([answer], POLL_S).done:
            look(time.monotonic() - begin_s)
        return answer.result()
    finally:
        del answer  # which has the error, whose traceback has this


def side_by_side(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """The results of the calls, in order; raises the first exception of a call."""
    if len(calls) <= 1:  # without the cost of another thread
        return [call() for call in calls]
    running = _begun(calls, threads)
    try:
        return [each.result() for each in running]
    finally:
        for each in running:
            each.cancel()
        wait(running)


def move(
    targets: Sequence[Extent],
    part_bytes: int,
    move_part: Callable[[int, memoryview], None],
    threads: int,
) -> None:
    """Call `move_part` for each part of `targets`, of `part_bytes` at most."""
    parts = [
        partial(move_part, begin + at, flat[at : at + part_bytes])
        for begin, memory in targets
        for flat in [memory.cast("B")]
        for at in range(0, len(flat), part_bytes)
    ]
    side_by_side(parts, threads)


def _begun(calls: Sequence[Callable[[], T]], threads: int) -> list[Future[T]]:
    """Begin the calls, in order, on up to `threads` threads."""
    futures: list[Future[T]] = [Future() for _ in calls]
    left = deque(zip(futures, calls, strict=True))

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                _run(*left.popleft())

    for _ in range(min(threads, len(calls))):
        try:
            threading.Thread(target=work, name="statehold-apart", daemon=True).start()
        except RuntimeError:  # the interpreter ends, and starts no threads any more
            work()
    return futures


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, call  # the traceback of the error has them
