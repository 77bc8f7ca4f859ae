"""The kinds of things that a state holds: a file for each of them, and their table.

The file of a kind says how a thing is recognised (`of`), what a step has of it (`capture`), what a
selection calls its entries (`names`), and how it takes what a step has (`match`, which leaves acts
for the end of the restore). A new kind is one more file, and one more line in KINDS.

Owns: the order in which kinds are asked; which modules, optimizers and schedulers a state has.
Not here: tensors, marks, containers and plain values, which the walks take themselves (captured,
matching); what the loaders in an object leave out of its state (loaders).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from statehold.tensors.captured import Capturing
from statehold.tensors.kinds import modules, objects, optimizers, rng, scalers
from statehold.tensors.marks import Mark
from statehold.tensors.matching import Matching, Walk

_PARTLESS = {bool, int, float, str, bytes, type(None), torch.Tensor, nn.Parameter}


class Kind(Protocol):
    """What a file of this folder has."""

    def of(self, value: Any, /) -> Any | None:
        """The thing of this kind that a value is, or around which it is a wrapper."""

    def capture(self, to: Capturing, thing: Any, path: str, /) -> Any | None:
        """Its node in the tree of a step; None for what no step can hold."""

    def names(self, walk: Walk, thing: Any, node: Any, path: str, /) -> Iterator[str]:
        """The names that a selection may take, of the thing or of its node in a step."""

    def match(self, to: Matching, thing: Any, node: Any, path: str, /) -> None:
        """Say what a restore does to it, and change nothing yet."""


KINDS: tuple[Kind, ...] = (modules, optimizers, rng, scalers, objects)


def kind_of(value: Any) -> tuple[Kind, Any] | None:
    """The first kind that a value is of, and the thing itself."""
    for kind in KINDS:
        if (thing := kind.of(value)) is not None:
            return kind, thing
    return None


def parts(state: Any) -> Iterator[tuple[str, Any]]:
    """(path, object) of the modules, optimizers and schedulers of torch in dicts, lists and tuples,
    in their order; of a wrapper around an optimizer the optimizer.

    Visits a container once, however often and however deep it is held: what is too deep, or holds
    itself, is for `values` to refuse.
    """
    seen: set[int] = set()
    left = [("", state)]
    while left:
        path, value = left.pop()
        if isinstance(value, nn.Module | LRScheduler):
            yield path, value
        elif (optimizer := optimizers.of(value)) is not None:
            yield path, optimizer
        elif isinstance(value, Mark | Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mark):
                left.append((path, value.value))
                continue
            members = value.items() if isinstance(value, Mapping) else enumerate(value)
            left += [
                (f"{path}.{key}" if path else str(key), item)
                for key, item in members
                if type(item) not in _PARTLESS  # long lists of numbers should cost little
            ][::-1]
