"""State that lies in files: how an object hands it to a save.

An object whose tensors are on storage already has no memory to copy from. It has a method
`stored_state()`, and a save takes its files into the step as they are. The way back is its
`load_state_dict()`. An optimizer of torch has `stored_parameters()` instead, because only the save
knows what its parameters are called and which ranks hold them together. Its way back is
`load_stored()`: it reads a step piece by piece, so its state is never in memory as a whole.

Invariants: from then on until release() the object neither writes nor removes the files that
it hands over. release() is called once, when the save has ended, whether it was committed or not.
Not here: what a file must be (layout/stored), its second name in the step (steps/store).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.layout.share import HeldTensor
from statehold.layout.stored import StoredFile
from statehold.tensors.placements import Placed


@dataclass(frozen=True, slots=True)
class InFiles:
    """A tensor in the tree of a StoredState: the one that its files call `name`."""

    name: str


@dataclass(frozen=True)
class StoredState:
    """The state of an object, a part of it in files.

    tree: a value like any in a state, with InFiles for the tensors in files. files: called on a
        background thread before the step is sealed. It waits until the files are written, and
        returns them. release: see above. elsewhere: tensors that the tree has as InFiles, and
        another rank has in its files.
    """

    tree: Any
    files: Callable[[], Sequence[StoredFile]]
    release: Callable[[], None]
    elsewhere: Sequence[HeldTensor] = ()


class Role(Enum):
    """What a rank does with the state of a parameter in a save."""

    WRITES = 0
    # Another rank writes the same box.
    NAMES = 1
    # Other ranks may hold the same, and only the bytes say whether they do.
    COMPARES = 2


@dataclass(frozen=True)
class SavedParameter:
    """A parameter as a save has it: a field of its state is called `name` and the field's name,
    with a dot between them, and lies at `place`."""

    name: str
    place: Placed
    role: Role

    def field(self, name: str) -> str:
        """What the step calls a field."""
        return f"{self.name}.{name}"

    @property
    def is_shared(self) -> bool:
        """Whether its state may be in the files of another rank."""
        return self.place.layout is not None and self.role is not Role.COMPARES


def role_of(place: Placed, rank: int | None, world: int) -> Role:
    """The role of `rank` of `world` ranks (None: it is alone) for a tensor at this place."""
    if rank is None:
        return Role.WRITES
    layout = place.layout
    if layout is None or len(layout.ranks) < world:
        return Role.COMPARES
    return Role.NAMES if layout.replica_index(rank) else Role.WRITES


def saved_parameters(
    names: Iterable[str], places: Iterable[Placed], rank: int | None, world: int
) -> list[SavedParameter]:
    """The parameters of an optimizer; rank, world: as in role_of."""
    return [
        SavedParameter(name, place, role_of(place, rank, world))
        for name, place in zip(names, places, strict=True)
    ]


@dataclass(frozen=True)
class InStep:
    """A tensor of a step that is being restored: `box` of the one that the step calls `name`."""

    name: str
    box: Box

    def run(self, begin: int, end: int, memory: torch.Tensor) -> Iterator[Wanted]:
        """What fills `memory` with the elements [begin, end) of the box, in C order."""
        at = 0
        for inner in boxes_of_run(self.box.shape, begin, end):
            values = memory[at : at + inner.numel].view(inner.shape)
            yield Wanted(self.name, inner.within(self.box), values)
            at += inner.numel


class Wanted(NamedTuple):
    """The elements `box` (global coordinates) of a tensor of the step, and memory for them."""

    name: str
    box: Box
    memory: torch.Tensor


# Returns when all of it is filled and verified. Raises for bytes that are damaged or missing.
Fill = Callable[[Sequence[Wanted]], None]
States = Mapping[int, Mapping[str, Any]]  # of parameters, by their running index: values, or InStep


@runtime_checkable
class StreamedOptimizer(Protocol):
    """An optimizer of torch that reads its state from a step by itself."""

    def check_stored(self, groups: Sequence[Mapping[str, Any]], state: States) -> None:
        """Raise for what load_stored() could not take. groups: as they will be by then."""

    def load_stored(self, state: States, fill: Fill) -> None:
        """Take the state of parameters."""


@runtime_checkable
class StoredObject(Protocol):
    """An object whose state lies in files. Without the way back, it is none."""

    def stored_state(self) -> StoredState:
        """What a save takes."""

    def state_dict(self) -> Any:
        """The same in memory."""

    def load_state_dict(self, state: Any) -> None:
        """Take what restore() has read: the tree, with tensors."""


@runtime_checkable
class StoredOptimizer(Protocol):
    """An optimizer of torch whose state lies in files."""

    def stored_parameters(self, saved: Sequence[SavedParameter]) -> StoredState | None:
        """The tree is a list with what `state` would have of each parameter, or None.

        saved: all parameters, in their order. Returns None where the save takes all state from
        memory.
        """


@runtime_checkable
class GathersState(Protocol):
    """An optimizer whose `state` is empty, because it keeps its state elsewhere."""

    @property
    def has_lost_state(self) -> bool:
        """Whether it has none until it gets one: state_dict() and gathered_state() raise."""

    def gathered_state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Copies of all that `state` would have, by parameter."""
