"""Memory that is a part of a global tensor, for frameworks whose parts are not DTensors.

Owns: `Piece`, which says of plain memory what it is a part of; `Pieced`, an object whose state
has pieces, and which makes room for a step that has more of them than it has itself.
Invariants: all ranks that hold a tensor give the same shape and the same layout for it. A rank
without a part has a Piece with an empty tensor, so that every rank names the same tensors.
Not here: DTensors (placements), the cutting of the framework (integrations).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import AnyLayout
from statehold.tensors.placements import OWN, Placed


class Piece:
    """What rank `rank` has of a tensor of `shape`: the box that `layout` gives it.

    memory: a tensor of the shape of that box; or what returns it, where it may move between saves.
    The memory is copied lazily, as that of an optimizer is: it may only change behind the gate. A
    piece in Volatile is copied before save() returns.
    """

    __slots__ = ("_memory", "box", "place", "shape")

    def __init__(
        self,
        memory: torch.Tensor | Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        layout: AnyLayout,
        rank: int,
    ) -> None:
        self._memory, self.shape = memory, shape
        self.box = layout.box(shape, rank)
        self.place = Placed(layout, shape, self.box)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, as it lies now."""
        memory = self._memory
        return (memory if isinstance(memory, torch.Tensor) else memory()).detach()

    def at(self, path: str, rank: int | None) -> Placed:
        """Where it lies; OWN for a rank that is alone (None).

        Raises UnsupportedValueError, with the path, if the memory has another shape than its place,
        or if a rank that is alone has a part only.
        """
        expected = self.shape if rank is None else self.box.shape
        got = tuple(self.tensor.shape)
        if got == expected:
            return OWN if rank is None else self.place
        raise UnsupportedValueError(
            "a part of a tensor has another shape than its place",
            facts={"path": path, "expected": list(expected), "got": list(got)},
            hint="save it together with the ranks that have the rest" if rank is None else None,
        )


@runtime_checkable
class Pieced(Protocol):
    """An object with state_dict() and load_state_dict() whose state has pieces."""

    def state_to_fill(self, saved: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The state that takes what a step has of this object.

        saved: the content of the step, with tensors on the meta device. It changes nothing that is
        live: load_state_dict() gets the same pieces once they are filled. Raises
        StateMismatchError.
        """
