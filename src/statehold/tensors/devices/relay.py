"""Lent buffers: each is taken from the engine, filled or emptied by a device, and given back.

Invariants: a buffer is given back once the work on it has completed, and never before; also when
something fails. Of a device that has failed no work touches memory any more.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from statehold.errors import DeviceError
from statehold.tensors.devices.backends import Event
from statehold.tensors.devices.jobs import LentT
from statehold.tensors.devices.mover import PATIENCE_MAX_S, PATIENCE_S, Mover

# Buffers that are moved by one call. A device copies them for a few milliseconds; a save of
# gigabytes takes the interpreter lock a few times, and not for each buffer.
AT_ONCE = 16
_SAID_BY_A_DEVICE = re.compile(r"\b(CUDA|HIP|cuda\w+|driver) (error|failed)")


def relay(
    mover: Mover,
    take: Callable[[float | None, int], Sequence[LentT]],
    move: Callable[[Sequence[LentT]], list[Event]],
    give_back: Callable[[Sequence[LentT]], None],
    left: Callable[[], int],
) -> None:
    """Move every buffer that `take` lends; several are under way at once. take: waits for the next
    one, and lends at most so many. move: enqueues the work on these, and returns the events that
    complete with it. give_back: has no effect on buffers that are back. left: still to be lent.

    The engine may have no buffer to lend before it gets one back, so this never waits long for the
    next one while it holds any. Nor does it wait for the device while there may be a next one: what
    is enqueued late keeps an update waiting. Raises DeviceError.
    """
    moving: deque[tuple[Sequence[LentT], list[Event]]] = deque()
    lent: Sequence[LentT] = ()
    patience_s = PATIENCE_S
    with named_failures(), mover.using():
        try:
            with mover.finishing():
                while True:
                    lent = take(patience_s if moving else None, AT_ONCE)
                    patience_s = min(2 * patience_s, PATIENCE_MAX_S)
                    if lent:
                        if not moving:
                            mover.waits_since = time.monotonic()
                        moving.append((lent, []))  # before anything can fail: it is given back
                        moving[-1][1].extend(move(lent))
                    elif not moving:
                        return
                    while moving and _is_there(mover, moving[0][1], wait=left() == 0):
                        give_back(moving[0][0])
                        moving.popleft()  # Ctrl-C before it: they are given back again
                        mover.waits_since = time.monotonic() if moving else None
                        patience_s = PATIENCE_S
        finally:
            lent = ()  # an error keeps this frame: it must not keep a buffer
            while moving:
                give_back(moving.popleft()[0])


def _is_there(mover: Mover, events: list[Event], *, wait: bool) -> bool:
    """Whether the work on a buffer has completed; wait: until it has."""
    for event in events:
        if wait:
            mover.wait_for(event)
        elif not mover.backend.is_complete(event):
            return False
    return True


@contextmanager
def named_failures(*, memory: bool = True) -> Iterator[None]:
    """What torch raises when a device fails, as a DeviceError; other errors as they are.

    memory: whether a device without memory counts as one that has failed.
    """
    try:
        yield
    except RuntimeError as error:
        is_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not _is_of_a_device(error) or (is_of_memory and not memory):
            raise
        raise DeviceError(
            "a device failed while bytes were copied from it or to it",
            facts={"cause": str(error).partition("\n")[0]},
            hint="an earlier operation on the device may have caused this error. If everything "
            "on the device fails from now on, start the process again and restore",
        ) from error


def _is_of_a_device(error: RuntimeError) -> bool:
    is_named = isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError)
    return is_named or _SAID_BY_A_DEVICE.search(str(error)) is not None
