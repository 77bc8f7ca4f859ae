"""Order among streams: work that is queued around a save, on a device that lags behind the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

import statehold
from bench.gpu import figures
from bench.gpu.device import sleep, synchronize
from bench.gpu.figures import Figure
from bench.gpu.model import Trained
from bench.gpu.task import Task
from statehold import _core
from statehold.tensors import captured as captures
from statehold.tensors import storable
from statehold.tensors.devices import devices
from statehold.tensors.devices.fingerprinting import Fingerprinting
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.pinning import Pinning
from statehold.tensors.kinds import capture
from statehold.units import MiB

__all__ = ["fingerprints_on_a_side_stream", "save_with_a_scaler", "two_optimizers_on_two_streams"]

DEADLINE_S = 120.0
TRIES = 5
SEED = 13


def fingerprints_on_a_side_stream(task: Task) -> Iterator[Figure]:
    """The trainer works on a side stream that lags; another thread reads the fingerprint."""
    device = task.torch_device
    wrong = 0
    for value in range(1, TRIES + 1):
        tensor = torch.full((MiB,), value, dtype=torch.int64, device=device)
        synchronize(device)
        right = _fingerprint(tensor)
        with _side_stream(device):
            sleep(device)
            pending = begun(tensor)
        wrong += _on_a_thread(pending) != right
        synchronize(device)
    yield figures.equal("wrong fingerprints, trainer on a side stream", wrong, 0)


def begun(tensor: torch.Tensor) -> Callable[[], int]:
    captured = capture({"t": statehold.Gated(tensor)})
    on_host = captures.begin_fingerprints(captured.tensors, _core.hash_memory)
    if on_host:
        return on_host["t"]
    device = storable.device_of(tensor)
    backend = devices.backend_for(device)
    mover = Mover(backend, {}, Pinning(backend, device), [device])  # follows what is queued now

    def read() -> int:
        with mover.using(), mover.finishing():
            fingerprinting = Fingerprinting(mover)
            fingerprinting.enqueue(captured.tensors)
            return fingerprinting.read()["t"]

    return read


def _fingerprint(tensor: torch.Tensor) -> int:
    return begun(tensor)()


def _on_a_thread(action: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    [value] = found
    return value


def _side_stream(device: torch.device) -> torch.cuda.StreamContext:
    """Outside of CUDA there is none, and the context does nothing."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return torch.cuda.stream(stream)


def save_with_a_scaler(task: Task) -> Iterator[Figure]:
    """A GradScaler has numbers on the device. save() must not wait for work queued there."""
    device = task.torch_device
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones(1, device=device))
    with statehold.Checkpointer(task.path / "run", staging_bytes="64MiB") as ckpt:
        ckpt.save(1, {"s": scaler}).wait("committed", DEADLINE_S)
        sleep(device)
        save = ckpt.save(2, {"s": scaler})
        save.wait("committed", DEADLINE_S)
    name = "save() with a GradScaler and a busy device: blocked"
    yield figures.at_most(name, save.stats.blocked_s * 1e3, 5.0, "ms")


def two_optimizers_on_two_streams(task: Task) -> Iterator[Figure]:
    """Both update, each on its own stream, while one save is under way."""
    device, nbytes = task.torch_device, task.at_most_bytes(2 * 10**9)
    pair = [Trained(device, 80, nbytes // 2) for _ in range(2)]
    streams = [_side_stream(device) for _ in pair]
    state = {str(index): each.state for index, each in enumerate(pair)}
    with statehold.Checkpointer(task.path / "run", staging_bytes=2 * nbytes + 64 * MiB) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)  # pins
        for index, each in enumerate(pair):
            each.fill(SEED + index)
        synchronize(device)
        sleep(device)
        save = ckpt.save(2, state)
        for each, stream in zip(pair, streams, strict=True):
            with stream:
                each.optimizer.step()
        save.wait("committed", DEADLINE_S)
        synchronize(device)
        if not all(each.difference(SEED + index) for index, each in enumerate(pair)):
            raise RuntimeError("an update changed nothing, so the save would prove nothing")
        ckpt.restore(state, 2)
        wrong = [each.difference(SEED + index) for index, each in enumerate(pair)]
    found = ", ".join(filter(None, wrong)) or "none"
    yield figures.equal("two optimizers on two streams: wrong tensors", found, "none")
