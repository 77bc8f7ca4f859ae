"""Copies verified pieces from spare memory into live tensors.

Invariants: what may fail for want of memory happens first: scratch memory on a device for tensors
that a plain copy cannot fill. On return every copy is done. On a device the copies come after what
its current stream has been given, and what it is given later comes after them.
Not here: the bytes (spare), when this happens (subscribe).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from statehold.subscription.preparing import Move
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.pinning import Pinning
from statehold.tensors.storable import device_of, is_external, without_flags

Copy = tuple[Move, torch.Tensor]


@torch.inference_mode()  # without it, torch refuses to change inference tensors
def copy_all(moves: Sequence[Move], places: Sequence[int], memory: torch.Tensor) -> None:
    """Copy the piece at `places[i]` of the memory to where the move i says."""
    copies = [
        (move, memory.narrow(0, at, move.piece.end - move.piece.begin))
        for move, at in zip(moves, places, strict=True)
    ]
    there = [each for each in copies if is_external(each[0].place.target)]
    if there:
        _copy_to_devices(there)
    for move, source in copies:
        if not is_external(move.place.target):
            _put(move, source)


def devices_of(moves: Sequence[Move]) -> list[torch.device]:
    """The devices that have targets."""
    targets = [move.place.target for move in moves if is_external(move.place.target)]
    return list(dict.fromkeys(map(device_of, targets)))


def _copy_to_devices(copies: Sequence[Copy]) -> None:
    devices = devices_of([move for move, _ in copies])
    backend = backend_for(devices[0])
    mover = Mover(backend, {}, Pinning(backend, devices[0]), devices)
    with mover.using(), mover.finishing():
        on_device = [(device, _on(mover, device, copies)) for device in devices]
        for device, ready in on_device:
            with mover.on(device):
                for move, source in ready:
                    _put(move, source)
        mover.wait()
        mover.make_current_wait()


def _on(mover: Mover, device: torch.device, copies: Sequence[Copy]) -> list[Copy]:
    """The copies to a device. What has to be taken apart there is there already."""
    with mover.on(device):
        return [
            (move, source if move.place.is_plain else _beside(move.place.target, source))
            for move, source in copies
            if device_of(move.place.target) == device
        ]


def _beside(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    scratch = without_flags(target).new_empty(source.numel(), dtype=torch.uint8)
    return scratch.copy_(source, non_blocking=True)


def _put(move: Move, source: torch.Tensor) -> None:
    target = move.place.target
    if move.place.is_plain and not is_external(target):
        # copy_() waits for the threads of torch, which may not get a processor for long.
        ctypes.memmove(target.data_ptr() + move.low, source.data_ptr(), source.numel())
    elif move.place.is_plain:
        move.place.bytes_at(move.low, source.numel()).copy_(source, non_blocking=True)
    else:
        move.place.take(source, move.low)
