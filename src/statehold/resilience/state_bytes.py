"""The state of a replica as one run of bytes with a description, and a live state that takes them.

    offer = Offer(state)                        a holder; `offer.document` describes `offer.run`
    arriving = Arriving(state, document)        a joiner; fill `arriving.run`, then finish()

Names and the flattening are those of checkpoints, so what a checkpoint holds also travels.

Invariants: an Offer copies what may change before the optimizer steps (buffers, numbers), and shows
the rest in place. Arriving changes nothing that is not in its run before `finish`.
Not here: sending, and checksums of what is sent (transfer).
"""

from __future__ import annotations

import ctypes
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from statehold.encoding import strictjson
from statehold.errors import UsageError
from statehold.format.entries import STATE_DEPTH_MAX, TensorEntry
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.layout.layout import Box
from statehold.tensors.captured import Capture
from statehold.tensors.devices.backends import Stream, StreamBackend
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.elements import flat
from statehold.tensors.found import Seen
from statehold.tensors.kinds import capture, finish, parts, prepare
from statehold.tensors.storable import device_of, is_external
from statehold.tensors.stored import GathersState

# (rank, number of ranks) in torch's job.
Among = tuple[int, int]


class ByteRun:
    """The bytes of tensors, one after another. None: bytes that nobody wants.

    Made by the trainer: copies of other threads follow what its streams have been given by then.
    """

    def __init__(self, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        self._tensors = [None if each is None else bytes_of(each) for each in tensors]
        there = [each for each in self._tensors if each is not None and is_external(each)]
        self._lanes = {each: _lane(each) for each in set(map(device_of, there))}
        self._ends = list(accumulate(sizes))

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, begin: int, into: Tensor) -> None:
        """Copy the bytes from `begin` on, as many as `into` has."""
        for live, part in self._parts(begin, into):
            self._move(live, live, part)

    def write(self, begin: int, data: Tensor) -> None:
        for live, part in self._parts(begin, data):
            self._move(live, part, live)

    def _move(self, live: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy bytes of `live`, which is one of both; returns when they are there."""
        if is_external(live):
            backend, stream = self._lanes[device_of(live)]
            with backend.using(device_of(live)):
                with backend.on(stream):
                    target.copy_(source)
                backend.synchronize(backend.record(stream))
        else:  # without torch, which would use its threads for every piece
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def _parts(self, begin: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        at, end = begin, begin + piece.numel()
        index = bisect_right(self._ends, begin)
        while at < end:
            start = self._ends[index - 1] if index else 0
            until = min(end, self._ends[index])
            live = self._tensors[index]
            if live is not None and until > at:
                yield live[at - start : until - start], piece[at - begin : until - begin]
            at, index = until, index + 1


def check_travels(state: Mapping[str, Any]) -> None:
    """Raises UsageError for a state that no joiner could take."""
    for path, each in parts(state):
        if isinstance(each, GathersState):  # on whatever tiers its state lies
            raise UsageError(
                "an offloaded optimizer cannot be in the state of replicas",
                facts={"name": path, "got": type(each).__qualname__},
                hint="use torch's optimizer with Replicas: a state that is offloaded cannot travel "
                "to a joining replica yet",
            )


def captured(
    state: Mapping[str, Any], among: Among | None, seen: Seen | None = None, *, own: bool = True
) -> Capture:
    """The state of a replica, complete. among, seen, own: see Offer and capture()."""
    rank, world = among or (None, 1)
    found = capture(state, rank, seen=seen, world=world, own=own)
    if found.stored:
        found.release()
        raise UsageError(
            "a state that lies in files cannot be given to joining replicas",
            hint="let replicas begin again from a checkpoint",
        )
    for number in found.numbers:
        number.fill_in(number.tensor.item())
    return found


class Offer:
    """A state that others may take, until its optimizer steps.

    among: (rank, number of ranks) in torch's job, whose DTensors the state has. None: alone.
    """

    def __init__(self, state: Mapping[str, Any], among: Among | None = None) -> None:
        found = captured(state, among)
        held = list(found.tensors)
        tensors = [each.tensor.detach().clone() if each.eager else each.tensor for each in held]
        self.tensors = [each.detach().contiguous() for each in tensors]
        entries = [
            [each.spec.name, each.spec.dtype, each.spec.global_shape or each.spec.shape]
            for each in held
        ]
        sizes = [each.spec.nbytes for each in held]
        self._capture = found
        self.document = json.dumps(
            {"state": found.tree, "tensors": entries, "sizes": sizes}
        ).encode()
        self.run = ByteRun(self.tensors, sizes)

    def changed(self) -> str | None:
        """The name of a tensor that is shown in place, and has changed nevertheless."""
        return self._capture.moved(eager=False)


class Arriving:
    """A live state that takes the state of a document. Raises StateMismatchError if it cannot,
    and ValueError for a document that describes no state.

    among: as for an Offer. A rank takes the parts of the rank at its place in another replica.
    """

    def __init__(
        self, state: Mapping[str, Any], document: bytes, among: Among | None = None
    ) -> None:
        described = _description(document)
        rank = None if among is None else among[0]
        self._restoration = prepare(state, _Described(described), rank=rank)
        self._staged: list[tuple[Tensor, Tensor]] = []
        takers: dict[str, Tensor] = {}
        for each in self._restoration.destinations:
            takers[each.name] = self._taker(each.tensor)
        found = [takers.get(name) for name, _, _ in described["tensors"]]
        for taker, nbytes in zip(found, described["sizes"], strict=True):
            if taker is not None and taker.nbytes != nbytes:
                raise ValueError("a tensor of another size than its shape says")
        self.run = ByteRun(found, described["sizes"])

    def finish(self) -> None:
        """All bytes have arrived."""
        with torch.no_grad():
            for tensor, staged in self._staged:
                tensor.copy_(staged)
        finish(self._restoration)

    def _taker(self, tensor: Tensor) -> Tensor:
        """Memory for the bytes of a tensor: its own, if that is in their order."""
        if tensor.is_contiguous():
            return tensor
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._staged.append((tensor, staged))
        return staged


def _description(document: bytes) -> dict[str, Any]:
    """What a holder says of its state. ValueError: it is no description of one."""
    match strictjson.message(document, STATE_DEPTH_MAX):
        case {"state": _, "tensors": [*tensors], "sizes": [*sizes]} as described if all(
            type(each) is int and each >= 0 for each in sizes
        ) and all(map(_is_entry, tensors)):
            return dict(described)
    raise ValueError("not the description of a state")


def _is_entry(entry: Any) -> bool:
    match entry:
        case [str(), str(), [*shape]]:
            return all(type(each) is int and each >= 0 for each in shape)
    return False


class _Described(SavedStep):
    """The description of a state, as a restore reads a step."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.step, self.world_size, self.block_bytes = 0, 1, 1
        self._state = described["state"]
        self._tensors = {
            name: TensorEntry(dtype, tuple(shape)) for name, dtype, shape in described["tensors"]
        }

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._tensors

    @property
    def state(self) -> Any:
        return self._state

    def chunks(self, name: str, box: Box, among: Sequence[int] | None = None) -> list[PlacedChunk]:
        """One chunk, with a checksum that equals no other: no two tensors are taken for ties."""
        return [PlacedChunk(box, "", 0, 0, 0, name)]


def _lane(device: torch.device) -> tuple[StreamBackend, Stream]:
    backend = backend_for(device)
    with backend.using(device):
        return backend, backend.fork(device, "replicas")


def bytes_of(tensor: Tensor) -> Tensor:
    """In the order of its elements; a view where that is their order in memory."""
    return flat(tensor.detach().contiguous(), 0, tensor.nbytes)
