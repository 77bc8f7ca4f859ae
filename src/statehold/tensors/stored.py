"""State that lies in files: how an object hands it to a save.

An object whose tensors are on storage already has no memory to copy from. It has a method
`stored_state()`, and a save takes its files into the step as they are. An optimizer of torch gives
the tree of its state_dict(), with numbers for parameters.

Invariants: from stored_state() until release() the object neither writes nor removes the files that
it hands over. release() is called once, when the save has ended, whether it was committed or not.
Not here: what a file must be (layout/stored), its second name in the step (checkpoint/store).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

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
