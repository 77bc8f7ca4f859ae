"""Containers of tensors as flat batches.

Owns: flattening many small dicts, such as those that an optimizer keeps for its parameters, without
Python for each tensor; and putting plain values of now into the nodes of such dicts.
Not here: what the tensors of a batch show (facts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from statehold.encoding import values

# The states of so many parameters are one batch.
STATES = 64
_PLAIN = {bool, int, float, str, type(None)}


@dataclass(frozen=True, slots=True)
class Flat:
    """Dicts of tensors and plain values. keys: of each dict. tensors: of all, in their order.
    others: (which dict, key, value) of the plain values."""

    keys: list[tuple[Any, ...]]
    tensors: list[torch.Tensor]
    others: list[tuple[int, str, Any]]

    @classmethod
    def of(cls, dicts: Sequence[Any]) -> Flat | None:
        """None where something else is among them, or no tensor."""
        if set(map(type, dicts)) != {dict}:
            return None
        keys = list(map(tuple, dicts))
        members = list(chain.from_iterable(map(dict.values, dicts)))
        if are_tensors(members):
            return cls(keys, members, [])
        others = [
            (index, key, value)
            for index, each in enumerate(dicts)
            for key, value in each.items()
            if type(value) in _PLAIN and all(map(values.is_plain_key, each))
        ]
        tensors = [value for value in members if isinstance(value, torch.Tensor)]
        if not tensors or len(tensors) + len(others) < len(members):
            return None
        return cls(keys, tensors, others)

    @property
    def shape(self) -> Any:
        """All there is to know besides the tensors and the plain values."""
        kinds = None
        if set(map(type, chain.from_iterable(self.keys))) != {str}:
            kinds = list(map(type, chain.from_iterable(self.keys)))  # True and 1 are equal keys
        return self.keys, kinds, [(index, key) for index, key, _ in self.others]

    def with_others(self, nodes: list[Any], paths: Sequence[str]) -> list[Any]:
        """The nodes of these dicts, by those of dicts with other plain values."""
        nodes = list(nodes)
        for index, key, value in self.others:
            node = values.encode(value, values.join(paths[index], key))
            nodes[index] = {**nodes[index], key: node}
        return nodes


def are_tensors(members: Sequence[Any]) -> bool:
    """Whether there are any, and all are tensors."""
    kinds = set(map(type, members))
    return bool(kinds) and all(issubclass(kind, torch.Tensor) for kind in kinds)


def in_batches(members: Mapping[Any, Any], size: int) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """(how many came before, the next keys, their values) of the members of a container."""
    keys, held = list(members), list(members.values())
    for begin in range(0, len(keys), size):
        yield begin, keys[begin : begin + size], held[begin : begin + size]
