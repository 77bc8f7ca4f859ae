"""Match a step with the live state, say where its bytes go, and apply the plain values afterwards.

Owns: the comparison of names, shapes and dtypes, all of it before anything changes; which tensors
are filled where they are and which have to be made; the order of the last act: containers and
optimizers, then load_state_dict() of other objects, then random generators (loading may draw).
Holds: `prepare` changes nothing that is live. Destinations are live storages wherever there is a
tensor of the saved shape and dtype; only what is missing (a fresh optimizer's state, new dict
entries) is allocated. `finish` is called only when every byte has arrived and was verified.
Not here: reading (engine), choosing the step (checkpointer).

A live dict takes the content of the saved one; entries that the step lacks are a mismatch. Objects
with load_state_dict() decide themselves what they accept.
"""

from __future__ import annotations

import base64
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from statehold import values
from statehold.errors import ManifestError, StateMismatchError, UsageError
from statehold.manifest import Manifest, TensorEntry
from statehold.state import dtypes, modules, optimizers
from statehold.state.capture import is_stateful, parts
from statehold.state.marks import Mark
from statehold.state.rng import Rng
from statehold.state.tensors import (
    Memory,
    Strided,
    check_storable,
    is_external,
    is_storable,
    is_view_of_other_values,
    memory_of,
    overlaps_itself,
    strides_of,
)

PROBLEMS_SHOWN = 20
HOST = torch.device("cpu")
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that takes the bytes of the saved tensor `name`."""

    name: str
    tensor: torch.Tensor
    strided: Strided | None
    external: bool

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


@dataclass(slots=True)
class Restoration:
    """Where the bytes go, and what is left to do once they have arrived."""

    destinations: list[Destination] = field(default_factory=list)
    live: list[torch.Tensor] = field(default_factory=list)
    containers: list[Callable[[], Any]] = field(default_factory=list)
    objects: list[Callable[[], Any]] = field(default_factory=list)
    generators: list[Callable[[], Any]] = field(default_factory=list)

    def finish(self) -> None:
        """Apply everything that is not tensor bytes."""
        with torch.no_grad():
            for act in (*self.containers, *self.objects, *self.generators):
                act()
        # Memory was written behind autograd's back: tell whoever saved these for a backward.
        torch.autograd.graph.increment_version(
            [tensor for tensor in self.live if not tensor.is_inference()]
        )


def prepare(state: Mapping[str, Any], manifest: Manifest) -> Restoration:
    """Match `state` with a step. Raises StateMismatchError that lists every difference."""
    matcher = _Matcher(state, manifest)
    matcher.top(state, manifest.state)
    if matcher.problems:
        raise _mismatch(matcher.problems)
    return matcher.restoration


def _mismatch(problems: list[tuple[str, str]]) -> StateMismatchError:
    facts = dict(problems[:PROBLEMS_SHOWN])
    if len(problems) > PROBLEMS_SHOWN:
        facts["..."] = f"{len(problems) - PROBLEMS_SHOWN} more"
    return StateMismatchError(
        f"the state and the step differ in {len(problems)} places; nothing was changed",
        facts=facts,
        hint="build the state as it was when the step was saved, or restore another step",
    )


class _Matcher:
    """One comparison of a live state with a saved tree."""

    def __init__(self, state: Mapping[str, Any], manifest: Manifest) -> None:
        self.problems: list[tuple[str, str]] = []
        self.restoration = Restoration()
        self._saved = manifest.tensors
        self._filled: dict[Memory, str] = {}
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._names = modules.parameter_names(
            (path, part) for path, part in parts(state) if isinstance(part, nn.Module)
        )

    def problem(self, path: str, expected: str, got: str) -> None:
        self.problems.append((path, f"expected {expected}, got {got}"))

    def top(self, state: Mapping[str, Any], node: Any) -> None:
        """The state itself: its names are the step's, no more and no fewer."""
        saved = _members(node)
        if saved is None:
            raise ManifestError("the state of the manifest is not an object")
        if not isinstance(state, MutableMapping):
            raise UsageError(
                "a state that is restored has to take values",
                facts={"expected": "a dict", "got": type(state).__name__},
            )
        for key in _missing(saved, state):
            self.problem(str(key), "nothing", "an entry of the step")
        present = {key: item for key, item in saved.items() if key in state}
        self._mapping(state, present, "")

    # -- live objects, by kind -------------------------------------------------------------

    def match(self, live: Any, node: Any, path: str) -> Any:
        """What belongs in the place of `live`: itself where it is restored in place."""
        if isinstance(live, Mark):
            return self._marked(live, node, path)
        if isinstance(live, torch.Tensor):
            return self._tensor(live, node, path)
        if isinstance(live, nn.Module):
            return self._module(live, node, path)
        if isinstance(live, torch.optim.Optimizer) and optimizers.is_standard(live):
            return self._optimizer(live, node, path)
        if is_stateful(live):
            return self._object(live, node, path)
        if type(live) in (dict, OrderedDict) and (saved := _members(node)) is not None:
            return self._mapping(live, saved, path)
        if type(live) is list and type(node) is list:
            return self._list(live, node, path)
        if type(live) is tuple and (items := _payload(node, "$tuple")) is not None:
            return self._tuple(live, items, path)
        return self._plain(live, node, path)

    def _marked(self, live: Mark[Any], node: Any, path: str) -> Mark[Any]:
        value = self.match(live.value, node, path)
        if value is not live.value:
            self.restoration.containers.append(lambda: setattr(live, "value", value))
        return live

    def _mapping(self, live: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: str) -> Any:
        content = {}
        for key, node in saved.items():
            where = f"{path}.{key}" if path else str(key)
            if key in live:
                content[key] = self.match(live[key], node, where)
            else:
                content[key] = self.rebuild(ABSENT, node)
        for key in _missing(live, saved):
            self.problem(f"{path}.{key}" if path else str(key), "an entry of the step", "nothing")
        self.restoration.containers.append(lambda: _replace(live, content))
        return live

    def _list(self, live: list[Any], nodes: list[Any], path: str) -> list[Any]:
        content = self._items(live, nodes, path)
        self.restoration.containers.append(lambda: live.__setitem__(slice(None), content))
        return live

    def _tuple(self, live: tuple[Any, ...], nodes: list[Any], path: str) -> tuple[Any, ...]:
        content = self._items(live, nodes, path)
        unchanged = len(live) == len(content) and all(map(_is, live, content))
        return live if unchanged else tuple(content)

    def _items(self, live: list[Any] | tuple[Any, ...], nodes: list[Any], path: str) -> list[Any]:
        for index in range(len(nodes), len(live)):
            if holds_state(live[index]):
                self.problem(f"{path}.{index}", "an entry of the step", "nothing")
        return [
            self.match(live[index], node, f"{path}.{index}")
            if index < len(live)
            else self.rebuild(ABSENT, node)
            for index, node in enumerate(nodes)
        ]

    def _plain(self, live: Any, node: Any, path: str) -> Any:
        if holds_state(live):
            self.problem(path, f"state of a {type(live).__name__}", "a value of another kind")
            return live
        if _payload(node, "$tensor") is not None and live is not None:
            self.problem(path, "a plain value", "a tensor")
            return live
        return self.rebuild(live, node)

    def _module(self, live: nn.Module, node: Any, path: str) -> nn.Module:
        saved = _members(node)
        if saved is None:
            self.problem(path, "the state of a module", "a value of another kind")
            return live
        entries, own = modules.entries(live), modules.own_tensors(live)
        for name in _missing(saved, entries):
            self.problem(f"{path}.{name}", "nothing", self._described(saved[name]))
        handed: dict[str, Any] = {}
        for name, value in entries.items():
            where = f"{path}.{name}"
            if name not in saved:
                self.problem(where, _describe(value), "nothing in the step")
            elif id(value) in own:
                self._tensor(value, saved[name], where)
            else:
                handed[name] = self.rebuild(ABSENT, saved[name])
        if handed:
            self.restoration.objects.append(lambda: modules.hand_over(live, handed))
        return live

    def _object(self, live: Any, node: Any, path: str) -> Any:
        value = self.rebuild(live.state_dict(), node)
        acts = self.restoration.generators if isinstance(live, Rng) else self.restoration.objects
        acts.append(lambda: live.load_state_dict(value))
        return live

    # -- optimizers ------------------------------------------------------------------------

    def _optimizer(self, live: torch.optim.Optimizer, node: Any, path: str) -> Any:
        whole = _members(node) or {}
        states = _members(whole.get("state"))
        nodes = whole.get("param_groups")
        if states is None or type(nodes) is not list:
            self.problem(path, "the state of an optimizer", "a value of another kind")
            return live
        groups = [_members(group) or {} for group in nodes]
        if not _is_by_name(groups):
            return self._object(live, node, path)
        live_names: list[list[str]] = [[] for _ in live.param_groups]
        for index, name, _ in optimizers.parameters(live, self._names):
            live_names[index].append(name)
        saved_names = [group.get(optimizers.PARAMS, []) for group in groups]
        if saved_names != live_names:
            self._compare_groups(saved_names, live_names, path)
            return live
        state: dict[Any, Any] = {}
        for index, name, parameter in optimizers.parameters(live, self._names):
            saved = _members(states.get(name)) or {}
            # The step's options are those that the next update will run with.
            options = {**live.param_groups[index], **groups[index]}
            state[parameter] = self._parameter_state(live, options, parameter, saved)
        others = self.rebuild(optimizers.other_state(live), whole.get("other", {}))
        self.restoration.containers.append(lambda: _set_optimizer_state(live, state, others))
        for group, saved in zip(live.param_groups, groups, strict=True):
            self._group(group, saved)
        return live

    def _parameter_state(
        self, live: Any, options: Any, parameter: torch.Tensor, saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        current = live.state.get(parameter, {})
        content = {}
        for key, node in saved.items():
            device = optimizers.state_device(options, key, parameter)
            value = current.get(key, ABSENT)
            if key == "step" and isinstance(value, torch.Tensor) and value.device != device:
                value = ABSENT
            content[key] = self.rebuild(value, node, device)
        return content

    def _compare_groups(self, saved: list[Any], live: list[list[str]], path: str) -> None:
        if len(saved) != len(live):
            what = "parameter groups"
            self.problem(f"{path}.param_groups", f"{len(live)} {what}", f"{len(saved)} in the step")
        for index, (theirs, ours) in enumerate(zip(saved, live, strict=False)):
            for position in range(max(len(theirs), len(ours))):
                got = theirs[position] if position < len(theirs) else "nothing"
                expected = ours[position] if position < len(ours) else "nothing"
                if got != expected:
                    where = f"{path}.param_groups.{index}.params.{position}"
                    self.problem(where, expected, f"{got} in the step")

    def _group(self, live: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """The saved options, which replace the live ones; those the step lacks stay."""
        options = {
            key: self.rebuild(live.get(key, ABSENT), node)
            for key, node in saved.items()
            if key != optimizers.PARAMS
        }
        self.restoration.containers.append(lambda: live.update(options))

    # -- tensors ---------------------------------------------------------------------------

    def _tensor(self, live: torch.Tensor, node: Any, path: str) -> torch.Tensor:
        name = _payload(node, "$tensor")
        if name is None:
            self.problem(path, _describe(live), "a plain value")
            return live
        check_storable(live, path)
        if not self._fits(live, name):
            self.problem(path, _describe(live), self._described(node))
        elif overlaps_itself(live):
            self.problem(path, "a tensor that can be written", "an expanded one")
        elif (other := self._fill(live, name)) is not None:
            self.problem(path, "one tensor, as it is tied", f"other values than {other}")
        else:
            self.restoration.live.append(live)
        return live

    def _fits(self, live: torch.Tensor, name: str) -> bool:
        saved = self._saved[name]
        dtype = dtypes.dtype_of(saved.dtype, name)
        return live.dtype == dtype and live.shape == dtypes.torch_shape(dtype, saved.shape)

    def _fill(self, live: torch.Tensor, name: str) -> str | None:
        """Make `live` a destination; the name of another tensor that already goes there."""
        target = live.detach()
        if is_view_of_other_values(live) or (is_external(target) and strides_of(target)):
            staged = torch.empty(live.shape, dtype=live.dtype, device=live.device)
            self.restoration.containers.append(lambda: live.detach().copy_(staged))
            target = staged
        memory = memory_of(target)
        other = self._filled.get(memory) if target.numel() else None
        if other == name:
            return None
        if other is not None:
            return None if self._same_bytes(name, other) else other
        self._filled[memory] = name
        self.restoration.destinations.append(
            Destination(name, target, strides_of(target), is_external(target))
        )
        return None

    def _same_bytes(self, name: str, other: str) -> bool:
        return _whole(self._saved[name]) == _whole(self._saved[other])

    def _make(self, name: str, device: torch.device) -> torch.Tensor:
        """A new tensor for `name`; one for all places that were tied."""
        if (name, device) not in self._made:
            saved = self._saved[name]
            dtype = dtypes.dtype_of(saved.dtype, name)
            shape = dtypes.torch_shape(dtype, saved.shape)
            self._made[name, device] = torch.empty(shape, dtype=dtype, device=device)
            self._fill(self._made[name, device], name)
        return self._made[name, device]

    def _described(self, node: Any) -> str:
        name = _payload(node, "$tensor")
        if name is None:
            return "a plain value in the step"
        saved = self._saved[name]
        return f"{saved.dtype} {list(saved.shape)} in the step"

    # -- values without a live counterpart of their own --------------------------------------

    def rebuild(self, live: Any, node: Any, device: torch.device = HOST) -> Any:
        """The saved value; tensors that `live` has in the same place are filled and used."""
        name = _payload(node, "$tensor")
        if name is not None:
            if isinstance(live, torch.Tensor) and self._usable(live, name):
                return live
            return self._make(name, device)
        if (array := _payload(node, "$ndarray")) is not None:
            return self._array(live, array)
        if (members := _members(node)) is not None:
            content = live if isinstance(live, Mapping) else {}
            built = {
                key: self.rebuild(content.get(key, ABSENT), item, device)
                for key, item in members.items()
            }
            return OrderedDict(built) if "$ordered" in node else built
        is_tuple = _payload(node, "$tuple") is not None
        if is_tuple or type(node) is list:
            items = live if isinstance(live, list | tuple) else ()
            made = [
                self.rebuild(items[i] if i < len(items) else ABSENT, item, device)
                for i, item in enumerate(node["$tuple"] if is_tuple else node)
            ]
            return tuple(made) if is_tuple else made
        return values.decode(node, lambda tag, payload: self._leaf(tag, payload, device))

    def _usable(self, live: torch.Tensor, name: str) -> bool:
        return (
            is_storable(live)
            and not overlaps_itself(live)
            and self._fits(live, name)
            and self._fill(live, name) is None
        )

    def _array(self, live: Any, name: str) -> Any:
        if type(live).__name__ == "ndarray" and live.flags.writeable and live.flags.c_contiguous:
            tensor = torch.from_numpy(live)
            if self._usable(tensor, name):
                return live
        return self._make(name, HOST).numpy()

    def _leaf(self, tag: str, payload: Any, device: torch.device) -> Any:
        if tag == "$tensor":
            return self._make(payload, device)
        if tag == "$ndarray":
            return self._make(payload, HOST).numpy()
        return foreign(tag, payload)


def foreign(tag: str, payload: Any) -> Any:
    """The value of a node of NumPy or torch that is not a tensor."""
    if tag == "$npscalar":
        return _numpy_scalar(payload["dtype"], base64.b64decode(payload["bytes"]))
    if "size" in payload:
        return torch.Size(payload["size"])
    if "device" in payload:
        return torch.device(payload["device"])
    dtype = getattr(torch, payload["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError("no such torch dtype", facts={"got": payload["dtype"]})
    return dtype


def holds_state(value: Any) -> bool:
    """Whether a live value has something that only a step's tensors or objects can restore."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor | nn.Module | Mark) or is_stateful(value):
            return True
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return False


def _numpy_scalar(name: str, raw: bytes) -> Any:
    numpy = importlib.import_module("numpy")
    expected = numpy.dtype(name).itemsize if dtypes.is_numpy_scalar(name) else None
    if len(raw) != expected:
        raise ManifestError(
            "no such NumPy scalar",
            facts={"dtype": name, "expected": f"{expected} bytes", "got": f"{len(raw)} bytes"},
        )
    return numpy.frombuffer(raw, dtype=numpy.dtype(name).newbyteorder("<")).astype(name)[0]


def _is_by_name(groups: Iterable[Mapping[Any, Any]]) -> bool:
    """Whether an optimizer was saved by the names of its parameters, not as its state_dict()."""
    return all(type(name) is str for group in groups for name in group.get(optimizers.PARAMS, []))


def _missing(these: Mapping[Any, Any], others: Mapping[Any, Any]) -> list[Any]:
    """The keys of `these` that `others` lack, in order."""
    return [key for key in these if key not in others]


def _replace(live: MutableMapping[Any, Any], content: Mapping[Any, Any]) -> None:
    live.clear()
    live.update(content)


def _set_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[torch.Tensor, dict[str, Any]],
    others: Mapping[Any, Any],
) -> None:
    """Give every parameter exactly the saved entries, in the dicts that are already there."""
    for key in optimizers.other_state(optimizer).keys() - others.keys():
        del optimizer.state[key]
    optimizer.state.update(others)
    for parameter, saved in state.items():
        if not saved:
            optimizer.state.pop(parameter, None)
            continue
        _replace(optimizer.state[parameter], saved)


def _members(node: Any) -> dict[Any, Any] | None:
    """The members of a saved dict, whichever way it was encoded; None for anything else."""
    if type(node) is not dict:
        return None
    if not _tag(node):
        return node
    pairs = node.get("$dict", node.get("$ordered"))
    if pairs is None:
        return None
    return {values.decode(key): item for key, item in pairs}


def _tag(node: dict[str, Any]) -> str | None:
    return next((key for key in node if key.startswith("$")), None)


def _payload(node: Any, tag: str) -> Any | None:
    return node.get(tag) if type(node) is dict else None


def _whole(saved: TensorEntry) -> tuple[Any, ...]:
    return saved.dtype, saved.shape, [chunk.sums for chunk in saved.chunks]


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return dtypes.described(value.dtype, tuple(value.shape))


def _is(left: Any, right: Any) -> bool:
    return left is right
