"""State that lies in files: how an object hands it to a save.

An object whose tensors are on storage already has no memory to copy from. It has a method
`stored_state()`, and a save takes its files into the step as they are. An optimizer of torch gives
the tree of its state_dict(), with numbers for parameters.

The way back is `load_stored()`: an optimizer reads a step piece by piece, so its state is never in
memory as a whole.

Invariants: from stored_state() until release() the object neither writes nor removes the files that
it hands over. release() is called once, when the save has ended, whether it was committed or not.
Not here: what a file must be (layout/stored), its second name in the step (checkpoint/store).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from statehold.layout.flat import boxes_of_run
from statehold.layout.layout import Box
from statehold.layout.stored import StoredFile
from statehold.tensors import optimizers


@dataclass(frozen=True, slots=True)
class InFiles:
    """A tensor in the tree of a StoredState: the one that its files call `name`."""

    name: str


@dataclass(frozen=True)
class StoredState:
    """The state of an object, a part of it in files.

    tree: a value like any in a state, with InFiles for the tensors in files. files: called on a
        background thread before the step is sealed. It waits until the files are written, and
        returns them. release: see above.
    """

    tree: Any
    files: Callable[[], Sequence[StoredFile]]
    release: Callable[[], None]


@dataclass(frozen=True)
class InStep:
    """A tensor of a step that is being restored: `box` of the one that the step calls `name`."""

    name: str
    box: Box

    def run(self, begin: int, end: int, memory: torch.Tensor) -> Iterator[Wanted]:
        """What fills `memory` with the elements [begin, end) of the box, in C order."""
        at = 0
        for inner in boxes_of_run(self.box.shape, begin, end):
            offsets = tuple(map(add, self.box.offsets, inner.offsets))
            values = memory[at : at + inner.numel].view(inner.shape)
            yield Wanted(self.name, Box(offsets, inner.shape), values)
            at += inner.numel


class Wanted(NamedTuple):
    """The elements `box` (global coordinates) of a tensor of the step, and memory for them."""

    name: str
    box: Box
    memory: torch.Tensor


# Returns when all of it is filled and verified. Raises for bytes that are damaged or missing.
Fill = Callable[[Sequence[Wanted]], None]


@runtime_checkable
class StreamedOptimizer(Protocol):
    """An optimizer of torch that reads its state from a step by itself."""

    def load_stored(self, state: Mapping[int, Mapping[str, Any]], fill: Fill) -> None:
        """Take the state of parameters, by their running index: values, or InStep."""


@runtime_checkable
class StoredObject(Protocol):
    """An object whose state lies in files."""

    def stored_state(self) -> StoredState | None:
        """None: the save takes the object as any other."""


def stored_by(value: Any, names: Mapping[int, str], rank: int | None) -> StoredState | None:
    """What `value` has in files; None if it has nothing there, or has to be saved as any other.

    names: of parameters, by id. rank: None for a process that is alone.
    """
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    if not isinstance(value, StoredObject) or (is_optimizer and rank is not None):
        return None  # the files of an optimizer do not say which ranks share a parameter
    stored = value.stored_state()
    if stored is None or not isinstance(value, torch.optim.Optimizer):
        return stored
    return replace(stored, tree=optimizers.by_name(value, stored.tree, names))
