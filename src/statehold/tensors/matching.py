"""What every comparison of a live state with a step needs: what is said of it, and new values.

Owns: the lists of the report; values that have no live counterpart.
Invariants: nothing live changes here; tensors that the live state has in the same place are filled.
Not here: which live objects there are (restore), optimizers (restore_optimizers), memory
(destinations).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, MutableMapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from statehold.encoding import values
from statehold.format.saved import SavedStep
from statehold.format.selection import Selection
from statehold.format.trees import tensors_of
from statehold.tensors import dtypes, foreign, modules, nodes, placements
from statehold.tensors.composed import Composed, is_composed
from statehold.tensors.destinations import Casts, Destinations
from statehold.tensors.parts import parts
from statehold.tensors.pieces import Piece
from statehold.tensors.placements import Placed
from statehold.tensors.restoration import Restoration

HOST = torch.device("cpu")
ABSENT = object()
_MADE_OF_TENSORS = ("$ndarray", "$complex128", "$subclass")


class Matching:
    """One comparison of a live state with a saved tree."""

    def __init__(
        self,
        state: Mapping[str, Any],
        saved: SavedStep,
        selection: Selection,
        rank: int | None,
        alone: bool,
        world: int | None,
    ) -> None:
        found = [(path, part) for path, part in parts(state) if isinstance(part, nn.Module)]
        self.problems: list[tuple[str, str]] = []
        self._saved = saved
        self._selection = selection
        self._alone = alone
        self._other_ranks = world is not None and world != saved.world_size
        self._modules = [path for path, _ in found]
        self._names = modules.parameter_names(found)
        self._casts = Casts(self._names) if selection.cast else None
        replicas = placements.replicas_in((part for _, part in found), rank)
        self._memory = Destinations(saved, replicas, rank, self._casts)
        self._composed = Composed(self._memory)
        self.restoration = Restoration(
            saved.step, self._memory.found, self._memory.used, containers=self._memory.acts
        )

    def take_casts(self) -> None:
        """Leave to the restoration what is converted."""
        if self._casts is not None and (names := self._casts.names):
            self.restoration.cast = [self._selection.renamed(name) for name in names]
            self.restoration.streamed |= {*names}
            self.restoration.streams.append(self._casts.fill)

    def problem(self, path: str, expected: str, got: str) -> None:
        self.problems.append((path, f"expected {expected}, got {got}"))

    def missing(self, path: str, expected: str, got: str = "nothing in the step") -> None:
        """The live state has what the step lacks."""
        self.restoration.missing.append(path)
        if self._selection.strict:
            self.problem(path, expected, got)

    def unexpected(self, path: str, got: str) -> None:
        """The step has what this process has no place for."""
        if self._selection.takes(path):
            self.restoration.unexpected.append(path)
            if self._selection.strict and self._alone:
                self.problem(path, "nothing", got)

    def _takes(self, path: str) -> bool:
        """Whether a leaf is restored; what is not is kept."""
        taken = self._selection.takes(path)
        (self.restoration.loaded if taken else self.restoration.kept).append(path)
        return taken

    def _differs(self, node: Any, path: str) -> bool:
        """Whether ranks saved different values, and none of them is meant here: a problem."""
        found = nodes.differing(node) if self._saved.world_size > 1 else None
        if found is not None:
            saved = f"{self._saved.world_size} ranks saved their own ({found})"
            advice = f'restore on as many ranks, or leave it out with skip=["{path}"]'
            self.problems.append((path, f"{saved}, none of which is this rank's: {advice}"))
        return found is not None

    # -- values without a live counterpart of their own --------------------------------------

    def rebuild(
        self,
        live: Any,
        node: Any,
        device: torch.device = HOST,
        beside: torch.Tensor | None = None,
    ) -> Any:
        """The saved value; tensors that `live` has in the same place are filled and used.

        beside: the parameter whose state it is, which says how tensors that are made are sharded.
        """
        name = nodes.payload(node, "$tensor")
        if isinstance(live, Piece):
            return self._piece(live, name)
        if name is not None:
            if isinstance(live, torch.Tensor) and self._memory.usable(live, name):
                return live
            return self._memory.make(name, device, beside)
        if is_composed(node):
            return self._compose(live, node, device, beside)
        if (array := nodes.payload(node, "$ndarray")) is not None:
            return self._array(live, array)
        if (members := nodes.members(node)) is not None:
            content = live if isinstance(live, Mapping) else {}
            built = {
                key: self.rebuild(content.get(key, ABSENT), item, device, beside)
                for key, item in members.items()
            }
            return OrderedDict(built) if "$ordered" in node else built
        is_tuple = nodes.payload(node, "$tuple") is not None
        if is_tuple or type(node) is list:
            items = live if isinstance(live, list | tuple) else ()
            made = [
                self.rebuild(items[i] if i < len(items) else ABSENT, item, device, beside)
                for i, item in enumerate(node["$tuple"] if is_tuple else node)
            ]
            return tuple(made) if is_tuple else made
        if isinstance(live, PurePath) and type(node) is str:
            return type(live)(node)
        return values.decode(node, lambda tag, payload: self._leaf(tag, payload, device))

    def _piece(self, live: Piece, name: str | None) -> Piece:
        """The same, which takes the saved tensor `name`."""
        path = name or "a piece"
        place = self._memory.place_of_piece(live, path)
        if name is None or not self._memory.usable(live.tensor, name, place):
            expected = dtypes.described(live.tensor.dtype, live.shape)
            got = "a plain value" if name is None else self._memory.described(name)
            self.problem(path, expected, got)
        self.restoration.live.append(live.tensor)
        return live

    def outlined(self, node: Any) -> Any:
        """The value of a node with its tensors on the meta device, where they have no memory."""

        def leaf(tag: str, payload: Any) -> Any:
            if tag == "$tensor":
                shape, dtype = self._memory.shape_of(payload), self._memory.dtype_of(payload)
                return torch.empty(shape, dtype=dtype, device="meta")
            return None if tag in _MADE_OF_TENSORS else foreign.value_of(tag, payload)

        return values.decode(node, leaf)

    def _compose(
        self,
        live: Any,
        node: Any,
        device: torch.device,
        beside: torch.Tensor | None,
        place: Placed | None = None,
    ) -> torch.Tensor:
        """A complex tensor, or one that is made of others; `live` lies at `place`, if given."""
        path = next(iter(tensors_of(node)))
        if isinstance(live, torch.Tensor):
            place = place or self._memory.place(live, path)
            if self._composed.take(live, node, place, path) is None:
                return live
        return self._composed.make(node, device, beside, path)

    def _array(self, live: Any, name: str) -> Any:
        if type(live).__name__ == "ndarray" and live.flags.writeable and live.flags.c_contiguous:
            tensor = torch.from_numpy(live)
            if self._memory.usable(tensor, name):
                return live
        return self._memory.make(name, HOST).numpy()

    def _leaf(self, tag: str, payload: Any, device: torch.device) -> Any:
        if tag == "$tensor":
            return self._memory.make(payload, device)
        if tag == "$ndarray":
            return self._memory.make(payload, HOST).numpy()
        if tag == "$complex128":  # of an array: a view of pairs
            return payload.view("complex128")[..., 0]
        return foreign.value_of(tag, payload)


def missing_of(these: Iterable[Any], others: Container[Any]) -> list[Any]:
    """The keys of `these` that `others` lack, in order."""
    return [key for key in these if key not in others]


def replace_content(live: MutableMapping[Any, Any], content: Mapping[Any, Any]) -> None:
    live.clear()
    live.update(content)
