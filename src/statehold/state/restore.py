"""Match a step with the live state, say where its bytes go, and apply the plain values afterwards.

Owns: the comparison of names, all of it before anything changes; what is restored of it; the order
of the last act: containers and optimizers, then load_state_dict() of other objects, then random
generators (loading may draw).
Holds: `prepare` changes nothing that is live. Destinations are live storages wherever there is a
tensor of the saved shape and dtype; only what is missing (a fresh optimizer's state, new dict
entries) is allocated. `finish` is called only when every byte has arrived and was verified.
Not here: memory (destinations), reading (engine), choosing the step (checkpointer).

A live dict takes the content of the saved one; entries that the step lacks are missing. Objects
with load_state_dict() decide themselves what they accept. Optimizers know their parameters by name.
In a job of several ranks what this rank has no place for may be another's: the caller judges.
"""

from __future__ import annotations

import base64
import importlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from statehold.encoding import values
from statehold.errors import ManifestError, StateMismatchError, UsageError
from statehold.selection import EVERYTHING, RestoreReport, Selection
from statehold.state import dtypes, groups, modules, nodes, optimizers, placements
from statehold.state.capture import is_stateful, parts
from statehold.state.destinations import Destination, Destinations
from statehold.state.marks import Mark
from statehold.state.placements import Placed
from statehold.state.rng import Rng
from statehold.state.tensors import check_storable, is_dtensor, local_of, overlaps_itself
from statehold.steps.saved import SavedStep

PROBLEMS_SHOWN = 20
HOST = torch.device("cpu")
ABSENT = object()


@dataclass(slots=True)
class Restoration:
    """Where the bytes go, and what is left to do once they have arrived.

    `used`: the saved tensors that this rank takes. The other lists are of a RestoreReport.
    """

    step: int = 0
    destinations: list[Destination] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    live: list[torch.Tensor] = field(default_factory=list)
    containers: list[Callable[[], Any]] = field(default_factory=list)
    objects: list[Callable[[], Any]] = field(default_factory=list)
    generators: list[Callable[[], Any]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def report(self) -> RestoreReport:
        names = self.loaded, self.missing, self.unexpected, self.kept
        return RestoreReport(self.step, *map(tuple, names))

    def finish(self) -> None:
        """Apply everything that is not tensor bytes."""
        with torch.no_grad():
            for act in (*self.containers, *self.objects, *self.generators):
                act()
        # Memory was written behind autograd's back: tell whoever saved these for a backward.
        torch.autograd.graph.increment_version(
            [tensor for tensor in self.live if not tensor.is_inference()]
        )


def prepare(
    state: Mapping[str, Any],
    saved: SavedStep,
    *,
    selection: Selection = EVERYTHING,
    rank: int | None = None,
    alone: bool = True,
) -> Restoration:
    """Match `state`, of `rank` of several ranks or of one (None), with a step.

    alone: what this rank has no place for is no other rank's. Raises StateMismatchError that lists
    every difference.
    """
    matcher = _Matcher(state, saved, selection, rank, alone)
    matcher.top(state, saved.state)
    if matcher.problems:
        raise mismatch(matcher.problems)
    return matcher.restoration


def mismatch(problems: list[tuple[str, str]]) -> StateMismatchError:
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

    def __init__(
        self,
        state: Mapping[str, Any],
        saved: SavedStep,
        selection: Selection,
        rank: int | None,
        alone: bool,
    ) -> None:
        found = [(path, part) for path, part in parts(state) if isinstance(part, nn.Module)]
        self.problems: list[tuple[str, str]] = []
        self._saved = saved
        self._selection = selection
        self._alone = alone
        self._memory = Destinations(
            saved, placements.replicas_in((part for _, part in found), rank), rank
        )
        self.restoration = Restoration(
            saved.step, self._memory.found, self._memory.used, containers=self._memory.acts
        )
        self._names = modules.parameter_names(found)

    # -- what is said of it ------------------------------------------------------------------

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
        """Whether ranks saved different values, of which none is meant here: a problem."""
        found = nodes.differing(node) if self._saved.world_size > 1 else None
        if found is not None:
            saved = f"{self._saved.world_size} ranks saved their own ({found})"
            advice = f'restore on as many ranks, or leave it out with skip=["{path}"]'
            self.problems.append((path, f"{saved}, none of which is this rank's: {advice}"))
        return found is not None

    def top(self, state: Mapping[str, Any], node: Any) -> None:
        """The state itself: its names are the step's, no more and no fewer."""
        saved = nodes.members(node)
        if saved is None:
            raise ManifestError("the state of the manifest is not an object")
        if not isinstance(state, MutableMapping):
            raise UsageError(
                "a state that is restored has to take values",
                facts={"expected": "a dict", "got": type(state).__name__},
            )
        saved = nodes.renamed(saved, state, self._selection)
        for key in _missing(saved, state):
            if self._selection.reaches(str(key)):
                self.unexpected(str(key), "an entry of the step")
        present = {key: item for key, item in saved.items() if key in state}
        self._mapping(state, present, "")

    # -- live objects, by kind -------------------------------------------------------------

    def match(self, live: Any, node: Any, path: str) -> Any:
        """What belongs in the place of `live`: itself where it is restored in place."""
        if not self._selection.reaches(path):
            self.restoration.kept.append(path)
            return live
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
        if type(live) in (dict, OrderedDict) and (saved := nodes.members(node)) is not None:
            return self._mapping(live, saved, path)
        if type(live) is list and type(node) is list:
            return self._list(live, node, path)
        if type(live) is tuple and (items := nodes.payload(node, "$tuple")) is not None:
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
            where = _below(path, key)
            if key in live:
                content[key] = self.match(live[key], node, where)
            elif self._selection.takes(where):
                content[key] = self._new(node, where)
        for key in _missing(live, saved):
            where = _below(path, key)
            if self._selection.reaches(where):
                self.missing(where, "an entry of the step", "nothing")
            else:
                self.restoration.kept.append(where)
            content[key] = live[key]
        self.restoration.containers.append(lambda: _replace(live, content))
        return live

    def _list(self, live: list[Any], items: list[Any], path: str) -> list[Any]:
        content = self._items(live, items, path)
        self.restoration.containers.append(lambda: live.__setitem__(slice(None), content))
        return live

    def _tuple(self, live: tuple[Any, ...], items: list[Any], path: str) -> tuple[Any, ...]:
        content = self._items(live, items, path)
        unchanged = len(live) == len(content) and all(map(_is, live, content))
        return live if unchanged else tuple(content)

    def _items(self, live: list[Any] | tuple[Any, ...], items: list[Any], path: str) -> list[Any]:
        content = [
            self.match(live[index], node, f"{path}.{index}")
            if index < len(live)
            else self._new(node, f"{path}.{index}")
            for index, node in enumerate(items)
        ]
        for index in range(len(items), len(live)):
            if holds_state(live[index]):
                self.missing(f"{path}.{index}", "an entry of the step", "nothing")
                content.append(live[index])
        return content

    def _plain(self, live: Any, node: Any, path: str) -> Any:
        if not self._takes(path) or self._differs(node, path):
            return live
        if holds_state(live):
            self.problem(path, f"state of a {type(live).__name__}", "a value of another kind")
            return live
        if nodes.payload(node, "$tensor") is not None and live is not None:
            self.problem(path, "a plain value", "a tensor")
            return live
        return self.rebuild(live, node)

    def _new(self, node: Any, path: str) -> Any:
        """The saved value for a place where nothing is."""
        self.restoration.loaded.append(path)
        return None if self._differs(node, path) else self.rebuild(ABSENT, node)

    def _module(self, live: nn.Module, node: Any, path: str) -> nn.Module:
        saved = nodes.members(node)
        if saved is None:
            self.problem(path, "the state of a module", "a value of another kind")
            return live
        entries, own = modules.entries(live), modules.own_tensors(live)
        for name in _missing(saved, entries):
            self.unexpected(f"{path}.{name}", self._described(saved[name]))
        handed: dict[str, Any] = {}
        for name, value in entries.items():
            where = f"{path}.{name}"
            if name not in saved:
                if self._selection.takes(where):
                    self.missing(where, _describe(value))
                else:
                    self.restoration.kept.append(where)
            elif id(value) in own:
                self._tensor(value, saved[name], where)
            elif self._takes(where) and not self._differs(saved[name], where):
                handed[name] = self.rebuild(ABSENT, saved[name])
        if handed:
            self.restoration.objects.append(lambda: modules.hand_over(live, handed))
        return live

    def _object(self, live: Any, node: Any, path: str) -> Any:
        if isinstance(live, Rng) and nodes.differing(node) is not None:
            self.restoration.kept.append(path)  # a generator that goes on is as good as another
            return live
        if not self._takes(path) or self._differs(node, path):
            return live
        value = self.rebuild(live.state_dict(), node)
        acts = self.restoration.generators if isinstance(live, Rng) else self.restoration.objects
        acts.append(lambda: live.load_state_dict(value))
        return live

    # -- optimizers ------------------------------------------------------------------------

    def _optimizer(self, live: torch.optim.Optimizer, node: Any, path: str) -> Any:
        whole = nodes.members(node) or {}
        states = nodes.members(whole.get("state"))
        found = groups.saved_groups(whole.get("param_groups"))
        if states is None or found is None:
            self.problem(path, "the state of an optimizer", "a value of another kind")
            return live
        saved = [self._named(group) for group in found]
        if not groups.is_by_name(saved):
            return self._object(live, node, path)
        owners = groups.owners_of(saved)
        states = {self._selection.renamed(name): each for name, each in states.items()}
        options = self._options(live, saved, owners, path)
        content: dict[Any, Any] = {}
        for index, name, parameter in optimizers.parameters(live, self._names):
            where = f"{path}.state.{name}"
            if not self._selection.reaches(where):
                self.restoration.kept.append(where)
            elif name not in owners:
                self.missing(where, "a parameter of the step's optimizer", "nothing")
            elif not self._differs(states.get(name), where):
                known = nodes.members(states.get(name)) or {}
                merged = {**live.param_groups[index], **options[index]}
                content[parameter] = self._parameter_state(live, merged, parameter, known, where)
        ours = {name for _, name, _ in optimizers.parameters(live, self._names)}
        for name in _missing(owners, ours):
            self.unexpected(f"{path}.state.{name}", "a parameter of the step's optimizer")
        others = optimizers.other_state(live)
        if not self._differs(whole.get("other"), f"{path}.other") and self._selection.takes(path):
            others = self.rebuild(others, whole.get("other", {}))
        self.restoration.containers.append(lambda: _set_optimizer_state(live, content, others))
        return live

    def _named(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A saved group with its parameters' live names."""
        names = group.get(optimizers.PARAMS, [])
        if not self._selection.rename or not groups.is_by_name([group]):
            return group
        return {**group, optimizers.PARAMS: [self._selection.renamed(name) for name in names]}

    def _options(
        self,
        live: torch.optim.Optimizer,
        saved: list[Mapping[str, Any]],
        owners: groups.Owners,
        path: str,
    ) -> list[Mapping[str, Any]]:
        """The saved options for each live group, which they will replace."""
        names: list[list[str]] = [[] for _ in live.param_groups]
        for index, name, _ in optimizers.parameters(live, self._names):
            names[index].append(name)
        found: list[Mapping[str, Any]] = []
        for index, group in enumerate(live.param_groups):
            where = f"{path}.param_groups.{index}"
            options = groups.options_for(names[index], index, owners, saved)
            if options is None:
                differing = ", ".join(groups.differing_options(names[index], owners))
                got = f"parameters of several groups, which differ in {differing}"
                self.problem(where, "the options of one group of the step", got)
            found.append(options or {})
            self._group(group, options or {}, where)
        return found

    def _group(self, live: dict[str, Any], saved: Mapping[str, Any], path: str) -> None:
        """The saved options replace the live ones; those the step lacks stay."""
        options = {}
        for key, node in saved.items():
            where = f"{path}.{key}"
            if key == optimizers.PARAMS or not self._takes(where) or self._differs(node, where):
                continue
            options[key] = self.rebuild(live.get(key, ABSENT), node)
        self.restoration.containers.append(lambda: live.update(options))

    def _parameter_state(
        self,
        live: torch.optim.Optimizer,
        options: Mapping[str, Any],
        parameter: torch.Tensor,
        saved: Mapping[str, Any],
        path: str,
    ) -> dict[str, Any]:
        current = live.state.get(parameter, {})
        beside = self._memory.place(parameter, path)
        content = {}
        for key in dict.fromkeys((*saved, *current)):
            where = f"{path}.{key}"
            if not self._selection.takes(where):
                self.restoration.kept.append(where)
                if key in current:
                    content[key] = current[key]
            elif key in saved:
                self.restoration.loaded.append(where)
                device = optimizers.state_device(options, key, parameter)
                value = current.get(key, ABSENT)
                content[key] = self._beside(value, saved[key], parameter, beside, key, device)
        return content

    def _beside(
        self,
        live: Any,
        node: Any,
        parameter: torch.Tensor,
        beside: Placed,
        key: str,
        device: torch.device,
    ) -> Any:
        """One entry of the state of a parameter, which lies where `beside` says."""
        name = nodes.payload(node, "$tensor")
        if name is None:
            return self.rebuild(live, node, device)
        if isinstance(live, torch.Tensor) and not (key == "step" and live.device != device):
            place = None if is_dtensor(live) else placements.beside(live, parameter, beside)
            if self._memory.usable(live, name, place):
                return live
        is_sharded = is_dtensor(parameter) and self._memory.has_shape_of(parameter, name)
        return self._memory.make(name, device, parameter if is_sharded else None)

    # -- tensors ---------------------------------------------------------------------------

    def _tensor(self, live: torch.Tensor, node: Any, path: str) -> torch.Tensor:
        if not self._takes(path) or self._differs(node, path):
            return live
        name = nodes.payload(node, "$tensor")
        if name is None:
            self.problem(path, _describe(live), "a plain value")
            return live
        check_storable(live, path)
        place = self._memory.place(live, path)
        if not self._memory.fits(live, name, place):
            self.problem(path, _describe(live), self._described(node))
        elif overlaps_itself(local_of(live)):
            self.problem(path, "a tensor that can be written", "an expanded one")
        elif (other := self._memory.fill(live, name, place)) is not None:
            self.problem(path, "one tensor, as it is tied", f"other values than {other}")
        else:
            self.restoration.live += [live] if (local := local_of(live)) is live else [live, local]
        return live

    def _described(self, node: Any) -> str:
        name = nodes.payload(node, "$tensor")
        return "a plain value in the step" if name is None else self._memory.described(name)

    # -- values without a live counterpart of their own --------------------------------------

    def rebuild(self, live: Any, node: Any, device: torch.device = HOST) -> Any:
        """The saved value; tensors that `live` has in the same place are filled and used."""
        name = nodes.payload(node, "$tensor")
        if name is not None:
            if isinstance(live, torch.Tensor) and self._memory.usable(live, name):
                return live
            return self._memory.make(name, device)
        if (array := nodes.payload(node, "$ndarray")) is not None:
            return self._array(live, array)
        if (members := nodes.members(node)) is not None:
            content = live if isinstance(live, Mapping) else {}
            built = {
                key: self.rebuild(content.get(key, ABSENT), item, device)
                for key, item in members.items()
            }
            return OrderedDict(built) if "$ordered" in node else built
        is_tuple = nodes.payload(node, "$tuple") is not None
        if is_tuple or type(node) is list:
            items = live if isinstance(live, list | tuple) else ()
            made = [
                self.rebuild(items[i] if i < len(items) else ABSENT, item, device)
                for i, item in enumerate(node["$tuple"] if is_tuple else node)
            ]
            return tuple(made) if is_tuple else made
        return values.decode(node, lambda tag, payload: self._leaf(tag, payload, device))

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


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _missing(these: Iterable[Any], others: Container[Any]) -> list[Any]:
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


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return dtypes.described(value.dtype, tuple(value.shape))


def _is(left: Any, right: Any) -> bool:
    return left is right
