"""What the tests on a CUDA device share."""

from __future__ import annotations

import time

import pytest
import torch

import statehold
from support.faults import DEADLINE_S, Holdup, must
from support.inside import inside

MIB = 1 << 20
SLEEP_CYCLES = 1 << 30  # half a second of device time at 2 GHz

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Some releases of torch say so once when such an optimizer steps before its graph is captured.
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),
]


def keep_busy() -> torch.cuda.Event:
    """Give the current stream work of some tenths of a second; the event that completes with it.

    What runs then should have run before: loading a kernel for the first time waits for the device.
    """
    torch.cuda._sleep(SLEEP_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def pinned_buffers(ckpt: statehold.Checkpointer) -> list[bool]:
    """Whether CUDA has each buffer of the staging memory as pinned."""
    engine = inside(ckpt).runtime.engine
    nbytes, staging = engine.buffer_bytes, engine.staging
    # Each in a storage of its own: of a view, torch looks at the beginning of its storage.
    return [
        torch.frombuffer(staging, dtype=torch.uint8, offset=begin, count=nbytes).is_pinned()
        for begin in range(0, nbytes * engine.buffer_count, nbytes)
    ]


def pin_everything(ckpt: statehold.Checkpointer, step: int) -> None:
    """Save more than the staging memory holds, and write nothing until all of it was lent, and so
    pinned: no later save has to pin."""
    runtime = inside(ckpt).runtime
    nbytes = 2 * runtime.staging_bytes
    weights = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    holdup = Holdup(ckpt)
    save = ckpt.save(step, {"w": statehold.Gated(weights)})
    ends = time.monotonic() + DEADLINE_S
    while sum(pinned_buffers(ckpt)) * runtime.engine.buffer_bytes < runtime.staging_bytes:
        must(time.monotonic() < ends, "a buffer was not lent, or not pinned")
        time.sleep(0.01)
    holdup.release()
    save.wait("committed", DEADLINE_S)
