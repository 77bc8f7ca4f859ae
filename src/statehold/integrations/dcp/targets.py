"""Boxes of chunks -> the tensors that a planner shows, read and verified by the engine.

Owns: which bytes are read straight into their place, and which go through separate memory.
Invariants: nothing is reported as read before its checksum was verified. A box costs the pieces
that hold it, not its chunk. Memory in addition to the targets is the staging memory, a buffer on
each device, and at most WAVE_BYTES and one item. One engine reads all of a load.
Not here: which chunk has what (saved), the requests (the planner).

Straight: host tensors of the saved dtype, and tensors on a device, which take other dtypes, too.
Other host tensors (torch's readers convert, too) are first read into separate memory, in waves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.integrations.dcp.machine import Machine
from statehold.layout.layout import Box
from statehold.tensors.devices import Devices
from statehold.tensors.storable import is_external, is_view_of_other_values, overlaps_itself
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Engine
    from statehold.checkpoint.telemetry.watch import RestoreWatch
    from statehold.format.saved import PlacedChunk, SavedStep

WAVE_BYTES = 256 * MiB
_HINT = "load an older checkpoint; the state that was being loaded is incomplete"


@dataclass(frozen=True, slots=True)
class WantedBox:
    """`box` of a chunk, in elements of `dtype` from the chunk's first, goes to `target`.

    `shared`: other processes read it, too.
    """

    name: str
    chunk: PlacedChunk
    dtype: torch.dtype
    box: Box
    target: torch.Tensor
    shared: bool = False

    @property
    def is_straight(self) -> bool:
        target = self.target
        if overlaps_itself(target):
            return False
        is_as_saved = target.dtype == self.dtype and not is_view_of_other_values(target)
        return is_as_saved or is_external(target)

    @property
    def nbytes(self) -> int:
        """The bytes in the step."""
        return self.box.numel * self.dtype.itemsize

    @property
    def extra_bytes(self) -> int:
        return 0 if self.is_straight else self.nbytes


def read(
    machine: Machine,
    directory: str,
    saved: SavedStep,
    wanted: Sequence[WantedBox],
    watch: RestoreWatch,
) -> None:
    """Fill every target. Raises ChecksumError, with the tensor, for damaged bytes."""
    with contextlib.ExitStack() as opened:
        fs = opened.enter_context(machine.storage())
        nbytes = sum(each.nbytes for each in wanted)
        engine = opened.enter_context(machine.engine(fs, nbytes))
        devices = opened.enter_context(contextlib.closing(Devices()))  # unpins before that
        for wave in _waves(wanted):
            _read_wave(engine, devices, directory, saved, wave, watch)


def _waves(wanted: Iterable[WantedBox]) -> Iterator[list[WantedBox]]:
    wave: list[WantedBox] = []
    extra = 0
    for each in wanted:
        if wave and extra + each.extra_bytes > WAVE_BYTES:
            yield wave
            wave, extra = [], 0
        wave.append(each)
        extra += each.extra_bytes
    if wave:
        yield wave


def _read_wave(
    engine: Engine,
    devices: Devices,
    directory: str,
    saved: SavedStep,
    wave: Sequence[WantedBox],
    watch: RestoreWatch,
) -> None:
    straight = [each.target if each.is_straight else _host_memory(each) for each in wave]
    plan = ReadPlan(saved, hint=_HINT)
    for each, target in zip(wave, straight, strict=True):
        plan.place(
            each.name,
            each.chunk,
            each.box,
            target,
            dtype=each.dtype,
            external=is_external(target),
            shared=each.shared,
        )
    reading = plan.start(engine, lambda name, *_: f"{directory}/{name}")
    with watch.reading(saved.step, reading.job):
        reading.finish(devices.load)
    for each, target in zip(wave, straight, strict=True):
        if target is not each.target:
            each.target.copy_(target)
    # Autograd did not see these writes: raise the version, for tensors that it saved for backward.
    torch.autograd.graph.increment_version(
        [each.target for each in wave if not each.target.is_inference()]
    )


def _host_memory(wanted: WantedBox) -> torch.Tensor:
    return torch.empty(wanted.box.shape, dtype=wanted.dtype, device="cpu")
