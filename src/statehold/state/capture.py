"""Flatten a state into tensors with names and a tree of plain values; no tensor's bytes move here.

Owns: which tensors a step holds, what they are called, and which must be copied at once (eager)
and which may be copied until the next update (lazy):
    lazy    parameters of modules; parameters and state tensors of optimizers in the state, and
            tensors that share their storage; state tensors of optimizers that step through the
            gate, wherever they are found; what is wrapped in Gated
    eager   everything else: buffers, other tensors, tensors inside state_dict() of objects, tensors
            in param_groups; and whatever is wrapped in Volatile, which wins
Random generators are read last of all: other objects may draw while they give their state, as a
loader does that was not iterated yet.
Holds: a captured tensor is an alias that keeps the memory alive at the address it had at capture,
with the version counter of then; the tree shares no container with the live state.
In a job of several ranks a tensor is this rank's box, and its spec says of what: DTensors by their
placements, what DistributedDataParallel replicates, and the optimizer state of both. All else is
this rank's own.
Not here: the copying (engine, device), the layout of the file (plan), layouts (placements).

An eager tensor on a device is cloned there, in the order of the device's work: buffers are small.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from statehold.encoding import values
from statehold.errors import UnsupportedValueError, UsageError, noting
from statehold.planning.layout import Layout
from statehold.planning.plan import TensorSpec
from statehold.state import (
    adapters,
    dtypes,
    foreign,
    loaders,
    modules,
    optimizers,
    placements,
    subclasses,
)
from statehold.state.composed import COMPLEX, SUBCLASS, as_real
from statehold.state.marks import Gated, Mark, Volatile
from statehold.state.placements import OWN, Placed
from statehold.state.rng import Rng
from statehold.state.stepping import Storages, storages
from statehold.state.tensors import (
    Memory,
    Strided,
    check_storable,
    is_dtensor,
    is_external,
    is_storable,
    is_view_of_other_values,
    local_of,
    memory_of,
    storage_of,
    strides_of,
    version_of,
)
from statehold.units import format_bytes

# With tensors on a device, neither save() nor the gate waits for it: the copies are enqueued behind
# its work. Host tensors are not in that order, and share blocks with device tensors, so those up
# to this size (an optimizer's `step`) are cloned at capture.
SMALL_BYTES = 64 << 10
# Parameters handed over without their module are worth a line in the log from here on.
TOLD_BYTES_MIN = 64 << 20
_PARTLESS = {bool, int, float, str, bytes, type(None), torch.Tensor, nn.Parameter}


@dataclass(slots=True)
class CapturedTensor:
    """A tensor to save. `strided` is None for contiguous memory; `external`: not host memory.

    `tensor` is the local tensor of a DTensor, `wrapper` the DTensor; `version` counts both.
    `spec.eager` says where the tensor is laid out, so all ranks have to agree on it. `eager` says
    when its bytes are copied, which each rank decides for itself.
    """

    spec: TensorSpec
    tensor: torch.Tensor
    version: int
    address: int
    strided: Strided | None
    external: bool
    owned: bool  # a copy that nobody else can change
    wrapper: torch.Tensor | None
    is_gated: bool = False  # laid out as eager, and yet only a step() that waits changes it

    @property
    def eager(self) -> bool:
        """Whether the bytes are copied before save() returns."""
        return self.spec.eager and not self.is_gated


@dataclass(slots=True)
class Capture:
    """A state at the time of `capture`. `tensors` are distinct in memory; ties are in the tree.

    note: what the user could hand over so that save() returns earlier; "" if nothing.
    doubts: what a restore will not put back, and what the user can do about it now.
    """

    tensors: list[CapturedTensor]
    tree: Any
    note: str = ""
    doubts: list[str] = field(default_factory=list)
    _settled: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> str | None:
        """Declare that lazy tensors may change from now on; the name of one that already has.

        Asked from the gate and from the stage thread: the first to find all unchanged decides,
        and what changes later is an update that was let through.
        """
        with self._guard:
            moved = None if self._settled else self.moved(eager=False)
            self._settled = moved is None
            return moved

    def moved(self, *, eager: bool) -> str | None:
        """The name of an eager (or of a lazy) tensor that changed since capture, or None."""
        for captured in self.tensors:
            if captured.eager is not eager or captured.version < 0:
                continue
            if version_of(captured.tensor, captured.wrapper) != captured.version:
                return captured.spec.name
        return None

    @property
    def eager_bytes(self) -> int:
        """The bytes that are copied before save() returns, in capture() or right after it."""
        return sum(each.spec.nbytes for each in self.tensors if each.eager or each.owned)


def capture(
    state: Mapping[str, Any],
    rank: int | None = None,
    stepping: Iterable[torch.optim.Optimizer] = (),
) -> Capture:
    """Capture a state, or `rank`'s part of one that several ranks save (None: it is alone).

    stepping: optimizers whose every step() waits at the gate, whether the state has them or not.
    Raises UnsupportedValueError, with the path, for what no step can hold.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            "a state is a mapping of names to what is to be saved",
            facts={"expected": "a dict", "got": type(state).__name__},
            hint='give the parts names: save(step, {"model": model, "optimizer": optimizer})',
        )
    capturer = _Capturer(state, rank, stepping)
    tree = values.encode(dict(state), "", capturer.leaf)
    capturer.read_generators()
    if any(tensor.external for tensor in capturer.tensors):
        capturer.clone_small_host_tensors()
    return Capture(capturer.tensors, tree, capturer.note(), capturer.doubts)


def parts(state: Any) -> Iterator[tuple[str, Any]]:
    """(path, object) of the modules and optimizers in dicts, lists and tuples, in their order; of a
    wrapper around an optimizer the optimizer.

    Visits a container once, however often and however deep it is held: what is too deep, or holds
    itself, is for `values` to refuse.
    """
    seen: set[int] = set()
    left = [("", state)]
    while left:
        path, value = left.pop()
        if isinstance(value, nn.Module):
            yield path, value
        elif (optimizer := optimizers.behind(value)) is not None:
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


def is_stateful(value: Any) -> bool:
    """Whether `value` can give and take its state itself. A class is not an object with state."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def _holds_itself(value: Any, path: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a container in the state holds itself",
        facts={"path": path, "type": type(value).__name__},
        hint="store each object once",
    )


class _Capturer:
    """One capture: what was found so far."""

    def __init__(
        self,
        state: Mapping[str, Any],
        rank: int | None,
        stepping: Iterable[torch.optim.Optimizer],
    ) -> None:
        found = list(parts(state))
        self._rank = rank
        self.optimizers = [part for _, part in found if isinstance(part, torch.optim.Optimizer)]
        self._names = modules.parameter_names(
            (path, part) for path, part in found if isinstance(part, nn.Module)
        )
        self.tensors: list[CapturedTensor] = []
        self._replicas = placements.replicas_in(
            (part for _, part in found if isinstance(part, nn.Module)), self._rank
        )
        # With the tensor: memory of a temporary that state_dict() made must not be used again while
        # its address stands for it here. DTensors are known by their ids: all ranks have to find
        # the same ties, also those whose box is empty.
        self._places: dict[Memory | int, tuple[int, torch.Tensor]] = {}
        self._taken: set[str] = set()
        self._gated_storages: set[int] | None = None
        self._stepping = stepping
        self._known: Storages | None = None
        self._parameters: list[TensorSpec] = []  # plain tensors that are those of an optimizer
        self._mark: type[Mark[Any]] | None = None
        self._active: set[int] = set()
        self._generators: list[tuple[Rng, str, dict[str, Any]]] = []
        self.doubts: list[str] = []

    # -- the hook of values.encode ---------------------------------------------------------

    def leaf(self, value: Any, path: str) -> Any | None:
        """The node of what is not a plain value; None for what nobody can store."""
        if isinstance(value, torch.Tensor):
            return self._plain_tensor(value, path)
        if isinstance(value, Mark):
            return self._marked(value, path)
        if isinstance(value, nn.Module):
            return self._module(value, path)
        optimizer = optimizers.behind(value)
        if optimizer is not None and optimizers.is_standard(optimizer):
            return self._optimizer(optimizer, path)
        if isinstance(value, Rng):
            return self._later(value, path)
        if (refusal := loaders.refusal(value, path)) is not None:
            raise refusal
        if is_stateful(value):
            return self._inside(value, lambda: loaders.state_of(value, self._tell(path)), path)
        return self._foreign(value, path)

    def _tell(self, path: str) -> Callable[[str], None]:
        return lambda doubt: self.doubts.append(
            f'a restart may go on differently in "{path}": {doubt}'
        )

    def _later(self, rng: Rng, path: str) -> dict[str, Any]:
        """A node that is empty until read_generators()."""
        node: dict[str, Any] = {}
        self._generators.append((rng, path, node))
        return node

    def read_generators(self) -> None:
        for rng, path, node in self._generators:
            node.update(self._encode(rng.state_dict(), path))

    def _inside(self, value: Any, content: Callable[[], Any], path: str) -> Any:
        # values.encode sees cycles among containers, but not those that lead through an object.
        if id(value) in self._active:
            raise _holds_itself(value, path)
        self._active.add(id(value))
        try:
            with noting(f'while the state of "{path}" was taken; nothing of the step is saved'):
                inside = content()
            return self._encode(inside, path)
        finally:
            self._active.discard(id(value))

    def _encode(self, value: Any, path: str) -> Any:
        return values.encode(value, path, self.leaf)

    def _marked(self, value: Mark[Any], path: str) -> Any:
        outer = self._mark
        if outer is not Volatile:
            self._mark = type(value)
        try:
            return self._inside(value, lambda: value.value, path)
        finally:
            self._mark = outer

    def _module(self, module: nn.Module, path: str) -> Any:
        node = {}
        for name, value in modules.entries(module).items():
            where = f"{path}.{name}"
            if isinstance(value, torch.Tensor):
                is_parameter = isinstance(value, nn.Parameter)
                node[name] = self._tensor(value, where, lazy=is_parameter)
            else:
                node[name] = self._encode(value, where)
        return values.mapping_of(node)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Any:
        state: dict[str, Any] = {}
        groups: list[Any] = [{optimizers.PARAMS: []} for _ in optimizer.param_groups]
        for index, name, parameter in optimizers.parameters(optimizer, self._names):
            groups[index][optimizers.PARAMS].append(name)
            if parameter in optimizer.state:
                state[name] = self._parameter_state(
                    optimizer.state[parameter], f"{path}.state.{name}", parameter
                )
        for index, group in enumerate(optimizer.param_groups):
            options = {key: item for key, item in group.items() if key != optimizers.PARAMS}
            groups[index] |= self._members(options, f"{path}.param_groups.{index}")
        node = {
            "state": values.mapping_of(state),
            "param_groups": [values.mapping_of(group) for group in groups],
        }
        if others := optimizers.other_state(optimizer):
            node["other"] = self._encode(others, f"{path}.other")
        return node

    def _members(self, members: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        return {key: self._encode(item, f"{path}.{key}") for key, item in members.items()}

    def _parameter_state(self, state: Any, path: str, parameter: torch.Tensor) -> Any:
        node = {}
        beside = self._place(parameter, path)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                place = None if is_dtensor(value) else placements.beside(value, parameter, beside)
                node[key] = self._tensor(value, f"{path}.{key}", lazy=True, place=place)
            else:
                node[key] = self._encode(value, f"{path}.{key}")
        return values.mapping_of(node)

    def _foreign(self, value: Any, path: str) -> Any | None:
        if (node := foreign.torch_node(value)) is not None:
            return node
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self._numpy(value, path)
        return None

    def _numpy(self, value: Any, path: str) -> Any | None:
        name = value.dtype.name
        if isinstance(value, sys.modules["numpy"].generic):
            return foreign.scalar_node(value)
        if type(value).__name__ != "ndarray":
            return None
        known = name == "complex128" or name in dtypes.NUMPY_TO_TORCH
        if not known or not value.dtype.isnative:
            raise UnsupportedValueError(
                "a NumPy array has a dtype that no step can hold",
                facts={"path": path, "dtype": str(value.dtype)},
                hint="convert it with astype() to a number type in native byte order",
            )
        # A private copy: a tensor cannot borrow read-only arrays or those with negative strides.
        array = torch.from_numpy(value.copy(order="C"))
        is_complex = array.dtype == torch.complex128
        pairs = torch.view_as_real(array) if is_complex else array
        node = {"$ndarray": self._add(pairs, path, False, owned=True)}
        return {COMPLEX: node} if is_complex else node

    # -- tensors ---------------------------------------------------------------------------

    def _place(self, tensor: torch.Tensor, path: str) -> Placed:
        return placements.place_of(tensor, path, self._rank, self._replicas)

    def _is_gated(self, tensor: torch.Tensor) -> bool:
        if self._mark is Gated:
            return True
        if not self.optimizers or not is_storable(tensor):
            return False
        if self._gated_storages is None:
            self._gated_storages = storages(
                owned
                for optimizer in self.optimizers
                for owned in optimizers.owned_tensors(optimizer)
            )
        return storage_of(local_of(tensor)) in self._gated_storages

    def _plain_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        """A tensor that comes without its module or optimizer, such as one of a state_dict().

        What an optimizer keeps for itself nobody else changes. Parameters are another matter: many
        programs swap them for averages, through `.data`, as soon as save() has returned.
        """
        if self._is_gated(tensor):
            return self._tensor(tensor, path, lazy=True)
        if self._mark is Volatile or not is_storable(tensor):
            return self._tensor(tensor, path, lazy=False)
        if self._known is None:
            self._known = Storages.of(self._stepping)
        storage = storage_of(local_of(tensor))
        count = len(self.tensors)
        node = self._tensor(tensor, path, lazy=False, is_gated=storage in self._known.state)
        if storage in self._known.parameters:
            self._parameters += [each.spec for each in self.tensors[count:]]
        return node

    def note(self) -> str:
        """See Capture."""
        nbytes = sum(spec.nbytes for spec in self._parameters)
        if nbytes < TOLD_BYTES_MIN:
            return ""
        first = self._parameters[0].name
        return (
            f"{format_bytes(nbytes)} of parameters, such as {first}, are copied before save() "
            "returns, because the state has tensors of a state_dict(): hand over the module itself "
            "to have them copied while training goes on"
        )

    def _tensor(
        self,
        tensor: torch.Tensor,
        path: str,
        *,
        lazy: bool,
        place: Placed | None = None,
        is_gated: bool = False,
    ) -> Any:
        local = local_of(tensor)
        if subclasses.is_allowed(local):
            return self._subclass(tensor, path, lazy, place or self._place(tensor, path))
        check_storable(tensor, path)
        place = place or self._place(tensor, path)
        wrapper = None if local is tensor else tensor
        eager = self._mark is Volatile or not lazy
        alias, is_complex = local.detach(), tensor.dtype == torch.complex128
        if is_complex:
            alias, place = torch.view_as_real(alias.resolve_conj()), as_real(place)
        added = self._add(alias, path, eager, place=place, wrapper=wrapper, is_gated=is_gated)
        if is_complex:
            return {COMPLEX: {"$tensor": added}}
        return {"$tensor": added}

    def _subclass(self, tensor: torch.Tensor, path: str, lazy: bool, place: Placed) -> Any:
        """A tensor that is made of others: these, and how to put them together."""
        local = local_of(tensor)
        form = subclasses.form_of(local, path)
        places = subclasses.places(form, place)
        part = None
        if places is None and place.box is not None and place.shape is not None:
            part = {"offsets": list(place.box.offsets), "of": list(place.shape)}
        whole = local if part else tensor
        inner = {
            name: self._tensor(
                each,
                adapters.inner_path(path, name),
                lazy=lazy or self._is_gated(each),
                place=None if is_dtensor(each) else (places or {}).get(name, OWN),
            )
            for name, each in form.tensors.items()
        }
        shape = place.shape if place.shape and not part else tuple(whole.shape)
        return {
            SUBCLASS: {
                "class": form.kind,
                "context": form.context,
                "shape": list(shape),
                "stride": list(whole.stride()),
                "part": part,
                "tensors": inner,
            }
        }

    def _add(
        self,
        tensor: torch.Tensor,
        name: str,
        eager: bool,
        *,
        owned: bool = False,
        place: Placed = OWN,
        wrapper: torch.Tensor | None = None,
        is_gated: bool = False,
    ) -> str:
        memory = id(wrapper) if wrapper is not None else memory_of(tensor)
        held = self._places.get(memory)
        if held is not None:
            index, _ = held
            first = self.tensors[index]
            is_gated = is_gated and not first.eager
            if eager and not first.owned and (first.spec.eager, first.is_gated) != (True, is_gated):
                self.tensors[index] = _captured(
                    first.tensor, first.spec, True, wrapper=wrapper, is_gated=is_gated
                )
            return first.spec.name
        if name in self._taken or not name:
            raise UnsupportedValueError(
                "two tensors of the state have the same name, or one has none",
                facts={"path": name},
                hint="names are joined with dots: rename a key of the dicts on the way",
            )
        if wrapper is not None:
            self._places[memory] = len(self.tensors), wrapper
        elif tensor.data_ptr() and tensor.numel():
            self._places[memory] = len(self.tensors), tensor
        self._taken.add(name)
        spec = _spec(tensor, name, eager, place)
        self.tensors.append(_captured(tensor, spec, eager, owned, wrapper, is_gated))
        return name

    def clone_small_host_tensors(self) -> None:
        """Copy small host tensors now; see SMALL_BYTES."""
        for index, captured in enumerate(self.tensors):
            if captured.spec.nbytes <= SMALL_BYTES and not captured.external and not captured.owned:
                copy = _clone(captured.tensor)
                self.tensors[index] = _captured(copy, captured.spec, False, owned=True)


def _spec(tensor: torch.Tensor, name: str, eager: bool, place: Placed) -> TensorSpec:
    dtype = tensor.dtype
    shape = dtypes.stored_shape(dtype, tuple(tensor.shape), name)
    code, nbytes = dtypes.code_of(dtype, name), tensor.numel() * tensor.element_size()
    if place.layout is None or place.shape is None or place.box is None:
        return TensorSpec(name, code, shape, nbytes, eager)
    whole = dtypes.stored_shape(dtype, place.shape, name)
    if whole is not place.shape and not _packs_evenly(place.layout, place.shape, whole):
        raise UnsupportedValueError(
            "a tensor of packed 4-bit values is split unevenly along its last dimension",
            facts={"path": name, "shape": list(place.shape)},
            hint="split it along another dimension",
        )
    offsets = dtypes.stored_shape(dtype, place.box.offsets, name)
    return TensorSpec(name, code, shape, nbytes, eager, place.layout, whole, offsets)


def _packs_evenly(layout: Layout, shape: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether a layout cuts the packed shape where it cuts the other."""
    return layout.largest_box(packed).shape[-1] == 2 * layout.largest_box(shape).shape[-1]


def _captured(
    tensor: torch.Tensor,
    spec: TensorSpec,
    eager: bool,
    owned: bool = False,
    wrapper: torch.Tensor | None = None,
    is_gated: bool = False,
) -> CapturedTensor:
    external = is_external(tensor)
    if is_view_of_other_values(tensor):
        tensor, owned = tensor.resolve_conj().resolve_neg(), True
    is_gated = is_gated and not tensor.is_inference()
    eager = (eager or tensor.is_inference()) and not owned
    if external:  # nothing of a device is laid out as eager
        if (eager and not is_gated) or not tensor.is_contiguous():
            tensor, owned = _clone(tensor), True
        eager = False
    if spec.eager is not eager:
        spec = replace(spec, eager=eager)
    wrapper = None if owned else wrapper
    version, strided = version_of(tensor, wrapper), strides_of(tensor)
    address = tensor.data_ptr()
    return CapturedTensor(
        spec, tensor, version, address, strided, external, owned, wrapper, is_gated and eager
    )


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
