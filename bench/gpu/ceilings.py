"""Ceilings: what the device, the bus and the disk do with nothing in the way.

Invariants: bytes move in pieces as large as the engine's buffers, between memory that was touched
before; each rate is the best of a few rounds. On the CPU, host memory stands in for the device's.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import torch

from bench import limit
from bench.gpu import figures
from bench.gpu.device import synchronize
from bench.gpu.figures import Figure
from bench.gpu.task import Task
from bench.harness import GB
from statehold import _core
from statehold.tensors.devices.pinning import PAUSE_S
from statehold.units import GiB, KiB, MiB

__all__ = ["D2H", "FRESH", "H2D", "OVERWRITE", "READ", "disk", "pinning", "transfers"]

PIECE = 16 * MiB
SMALL, SMALL_COUNT = 4 * KiB, 20_000
ROUNDS = 3
PORTABLE = 1  # cudaHostRegisterPortable
PAUSE_MS_MAX = 20.0  # of launches while a save pins

D2H, H2D = "D2H pinned, 16 MiB pieces", "H2D pinned, 16 MiB pieces"
FRESH, OVERWRITE, READ = "disk: new file", "disk: overwrite", "disk: read"


def transfers(task: Task) -> Iterator[Figure]:
    device, nbytes = task.torch_device, task.at_most_bytes(2 * GiB)
    own = torch.ones(nbytes, dtype=torch.uint8, device=device)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    yield _rate(D2H, nbytes, device, lambda: _in_pieces(pinned, own))
    yield _rate(H2D, nbytes, device, lambda: _in_pieces(own, pinned))
    count = min(SMALL_COUNT, nbytes // SMALL)
    small = _best(device, lambda: _in_pieces(pinned[: count * SMALL], own, SMALL))
    yield figures.measured(f"D2H pinned, {count} x 4 KiB", small / count * 1e6, "us each")
    pageable = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
    yield _rate("D2H pageable", nbytes, device, lambda: _in_pieces(pageable, own))
    yield _rate("H2D pageable", nbytes, device, lambda: _in_pieces(own, pageable))


def _in_pieces(into: torch.Tensor, source: torch.Tensor, piece: int = PIECE) -> None:
    for begin in range(0, into.numel(), piece):
        end = begin + piece
        into[begin:end].copy_(source[begin : min(end, into.numel())], non_blocking=True)


def _best(device: torch.device, action: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        synchronize(device)
        begin = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _rate(name: str, nbytes: int, device: torch.device, action: Callable[[], None]) -> Figure:
    return figures.measured(name, nbytes / _best(device, action) / GB, "GB/s")


def pinning(task: Task) -> Iterator[Figure]:
    """What pinning staging memory costs, and for how long it keeps another thread from launching.

    Cold is memory that was never touched. The engine's is present when it is lent, and a save
    pauses after each buffer. A first save could also copy to memory that is pageable.
    """
    task.need_cuda("pinning")
    fs = _core.open_fs("threads", 8)
    nbytes = max(2, task.at_most_bytes(4 * GiB) // PIECE) * PIECE
    try:
        for name, piece, pause_s in (
            ("cold memory, one call", nbytes, 0.0),
            ("cold memory, 16 MiB a call", PIECE, 0.0),
            ("memory that is present, 16 MiB a call", PIECE, 0.0),
            ("memory that is present, 16 MiB a call and a pause", PIECE, PAUSE_S),
        ):
            engine = _core.Engine(fs, nbytes, PIECE, 2)
            if "present" in name:
                ctypes.memset(engine.staging_address, 1, nbytes)
            yield from _pinned(task, name, engine.staging_address, nbytes, piece, pause_s)
            engine.close()
    finally:
        fs.close()
    own = torch.ones(nbytes, dtype=torch.uint8, device=task.torch_device)
    pageable = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
    _, gap = _while_launching(lambda: _in_pieces(pageable, own), task.torch_device)
    yield figures.measured("longest launch gap while copying to pageable memory", gap * 1e3, "ms")


def _pinned(
    task: Task, name: str, address: int, nbytes: int, piece: int, pause_s: float
) -> Iterator[Figure]:
    cudart = torch.cuda.cudart()
    begins = range(address, address + nbytes, piece)

    def pin() -> None:
        for begin in begins:
            if int(cudart.cudaHostRegister(begin, piece, PORTABLE)):
                raise RuntimeError(f"cudaHostRegister refused {piece} bytes")
            if pause_s:
                time.sleep(pause_s)

    took, gap = _while_launching(pin, task.torch_device)
    yield figures.measured(f"pinning {name}", took / nbytes * GB, "s/GB")
    gaps = f"longest launch gap while pinning {name}"
    if pause_s:
        yield figures.at_most(gaps, gap * 1e3, PAUSE_MS_MAX, "ms")
    else:
        yield figures.measured(gaps, gap * 1e3, "ms")
    begun = time.perf_counter()
    for begin in begins:
        cudart.cudaHostUnregister(begin)
    yield figures.measured(
        f"unpinning, {name}", (time.perf_counter() - begun) / nbytes * GB, "s/GB"
    )


def _while_launching(action: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds that `action` takes on another thread, and the longest pause between two launches of
    this one meanwhile."""
    tiny = torch.zeros(16, device=device)
    tiny.add_(1)
    synchronize(device)
    took: list[float] = []
    errors: list[BaseException] = []

    def run() -> None:
        begin = time.perf_counter()
        try:
            action()
        except BaseException as error:  # raised below, on the thread that waits
            errors.append(error)
        took.append(time.perf_counter() - begin)

    thread = threading.Thread(target=run)
    worst, count, last = 0.0, 0, time.perf_counter()
    thread.start()
    while not took:
        tiny.add_(1)
        now = time.perf_counter()
        worst, last, count = max(worst, now - last), now, count + 1
        if count % 512 == 0:  # the queue of the device has an end
            synchronize(device)
            last = time.perf_counter()
    thread.join()
    if errors:
        raise errors[0]
    return took[0], worst


def disk(task: Task) -> Iterator[Figure]:
    """Direct I/O, 16 MiB blocks, 32 in flight, fsync included, as in bench.limit."""
    # As much as a save writes: a disk may be slower once it has taken some gigabytes.
    blocks = max(1, task.state_bytes // limit.BLOCK_BYTES)
    rates = limit.native(task.path, blocks * limit.BLOCK_BYTES, gently=task.is_smoke)
    if rates is None:
        raise RuntimeError("statehold._core is not built")
    for name, key in ((FRESH, "fresh"), (OVERWRITE, "overwrite"), (READ, "read")):
        yield figures.measured(name, rates[key], "GB/s")
