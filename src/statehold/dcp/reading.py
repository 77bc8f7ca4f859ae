"""Boxes of chunks -> the tensors that a planner shows, read and verified by the engine.

Owns: what is read straight into its place, and what goes through memory of its own.
Holds: nothing is reported as read before its checksum was right; a box costs the pieces that hold
it, not its chunk; memory beside the targets is at most WAVE_BYTES and one item.
Not here: which chunk has what (saved), what is asked for (the planner).

Straight: host tensors of the saved dtype. Others (on a device, or of another dtype, which torch's
readers convert as well) are read into host memory first, in waves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from statehold.dcp.machine import Machine
from statehold.planning.layout import Box
from statehold.reads import ReadPlan
from statehold.state.tensors import is_external, is_view_of_other_values, overlaps_itself
from statehold.units import MiB

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.seeing.watching import RestoreWatch
    from statehold.steps.saved import PlacedChunk, SavedStep

WAVE_BYTES = 256 * MiB
_HINT = "load an older checkpoint; the state that was being loaded is incomplete"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`box` of a chunk, in elements of `dtype` from the chunk's first, goes to `target`.

    `shared`: other processes want it, too.
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
        return (
            target.dtype == self.dtype
            and not is_external(target)
            and not is_view_of_other_values(target)
            and not overlaps_itself(target)
        )

    @property
    def extra_bytes(self) -> int:
        return 0 if self.is_straight else self.box.numel * self.dtype.itemsize


def read(
    machine: Machine,
    directory: str,
    saved: SavedStep,
    wanted: Iterable[Wanted],
    seen: RestoreWatch,
) -> None:
    """Fill every target. Raises ChecksumError, with the tensor, for bytes that are not right."""
    with machine.storage() as fs:
        for wave in _waves(wanted):
            _read_wave(machine, fs, directory, saved, wave, seen)


def _waves(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    wave: list[Wanted] = []
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
    machine: Machine,
    fs: Fs,
    directory: str,
    saved: SavedStep,
    wave: Sequence[Wanted],
    seen: RestoreWatch,
) -> None:
    straight = [each.target if each.is_straight else _host_memory(each) for each in wave]
    plan = ReadPlan(saved, hint=_HINT)
    for each, target in zip(wave, straight, strict=True):
        plan.place(each.name, each.chunk, each.box, target, shared=each.shared)
    with machine.engine(fs, plan.nbytes) as engine:
        reading = plan.start(engine, lambda name, *_: f"{directory}/{name}")
        with seen.reading(saved.step, reading.job):
            reading.finish()
    for each, target in zip(wave, straight, strict=True):
        if target is not each.target:
            each.target.copy_(target)
    # Memory was written behind autograd's back: tell whoever saved these for a backward.
    torch.autograd.graph.increment_version(
        [each.target for each in wave if not each.target.is_inference()]
    )


def _host_memory(wanted: Wanted) -> torch.Tensor:
    return torch.empty(wanted.box.shape, dtype=wanted.dtype)
