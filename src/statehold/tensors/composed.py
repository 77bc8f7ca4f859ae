"""Tensors in the tree that are not simply bytes of a dtype: complex128, and classes made of others.

Owns: the list of classes that a step may hold; how each is taken apart, put together and sharded;
which live tensor can take such a node in place, and which entries of a state_dict() repeat it.
Invariants: no class is imported or called because a file names it. Its name must be in the list
here, or a user must have allowed it. Taking a tensor apart copies nothing and waits for no device.
Nothing is filled unless all of it fits; inner tensors keep their storage.

Not here: names and nodes of the inner tensors (captured), comparing plain tensors and memory
(destinations).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from statehold.encoding import values
from statehold.errors import StateMismatchError, UnsupportedValueError, refused
from statehold.layout.layout import Box, Layout
from statehold.tensors import nodes, placements
from statehold.tensors.destinations import Destinations
from statehold.tensors.placements import OWN, Placed
from statehold.tensors.storable import (
    PROTOCOL,
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
    says_what_it_is_made_of,
)

_CACHED_MAX = 1 << 16


# The inner tensor that is the memory of the tensor itself, and has its name.
ITSELF = ""
BITSANDBYTES = "bitsandbytes.nn.modules"
_IS_QUANTIZED = "quantized"
_OPTIONS = ("quant_type", "blocksize", "compress_statistics", "quant_storage")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Of one class: tensor, path -> inner tensors and context; class, these -> tensor; tensor ->
    what a person has to know of it, or ""."""

    apart: Callable[[Any, str], tuple[dict[str, torch.Tensor], Any]]
    together: Callable[[Any, Mapping[str, torch.Tensor], Any], Any]
    remark: Callable[[Any], str]


def adapter_of(cls: type) -> Adapter | None:
    """The adapter for tensors of exactly this class."""
    if cls is torch.Tensor or cls is nn.Parameter:
        return None
    return ADAPTERS.get(name_of(cls))


def inner_path(path: str, name: str) -> str:
    """What an inner tensor of the tensor at `path` is called."""
    return path if name == ITSELF else f"{path}.{name}"


def repeated(state: Mapping[str, Any]) -> list[str]:
    """The entries of a state_dict() that say again what a tensor among them is made of."""
    kinds = {kind for kind in set(map(type, state.values())) if adapter_of(kind) is not None}
    made = {name for name, value in state.items() if kinds and type(value) in kinds}
    return [name for name in state if not made.isdisjoint(above(name))] if made else []


def above(name: str) -> Iterable[str]:
    """The names that `name` lies below."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


# -- bitsandbytes ----------------------------------------------------------------------------------
# Facts about bitsandbytes (0.50) that decide what is here:
# - A Params4bit is a parameter whose own memory holds the packed values. Its QuantState holds the
#   other tensors: absmax, code, and with double quantization offset and state2.
# - Until the layer is moved to a device the weight is not quantized, and has no QuantState.
# - Once it is quantized only the QuantState counts. The parameter's own blocksize and quant_type
#   may be defaults.
# - state_dict() of a Linear4bit adds these tensors (one as a copy), and a tensor of JSON with the
#   rest. load_state_dict() of a quantized layer refuses these entries.
# - A conversion of the parameter, such as fully_shard, can lose the QuantState. The layer keeps it.
# - In eval on a CPU with AVX512-BF16, forward() packs the weight in another way. state_dict() of
#   the layer undoes that, and changes the scales: it is not called for such a layer.


def _bits_apart(tensor: Any, path: str) -> tuple[dict[str, torch.Tensor], Any]:
    state, data = getattr(tensor, "quant_state", None), tensor.detach()
    if state is None and getattr(tensor, "bnb_quantized", False):
        raise _stateless(path)
    if _is_packed(state):
        raise _packed(path)
    if state is None:
        options = {name: getattr(tensor, name, None) for name in _OPTIONS}
        return {ITSELF: data}, {_IS_QUANTIZED: False, **options}
    tensors = {ITSELF: data, "absmax": state.absmax, "quant_map": state.code}
    context = {_IS_QUANTIZED: True, **_values(state, ("quant_type", "blocksize", "dtype", "shape"))}
    if (nested := state.state2) is not None:
        tensors |= {"nested_absmax": nested.absmax, "nested_quant_map": nested.code}
        tensors["nested_offset"] = state.offset
        context |= {f"nested_{name}": value
                    for name, value in _values(nested, ("blocksize", "dtype")).items()}  # fmt: skip
    return tensors, context


def _values(state: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(state, name) for name in names}


def _is_packed(state: Any) -> bool:
    return bool(getattr(state, "packing_format_for_cpu", False))


def _packed(path: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a 4-bit weight that the processor has packed for inference cannot be stored or restored",
        facts={"path": path},
        hint="its exact scales are gone: save the parameters that are trained by themselves; set "
        "support_avx512bf16_for_cpu = False on each Linear4bit before a model is evaluated",
    )


def _stateless(path: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a 4-bit weight without its quantization state cannot be stored",
        facts={"path": path},
        hint="run the model once, which gives the weight the state that its layer keeps; weights "
        "that fully_shard has sharded stay without it: save the parameters that are trained by "
        "themselves",
    )


def _together(cls: Any, tensors: Mapping[str, torch.Tensor], context: Any) -> Any:
    data, values = tensors[ITSELF], dict(context)
    if not values.pop(_IS_QUANTIZED):
        return cls(data, requires_grad=False, **values)
    for name in ("dtype", "nested_dtype"):
        if name in values:
            values[name] = str(values[name]).removeprefix("torch.")
    values |= {name: tensor for name, tensor in tensors.items() if name != ITSELF}
    offset = values.get("nested_offset")
    if offset is not None:
        values["nested_offset"] = 0.0  # it is copied, and its bytes have not arrived yet
    made = cls.from_prequantized(data, values, requires_grad=False, device=data.device)
    if offset is not None:
        made.quant_state.offset = offset
    return made


def _remark(tensor: Any) -> str:
    if getattr(tensor, "quant_state", None) is not None:
        return ""
    return ", which is not quantized yet (moving the model to its device quantizes it)"


ADAPTERS = {f"{BITSANDBYTES}.Params4bit": Adapter(_bits_apart, _together, _remark)}


def refuse_packed(module: nn.Module, path: str) -> None:
    """Raise for a 4-bit layer that state_dict() would change."""
    for where, layer in _quantized_layers(module, path):
        if _is_packed(getattr(layer.weight, "quant_state", None)):
            raise _packed(where)


def refuse_stateless(module: nn.Module, path: str) -> None:
    """Raise for a 4-bit layer whose weight has lost its quantization state.

    Call it after state_dict(): a hook of that may have swapped the weight for a sharded one.
    """
    for where, layer in _quantized_layers(module, path):
        if getattr(layer.weight, "quant_state", None) is None:
            raise _stateless(where)


def _quantized_layers(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """The 4-bit layers of a module, with the paths of their weights."""
    library = sys.modules[BITSANDBYTES]
    for name, each in module.named_modules():
        if isinstance(each, library.Linear4bit) and each.quant_state is not None:
            yield ".".join(filter(None, (path, name, "weight"))), each


# -- the classes -----------------------------------------------------------------------------------
# A class has `__tensor_flatten__` and `__tensor_unflatten__`, or an adapter here. The names in the
# list are those of the modules that define the classes. A class that its library has moved is not
# found there, and refused by name. The other attributes of a class (its context) are stored as
# plain values.


@dataclass(frozen=True, slots=True)
class InnerRule:
    """What is known of the inner tensors of a DTensor's local one, by name.

    rowwise: the first dimension follows that of the whole tensor, in order, so it can be cut
    wherever the whole is; shared: equal on all ranks. Of any other nothing is known.
    """

    rowwise: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()


_UNKNOWN = InnerRule()
_QUANTIZED = "torchao.quantization"
_KNOWN: dict[str, InnerRule] = {
    "torchao.optim.subclass_8bit.OptimState8bit": InnerRule(
        frozenset({"codes", "scale"}), frozenset({"qmap"})
    ),
    "torchao.optim.subclass_fp8.OptimStateFp8": InnerRule(frozenset({"codes", "scale"})),
    # The context of these holds the shape of the local tensor: another layout has another one.
    "torchao.optim.subclass_4bit.OptimState4bit": _UNKNOWN,
    f"{_QUANTIZED}.Int8Tensor": _UNKNOWN,
    f"{_QUANTIZED}.Int4Tensor": _UNKNOWN,
    f"{_QUANTIZED}.Int4PlainInt32Tensor": _UNKNOWN,
    f"{_QUANTIZED}.Int4TilePackedTo4dTensor": _UNKNOWN,
    f"{_QUANTIZED}.IntxUnpackedToInt8Tensor": _UNKNOWN,
    f"{_QUANTIZED}.Float8Tensor": _UNKNOWN,
    f"{_QUANTIZED}.quantize_.workflows.nf4.nf4_tensor.NF4Tensor": _UNKNOWN,
    "torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight": _UNKNOWN,
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": _UNKNOWN,
    **dict.fromkeys(ADAPTERS, _UNKNOWN),
}
# What users have allowed, by the names of the classes.
allowed: dict[str, tuple[Any, InnerRule]] = {}


def allow_tensor_class(
    cls: type[torch.Tensor], *, rowwise: Iterable[str] = (), shared: Iterable[str] = ()
) -> None:
    """Let steps hold tensors of `cls`, which has `__tensor_flatten__` and `__tensor_unflatten__`.

    Call it in every process that saves or restores such tensors. Steps name the class by module and
    qualified name. The other attributes of the class must be plain values.

    If every inner tensor is in `rowwise` or in `shared`, a sharded tensor restores into other
    layouts. Otherwise it restores only into the same layout.

    Args:
        cls: the class.
        rowwise: the inner tensors whose first dimension follows that of the whole tensor, in order.
        shared: the inner tensors that are equal on all ranks.

    Raises:
        UsageError: the class lacks one of the two methods, or names are no list.
    """
    if not isinstance(cls, type) or not says_what_it_is_made_of(cls):
        expected = f"a class with {' and '.join(PROTOCOL)}"
        raise refused("a tensor class cannot be taken apart", expected, repr(cls)[:200])
    for argument, names in {"rowwise": rowwise, "shared": shared}.items():
        if isinstance(names, str):
            raise refused(f"{argument} is a list of names", 'for example ["codes"]', names)
    allowed[name_of(cls)] = cls, InnerRule(frozenset(rowwise), frozenset(shared))


def is_allowed(tensor: torch.Tensor) -> bool:
    """Whether a step can hold tensors of this class, taken apart."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or tensor.is_nested:
        return False
    name = name_of(kind)
    if name in allowed:
        return allowed[name][0] is kind
    return name in ADAPTERS or (name in _KNOWN and hasattr(tensor, PROTOCOL[0]))


@dataclass(frozen=True, slots=True)
class SubclassForm:
    """A tensor taken apart: its class, its context as a node, its inner tensors by name."""

    kind: str
    context: Any
    tensors: Mapping[str, torch.Tensor]


def form_of(tensor: Any, path: str, depth: int = 0) -> SubclassForm:
    """Take a tensor apart; its inner tensors share its memory. depth: the levels of nodes around.

    Raises UnsupportedValueError, with the path, for a context that is not made of plain values, and
    for a tensor that consists of no other.
    """
    kind = name_of(type(tensor))
    tensors, context = _apart(tensor, path)
    if not tensors:
        facts = {"path": path, "type": kind}
        raise UnsupportedValueError("a tensor consists of no other tensor", facts=facts)
    try:
        where = f"{path}.<context>"
        node = values.encode(context, where, lambda each, _: nodes.torch_node(each), depth=depth)
    except UnsupportedValueError as error:
        error.hint = f"{kind} has this value outside its tensors; no step can hold it; {error.hint}"
        raise error.with_fact("class", kind) from None
    return SubclassForm(kind, node, tensors)


def _apart(tensor: Any, path: str) -> tuple[dict[str, torch.Tensor], Any]:
    """The inner tensors by name, and the context."""
    adapter = adapter_of(type(tensor))
    if adapter is not None:
        return adapter.apart(tensor, path)
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def parts_of(tensor: torch.Tensor, path: str = "") -> list[torch.Tensor]:
    """The tensors with memory of their own that a tensor is made of; itself where it is plain."""
    local = local_of(tensor)
    if not is_allowed(local):
        return [tensor]
    inner, _ = _apart(local, path)
    return [part for each in inner.values() for part in parts_of(each, path)]


def remark_of(tensor: torch.Tensor) -> str:
    """What a person who reads of the tensor has to know besides its class and shape, or ""."""
    adapter = adapter_of(type(tensor))
    return "" if adapter is None else adapter.remark(tensor)


def build(
    kind: str,
    context: Any,
    tensors: Mapping[str, torch.Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    path: str,
) -> torch.Tensor:
    """Put a tensor together around `tensors`, whose memory it shares; `context` is the value.

    Raises UnsupportedValueError for a class that is not allowed, StateMismatchError for one that
    copies what it is given.
    """
    cls = _class_of(kind, path)
    adapter = ADAPTERS.get(kind)
    made: Any = (
        adapter.together(cls, tensors, context)
        if adapter is not None
        else cls.__tensor_unflatten__(dict(tensors), context, torch.Size(shape), tuple(stride))
    )
    inner, _ = _apart(made, path)
    same = all(inner[name] is tensor or _shares(inner[name], tensor)
               for name, tensor in tensors.items())  # fmt: skip
    if not same or tuple(made.shape) != tuple(shape):
        raise StateMismatchError(
            "a tensor class does not put its tensors together as they were",
            facts={"path": path, "class": kind, "expected": f"the shape {list(shape)}, no copies",
                   "got": f"the shape {list(made.shape)}{'' if same else ', and copies'}"},
            hint="restore into a state that has the tensor already: it is filled in place",
        )  # fmt: skip
    return made  # type: ignore[no-any-return]


def build_saved(saved: Mapping[str, Any]) -> torch.Tensor:
    """A whole tensor from a decoded node. Raises as `build` does."""
    parts = saved["tensors"], saved["shape"], saved["stride"]
    return build(saved["class"], saved["context"], *parts, next(iter(saved["tensors"])))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _class_of(kind: str, path: str) -> Any:
    if kind in allowed:
        return allowed[kind][0]
    cls, hint = None, "install its library, or call statehold.allow_tensor_class(the class)"
    module, _, name = kind.rpartition(".")
    if kind in ADAPTERS:
        cls, hint = getattr(sys.modules.get(module), name, None), f"import {module} first"
    elif kind in _KNOWN:
        with suppress(ImportError):
            cls = getattr(importlib.import_module(module), name, None)
    if cls is None:
        raise UnsupportedValueError(
            "a tensor of the step has a class that is unknown in this process",
            facts={"path": path, "class": kind},
            hint=hint,
        )
    return cls


# -- sharded ---------------------------------------------------------------------------------------


def places(form: SubclassForm, place: Placed) -> dict[str, Placed] | None:
    """Where the inner tensors of a local tensor lie, which itself lies at `place`.

    None where only this layout can put them together again: each rank has its own then.
    """
    layout = place.layout
    if layout is None:
        return dict.fromkeys(form.tensors, OWN)
    if not isinstance(layout, Layout):
        return None
    rule, found = _rule_of(form.kind), {}
    for name, tensor in form.tensors.items():
        if not layout.splits or name in rule.shared:
            found[name] = placements.replicated(tuple(tensor.shape), layout)
        elif name in rule.rowwise and tensor.ndim and place.shape and place.box:
            cut = rowwise(layout, place.shape, place.box.shape[0], tuple(tensor.shape))
            if cut is None:
                return None
            found[name] = Placed(layout, cut, _rows_of(place.shape, place.box, cut))
        else:
            return None
    return found


def inner_place(kind: str, name: str, place: Placed, shape: tuple[int, ...]) -> Placed | None:
    """Where an inner tensor of the global `shape` lies in the layout of `place`; None: nowhere."""
    layout, rule = place.layout, _rule_of(kind)
    if layout is None:
        return OWN
    if not isinstance(layout, Layout):
        return None
    if not layout.splits or name in rule.shared:
        return placements.replicated(shape, layout)
    if name not in rule.rowwise or not shape or not place.shape or not place.box:
        return None
    rows = shape[0] * place.box.shape[0]
    if not place.shape[0] or rows % place.shape[0]:
        return None
    local = (rows // place.shape[0], *shape[1:])
    if rowwise(layout, place.shape, place.box.shape[0], local) != shape:
        return None
    return Placed(layout, shape, _rows_of(place.shape, place.box, shape))


def _rule_of(kind: str) -> InnerRule:
    return allowed[kind][1] if kind in allowed else _KNOWN.get(kind, _UNKNOWN)


def _rows_of(whole: tuple[int, ...], box: Box, inner: tuple[int, ...]) -> Box:
    """The rows of an inner tensor that go with a box of the whole."""
    offset, size = (rows * inner[0] // whole[0] for rows in (box.offsets[0], box.shape[0]))
    return Box((offset, *(0 for _ in inner[1:])), (size, *inner[1:]))


@lru_cache(_CACHED_MAX)
def rowwise(
    layout: Layout, whole: tuple[int, ...], rows: int, local: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The global shape of an inner tensor: of it a rank with `rows` rows of the whole has `local`.

    None unless the layout cuts both alike, on every rank: then all ranks say the same.
    """
    if any(dim for _, dim in layout.splits) or not rows or whole[0] * local[0] % rows:
        return None
    inner = (whole[0] * local[0] // rows, *local[1:])
    for rank in layout.mesh.ranks:
        box, cut = layout.box(whole, rank), layout.box(inner, rank)
        for outer, own in ((box.offsets[0], cut.offsets[0]), (box.shape[0], cut.shape[0])):
            if outer * local[0] != own * rows:
                return None
        if not box.shape[0]:
            return None
    return inner


# -- in a tree -------------------------------------------------------------------------------------


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
    """The nodes of one restore; `memory` takes the plain tensors.

        {"$complex128": {"$tensor": name}}     the tensor is F64 with a last dimension of 2
        {"$subclass": {"class", "context", "shape", "stride", "part", "tensors": {inner: node}}}

    "part" is null where inner tensors are as the shape says; else the box that a rank holds: its
    inner tensors mean nothing without it. A new tensor is sharded like the parameter beside it.
    """

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
        if not is_allowed(local) or name_of(type(local)) != saved["class"]:
            return f"a {saved['class']}"
        form = form_of(local, path)
        if (wrong := _difference(form, local, saved, place)) is not None:
            return wrong
        found = dict.fromkeys(form.tensors, OWN)
        if saved["part"] is None:
            found_places = places(form, place)
            if found_places is None:
                return f"a {saved['class']} that was saved in another layout"
            found = found_places
        parts: list[_InnerTensor] = []
        for name, tensor in form.tensors.items():
            where = inner_path(path, name)
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
        return local if place is OWN or beside is None else boxed(local, beside)

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
                              inner_path(path, name))
            for name, each in saved["tensors"].items()
        }  # fmt: skip
        context = values.decode(saved["context"], nodes.value_of)
        return build(saved["class"], context, inner, shape, stride, path)

    def _inner_place(
        self, saved: Mapping[str, Any], name: str, node: Any, place: Placed, path: str
    ) -> Placed:
        if saved["part"] is not None:
            return OWN
        found = inner_place(saved["class"], name, place, self._shape(node))
        if found is None:
            raise _elsewhere(path, saved)
        return found


def _difference(
    form: SubclassForm, local: torch.Tensor, saved: Mapping[str, Any], place: Placed
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
    for part in parts_of(live, path):
        check_storable(part, path)


# -- values that are built anew --------------------------------------------------------------------


def value_of(tag: str, payload: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value of a leaf, for values.decode. `tensor` makes the tensor of a name."""
    if tag == "$tensor":
        return tensor(payload)
    if tag == "$ndarray":
        return tensor(payload).numpy()
    if tag == COMPLEX:
        is_tensor = isinstance(payload, torch.Tensor)
        return torch.view_as_complex(payload) if is_tensor else payload.view("c16")[..., 0]
    return build_saved(payload) if tag == SUBCLASS else nodes.value_of(tag, payload)
