"""Tensors in the tree that are not simply bytes of a dtype: complex128, and classes made of others.

Owns: which live tensor can take such a node in place, through the plain tensors that it is made of;
making a new one, sharded like the parameter beside it.
Invariants: nothing is filled unless all of it fits; inner tensors keep their storage.
Not here: taking classes apart (subclasses), comparing plain tensors and memory (destinations).

    {"$complex128": {"$tensor": name}}     the tensor is F64 with a last dimension of 2
    {"$subclass": {"class", "context", "shape", "stride", "part", "tensors": {inner name: node}}}
"part" is null where inner tensors are as the shape says; else the box that a rank holds: its inner
tensors mean nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from statehold.encoding import values
from statehold.errors import StateMismatchError
from statehold.layout.layout import Box
from statehold.tensors import foreign, nodes, subclasses
from statehold.tensors.destinations import Destinations
from statehold.tensors.placements import OWN, Placed
from statehold.tensors.storable import (
    boxed,
    check_storable,
    device_of,
    empty_on,
    is_dtensor,
    is_storable,
    is_view_of_other_values,
    local_of,
    name_of,
    overlaps_itself,
)

COMPLEX, SUBCLASS = "$complex128", "$subclass"


def is_composed(node: Any) -> bool:
    """Whether a node is a tensor of these kinds; a complex array is a value."""
    if type(node) is not dict:
        return False
    return SUBCLASS in node or "$tensor" in node.get(COMPLEX, ())


def as_real(place: Placed) -> Placed:
    """The place of a complex tensor's real view."""
    if place.shape is None or place.box is None:
        return place
    box = Box((*place.box.offsets, 0), (*place.box.shape, 2))
    return Placed(place.layout, (*place.shape, 2), box)


@dataclass(frozen=True, slots=True)
class _InnerTensor:
    """A plain live tensor, and the saved one that goes there."""

    live: torch.Tensor
    name: str
    place: Placed


class Composed:
    """The nodes of one restore; `memory` takes the plain tensors."""

    def __init__(self, memory: Destinations) -> None:
        self._memory = memory

    def take(self, live: torch.Tensor, node: Any, place: Placed, path: str) -> str | None:
        """Have `live`, which lies at `place`, filled with what `node` says; or why it cannot be."""
        parts = self._parts(live, node, place, path)
        if isinstance(parts, str):
            return parts
        for part in parts:
            other = self._memory.fill(part.live, part.name, part.place)
            if other is not None:
                return f"one tensor, as it is tied, with other values than {other}"
        return None

    def described(self, node: Any) -> str:
        if COMPLEX in node:
            return f"{self._described(node[COMPLEX])}, as complex128"
        saved = node[SUBCLASS]
        return f"{saved['class']} {saved['shape']} in the step"

    def _described(self, node: Any) -> str:
        name = nodes.payload(node, "$tensor")
        return self._memory.described(name) if name is not None else self.described(node)

    # -- into what is there ------------------------------------------------------------------

    def _parts(
        self, live: torch.Tensor, node: Any, place: Placed, path: str
    ) -> list[_InnerTensor] | str:
        if (name := nodes.payload(node, "$tensor")) is not None:
            return self._plain(live, name, place)
        if COMPLEX in node:
            if not is_storable(live) or live.dtype != torch.complex128:
                return self.described(node)
            return self._parts(self._real(local_of(live)), node[COMPLEX], as_real(place), path)
        return self._inner(live, node[SUBCLASS], place, path)

    def _plain(self, live: torch.Tensor, name: str, place: Placed) -> list[_InnerTensor] | str:
        if not is_storable(live) or not self._memory.fits(live, name, place):
            return self._memory.described(name)
        if overlaps_itself(local_of(live)):
            return "an expanded tensor, which cannot be written"
        return [_InnerTensor(live, name, place)]

    def _real(self, live: torch.Tensor) -> torch.Tensor:
        """The real view of a complex tensor; of a conjugate one that of a copy, moved later."""
        if not is_view_of_other_values(live):
            return torch.view_as_real(live.detach())
        staged = empty_on(device_of(live), live.shape, live.dtype)
        self._memory.acts.append(lambda: live.detach().copy_(staged))
        return torch.view_as_real(staged)

    def _inner(
        self, live: torch.Tensor, saved: Mapping[str, Any], place: Placed, path: str
    ) -> list[_InnerTensor] | str:
        local = local_of(live)
        if not subclasses.is_allowed(local) or name_of(type(local)) != saved["class"]:
            return f"a {saved['class']}"
        form = subclasses.form_of(local, path)
        if (wrong := _difference(form, local, saved, place)) is not None:
            return wrong
        found = dict.fromkeys(form.tensors, OWN)
        if saved["part"] is None:
            found_places = subclasses.places(form, place)
            if found_places is None:
                return f"a {saved['class']} that was saved in another layout"
            found = found_places
        parts: list[_InnerTensor] = []
        for name, tensor in form.tensors.items():
            where = subclasses.inner_path(path, name)
            each = self._parts(tensor, saved["tensors"][name], found[name], where)
            if isinstance(each, str):
                return f"a {saved['class']} with {name or 'values'}: {each}"
            parts += each
        return parts

    # -- new ---------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def make(
        self, node: Any, device: torch.device, beside: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        """A new tensor for a node, sharded as the parameter beside it is if it has its shape.

        Raises StateMismatchError where a part was saved that cannot be put there.
        """
        place = OWN
        shape = self._shape(node)
        if beside is not None and is_dtensor(beside) and shape and shape == tuple(beside.shape):
            place, device = self._memory.place(beside, path), device_of(local_of(beside))
        local = self._local(node, place, device, path)
        if place is OWN or beside is None:
            return local
        return boxed(local, beside)

    def _shape(self, node: Any) -> tuple[int, ...]:
        """The global shape of a node's tensor."""
        if COMPLEX in node:
            return self._memory.shape_of(node[COMPLEX]["$tensor"])[:-1]
        if SUBCLASS in node:
            part = node[SUBCLASS]["part"]
            return tuple(part["of"] if part else node[SUBCLASS]["shape"])
        return self._memory.shape_of(node["$tensor"])

    def _local(self, node: Any, place: Placed, device: torch.device, path: str) -> torch.Tensor:
        """This rank's part of a new tensor."""
        if COMPLEX in node:
            real = self._local(node[COMPLEX], as_real(place), device, path)
            return torch.view_as_complex(real)
        if SUBCLASS not in node:
            return self._memory.make_at(node["$tensor"], place, device)
        saved = node[SUBCLASS]
        shape, stride = saved["shape"], saved["stride"]
        if saved["part"] is not None:
            box = place.box or Box.whole(saved["part"]["of"])
            if (list(box.offsets), list(box.shape)) != (saved["part"]["offsets"], shape):
                raise _elsewhere(path, saved)
        elif place.box is not None and list(place.box.shape) != shape:
            shape = list(place.box.shape)
            stride = torch.empty(shape, device="meta").stride()
        inner = {
            name: self._local(each, self._inner_place(saved, name, each, place, path), device,
                              subclasses.inner_path(path, name))
            for name, each in saved["tensors"].items()
        }  # fmt: skip
        context = values.decode(saved["context"], foreign.value_of)
        return subclasses.build(saved["class"], context, inner, shape, stride, path)

    def _inner_place(
        self, saved: Mapping[str, Any], name: str, node: Any, place: Placed, path: str
    ) -> Placed:
        if saved["part"] is not None:
            return OWN
        found = subclasses.inner_place(saved["class"], name, place, self._shape(node))
        if found is None:
            raise _elsewhere(path, saved)
        return found


def _difference(
    form: subclasses.SubclassForm, local: torch.Tensor, saved: Mapping[str, Any], place: Placed
) -> str | None:
    """In what a live tensor differs from a saved one of its class, its inner tensors aside."""
    part, shape = saved["part"], tuple(local.shape) if place.shape is None else place.shape
    if form.context != saved["context"]:
        return f"a {saved['class']} with {_contrast(saved['context'], form.context)}"
    if form.tensors.keys() != saved["tensors"].keys():
        return f"a {saved['class']} of {', '.join(filter(None, saved['tensors']))}"
    if list(shape) != (saved["shape"] if part is None else part["of"]):
        return f"a {saved['class']} {saved['shape']}"
    if part is not None:
        box = place.box or Box.whole(shape)
        if (list(box.offsets), list(box.shape)) != (part["offsets"], saved["shape"]):
            return f"a {saved['class']} that was saved in another layout"
    return None


def _contrast(saved: Any, live: Any) -> str:
    """In what the context of a saved tensor differs from that of a live one."""
    if type(saved) is not dict or type(live) is not dict:
        return f"the context {saved!r:.200}"
    names = [name for name, value in saved.items() if name not in live or live[name] != value]
    return ", ".join(f"{name} {saved[name]!r:.200}" for name in names)


def _elsewhere(path: str, saved: Mapping[str, Any]) -> StateMismatchError:
    part = saved["part"]
    got = f"{saved['shape']} at {part['offsets']} of {part['of']}" if part else f"{saved['shape']}"
    return StateMismatchError(
        "a tensor of the step was sharded in a way that this layout cannot take",
        facts={"path": path, "class": saved["class"], "saved": got},
        hint="restore in the layout in which it was saved, or leave it out with skip=",
    )


def refuse(live: torch.Tensor, path: str) -> None:
    """Raise for a live tensor that no step can hold, whatever it is made of."""
    for part in subclasses.parts_of(live, path):
        check_storable(part, path)
