"""Matches a step with the tensors of a consumer: which pieces differ, and where each belongs.

Owns: which kinds of state a consumer may have; what is known to be in each tensor; what the
consumer changes itself.
Invariants: nothing live changes here. A piece is left out only if the tensor still is the memory
that got the same bytes from the step in place, and its version counter has not moved since. So a
tensor that was replaced, or changed in place, is read as a whole. What may be a running statistic
of batch norm is always read.
Not here: the bytes (spare), when they are put into place (subscribe).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import UntypedStorage
from torch.optim import Optimizer

from statehold.errors import ManifestError, StateMismatchError, UsageError
from statehold.format.saved import PlacedChunk, SavedStep
from statehold.format.selection import Selection
from statehold.layout.layout import Box
from statehold.layout.ranges import SUM_DIGITS, summed_pieces
from statehold.tensors import dtypes, updates
from statehold.tensors.destinations import Destination
from statehold.tensors.devices.placing import ChunkPlace
from statehold.tensors.kinds import check_takes_values, optimizers, prepare
from statehold.tensors.matching import Restoration
from statehold.tensors.stepping import Storages, storages
from statehold.tensors.storable import is_dtensor, is_stateful, memory_of, version_of

# -- where each belongs ----------------------------------------------------------------------------

_CHANNELS_MAX = 1 << 16  # of a batch norm


class Move(NamedTuple):
    """A piece that differs, and its place: there it begins at byte `low` of the chunk."""

    piece: ChangedPiece
    place: ChunkPlace
    low: int
    name: str


class Filled(NamedTuple):
    """What a tensor has of a step. tensor: keeps its memory, so no other tensor gets it."""

    tensor: torch.Tensor
    version: int
    known: KnownTensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that fits the live tensors. known: what each has, once the moves are done. relied: the
    tensors of which pieces may be left out, because of what they have now."""

    moves: list[Move]
    restoration: Restoration
    known: dict[str, tuple[torch.Tensor, KnownTensor]]
    relied: dict[str, Filled]

    @property
    def changed_bytes(self) -> int:
        return sum(move.piece.end - move.piece.begin for move in self.moves)

    def filled(self) -> dict[str, Filled]:
        """What the tensors have, after the moves."""
        return {
            name: Filled(tensor, version_of(tensor), known)
            for name, (tensor, known) in self.known.items()
        }


def match(state: Mapping[str, Any], saved: SavedStep, in_place: Mapping[str, Filled]) -> Prepared:
    """Match the state of a consumer with a step. in_place: what its tensors have now.

    Raises StateMismatchError if they differ, ManifestError for a step that contradicts itself.
    """
    named = Selection(only=list(map(str, state)), literal=True) if state else Selection(skip=["*"])
    try:
        restoration = prepare(state, saved, selection=named)
    except StateMismatchError as error:  # its hint names options of restore()
        error.hint = "give the subscription modules and tensors like those that the run saves"
        raise
    moves: list[Move] = []
    known: dict[str, tuple[torch.Tensor, KnownTensor]] = {}
    relied: dict[str, Filled] = {}
    doubted = {memory_of(tensor) for _, tensor in _leaves(state, "") if _may_be_statistics(tensor)}
    for destination in restoration.destinations:
        chunks = saved.chunks(destination.name, destination.box)
        key = _key(destination)
        before = _still_known(in_place.get(key), destination.tensor)
        if memory_of(destination.tensor) in doubted:
            before = None
        if before is not None:
            relied[key] = in_place[key]
        for chunk in chunks:
            pieces = list(changed_pieces(chunk, saved.block_bytes, before))
            if pieces:
                place = _place(destination, chunk.box, chunk.begin)
                moves += [Move(p, place, p.begin - chunk.begin, destination.name) for p in pieces]
        known[key] = destination.tensor, KnownTensor.of(chunks, saved.block_bytes)
    return Prepared(moves, restoration, known, relied)


def _key(destination: Destination) -> str:
    """Tensors of the consumer that are not one, but have one name in the step, differ in memory."""
    return f"{destination.tensor.data_ptr()} {destination.name}"


def _still_known(filled: Filled | None, tensor: torch.Tensor) -> KnownTensor | None:
    if filled is None or memory_of(filled.tensor) != memory_of(tensor):
        return None
    return filled.known if filled.version == version_of(tensor) >= 0 else None


def _may_be_statistics(tensor: Any) -> bool:
    """Whether batch norm may write into it, which moves no version counter (tensors/storable)."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
        return False
    is_small = tensor.dim() == 1 and tensor.numel() <= _CHANNELS_MAX
    return is_small and tensor.is_floating_point()


def _place(destination: Destination, box: Box, begin: int) -> ChunkPlace:
    dtype = destination.tensor.dtype
    shape = dtypes.torch_box(dtype, box).shape
    place = ChunkPlace.of(destination.part(box), dtype, shape, Box.whole(shape))
    if not place.is_aligned(begin):
        raise ManifestError(
            "a tensor of a step does not begin at a multiple of its element's size",
            facts={"tensor": destination.name, "expected": dtype.itemsize, "got": begin},
        )
    return place


# -- what a consumer may have ------------------------------------------------------------------


def check_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a consumer: modules and tensors. Raises UsageError for anything else."""
    if not check_takes_values(state):
        raise UsageError("the state is empty: there is nothing to update")
    for path, live in _leaves(state, ""):
        if optimizers.of(live) is not None or is_stateful(live):
            raise UsageError(
                "a subscription updates modules and tensors",
                facts={"path": path, "got": f"a {type(live).__name__}"},
                hint="leave it out; Checkpointer.restore() restores everything",
            )
        if isinstance(live, torch.Tensor) and is_dtensor(live):
            raise UsageError(
                "a subscription has whole tensors: ranks that share one would change to a step at "
                "different times",
                facts={"path": path, "got": "a DTensor"},
                hint="subscribe with whole tensors on one rank, and distribute them from there",
            )
    return state


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        tensors = (*value.named_parameters(), *value.named_buffers())
        yield from ((f"{path}.{name}", tensor) for name, tensor in tensors)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# -- what the consumer changes ---------------------------------------------------------------------
# The optimizers of a consumer update its parameters. A fused optimizer changes parameters and moves
# no version counter, so only its step() tells. What an optimizer may have changed since forget() is
# known to have nothing of a step. After an update that nobody sees (updates.why_unseen), that is
# every tensor.


class Changes:
    """The storages of what was updated. It watches all updates of torch until close()."""

    def __init__(self) -> None:
        self._updated = set[int]()
        self._has_unknown = False
        updates.watch(self)

    def without(self, filled: Mapping[str, Filled]) -> Mapping[str, Filled]:
        """What is still known of tensors."""
        if self._has_unknown or updates.why_unseen():
            return {}
        if not self._updated:
            return filled
        known = self._updated.isdisjoint
        return {name: each for name, each in filled.items() if known(storages([each.tensor]))}

    def check(self, relied: Mapping[str, Filled]) -> None:
        """Raise UsageError if one of these tensors has changed."""
        kept = self.without(relied)
        for name, each in relied.items():
            if name not in kept or version_of(each.tensor) != each.version:
                raise UsageError(
                    "a tensor was changed after the update was read",
                    facts={"tensor": name.partition(" ")[2]},
                    hint="no tensor was updated, and the next update has everything. Change "
                    "tensors before wait(), or after apply()",
                )

    def forget(self) -> None:
        """All tensors have a step now."""
        self._updated.clear()
        self._has_unknown = False

    def close(self) -> None:
        """Watch no more. On any thread."""
        updates.unwatch_later(self)

    # -- for updates ---------------------------------------------------------------------------

    def before_update(self, optimizers: Iterable[Optimizer]) -> None:
        """These are about to step; none: nobody knows which."""
        stepping = list(optimizers)
        self._has_unknown |= not stepping
        self._updated |= Storages.of(stepping).parameters

    def before_capture(self) -> None:
        """The captured update changes nothing yet."""

    def before_memory_goes(self, storage: UntypedStorage) -> None:
        """The storage is another memory then, perhaps at the same address."""
        self._updated.add(storage.data_ptr())


# -- pieces that differ ----------------------------------------------------------------------------
# Pure. A piece that is left out has the same bytes, at the same place of the tensor, in both steps.
# Pieces are compared only if both steps cut the chunk at the same elements: the same box, and the
# same distance to the grid of the file. Otherwise all pieces of the chunk count as different.


class ChangedPiece(NamedTuple):
    """The bytes [begin, end) of a file of a step, and their checksum in hexadecimal digits."""

    file: str
    begin: int
    end: int
    sum: str
    file_bytes: int


class KnownTensor(NamedTuple):
    """The chunks of a tensor in a step, by their boxes, and the grid of its checksums."""

    chunks: Mapping[Box, PlacedChunk]
    block_bytes: int

    @classmethod
    def of(cls, chunks: Sequence[PlacedChunk], block_bytes: int) -> KnownTensor:
        return cls({chunk.box: chunk for chunk in chunks}, block_bytes)


def changed_pieces(
    chunk: PlacedChunk, block_bytes: int, known: KnownTensor | None
) -> Iterator[ChangedPiece]:
    """The pieces of a chunk whose bytes differ from what is known; None: nothing is."""
    before = _comparable(chunk, block_bytes, known)
    if before == chunk.sums:
        return
    cut = summed_pieces(chunk.begin, chunk.end, chunk.sums, block_bytes)
    for index, (begin, end, digits) in enumerate(cut):
        at = index * SUM_DIGITS
        if before is None or before[at : at + SUM_DIGITS] != digits:
            yield ChangedPiece(chunk.file, begin, end, digits, chunk.file_bytes)


def _comparable(chunk: PlacedChunk, block_bytes: int, known: KnownTensor | None) -> str | None:
    """The checksums of the same pieces before; None if they were other pieces."""
    before = known.chunks.get(chunk.box) if known and known.block_bytes == block_bytes else None
    if before is None or before.end - before.begin != chunk.end - chunk.begin:
        return None
    return before.sums if (before.begin - chunk.begin) % block_bytes == 0 else None
