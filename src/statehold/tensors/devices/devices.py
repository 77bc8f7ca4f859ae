"""The devices' side of one engine. Does nothing until a state has tensors on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import torch

from statehold.tensors.captured import Capture
from statehold.tensors.columns import CapturedTensor, Structure
from statehold.tensors.devices.backends import BlockingBackend, StreamBackend
from statehold.tensors.devices.copying import DeviceCopies
from statehold.tensors.devices.cuda import CudaBackend
from statehold.tensors.devices.jobs import CallCopies, Fills, JobSource, LentT, ReadyJob
from statehold.tensors.devices.loading import load
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.pinning import Pinning
from statehold.tensors.devices.placing import ChunkPlace
from statehold.tensors.devices.relay import named_failures
from statehold.tensors.storable import device_of


def backend_for(device: torch.device) -> StreamBackend:
    """The backend for devices of this type; a process has one type of accelerator."""
    return CudaBackend() if device.type == "cuda" else BlockingBackend()


class _Devices:
    """The devices of tensors by their segment."""

    def __init__(self, of: Mapping[int, torch.device]) -> None:
        self.of, self.distinct = of, frozenset(of.values())


class Devices:
    """What copies between devices and the buffers of one engine."""

    def __init__(self, call: CallCopies | None = None) -> None:
        """call: the engine's; without it, torch makes every copy."""
        self._call = call
        self._backend: StreamBackend | None = None
        self._pinning: Pinning | None = None
        self._known: tuple[list[Structure], _Devices] | None = None

    def copies(
        self,
        sources: Sequence[JobSource],
        captured: Capture,
        compared: Iterable[CapturedTensor] = (),
    ) -> DeviceCopies | None:
        """The device copies of a save; None when all is host memory. Call it inside save().

        sources: of the jobs of the save, in the order in which they were started. compared: what
        fingerprints are wanted of. Numbers of the tree, and some of what is compared, belong to no
        segment.
        """
        there = [each for each in compared if each.external]
        others = [each.tensor for each in there] + [each.tensor for each in captured.numbers]
        devices = self._devices_of(sources)
        if not devices.of and not others:
            return None
        return DeviceCopies(sources, captured, there, self._mover(devices, others))

    def load(self, job: ReadyJob[LentT], places: Mapping[int, ChunkPlace]) -> None:
        """Empty every buffer of a read into the places on devices, by segment. The calling thread's
        current device and streams are the same after it."""
        if places:
            devices = {each: device_of(place.target) for each, place in places.items()}
            load(job, places, self._mover(_Devices(devices)))

    def close(self) -> None:
        """Unpin; every job has ended."""
        if self._pinning is not None:
            self._pinning.close()

    def _devices_of(self, sources: Sequence[JobSource]) -> _Devices:
        structures = [tensors.structure for _, tensors in sources]
        if self._known is None or self._known[0] != structures:
            found: dict[int, torch.device] = {}
            for first, tensors in Fills(sources).numbered(sources):
                numbered = enumerate(tensors.live.tensors, first)
                external = compress(numbered, tensors.structure.external)
                found |= {segment: device_of(each) for segment, each in external}
            self._known = structures, _Devices(found)
        return self._known[1]

    def _mover(self, devices: _Devices, others: Sequence[torch.Tensor] = ()) -> Mover:
        distinct = devices.distinct | set(map(device_of, others))
        if self._backend is None or self._pinning is None:
            device = next(iter(distinct))
            self._backend = backend_for(device)
            self._pinning = Pinning(self._backend, device)
        with named_failures():
            return Mover(self._backend, devices.of, self._pinning, distinct, self._call)
