"""Checkpoints of other libraries -> a live state.

If a part can have several names, they are tried in this order, for a module "model" and an
optimizer "optim":
    model.layers.0.weight         layers.0.weight
    optim.state.<p>.exp_avg       state.<p>.exp_avg          <p>: layers.0.weight, or its index
    optim.param_groups.0.lr       param_groups.0.lr          or by <p>, as flattened ones are

Owns: the names of live parts in such checkpoints, the report, and the boxes that go to each rank.
Invariants: everything is matched before anything changes. A restore that would load nothing, and a
prefix in `rename` that matches nothing, are errors.
Not here: the format of a path, and its bytes (formats); our own steps (Checkpointer.restore,
StorageReader); the meaning of `rename` (selection).
"""

from __future__ import annotations

import os
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import setitem
from typing import Any, NoReturn

import torch
from torch import distributed, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from statehold.errors import CorruptionError, StateholdError, StateMismatchError, annotate, some
from statehold.format.selection import Answer, Names, Selection, check_answers
from statehold.integrations.dcp.machine import rank_and_world
from statehold.integrations.formats import untrusted
from statehold.integrations.formats.recognition import check_names, recognised
from statehold.integrations.formats.streamed import (
    Streamed,
    in_memory,
    is_entered,
    leaves,
    read_now,
    replaced,
    storable,
)
from statehold.layout.layout import Box
from statehold.options.paths import check_path
from statehold.tensors import nodes
from statehold.tensors.kinds import check_takes_values, modules, optimizers
from statehold.tensors.matching import holds_state, missing_of, places, tie_of
from statehold.tensors.nodes import GROUPS, PARAMS, Group
from statehold.tensors.placements import placed
from statehold.tensors.stepping import may_make
from statehold.tensors.storable import empty_on, is_stateful, local_of, part_of

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class StockReport:
    """What was loaded.

    Attributes:
        loaded: live names that were loaded.
        missing: live names that the checkpoint lacks.
        unexpected: names of the checkpoint that the state did not take.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def restore_stock(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> StockReport:
    """Load a checkpoint of another library into `state`, in place.

    The state may hold modules, optimizers (also fresh ones), tensors and plain values, plain or
    sharded. All of several ranks call this.

    Args:
        state: as for Checkpointer.restore().
        path: a checkpoint that import_step takes: a file of torch.save or safetensors, or a
            directory of safetensors, of pytorch_model.bin, of torch.distributed.checkpoint, of
            DeepSpeed's ZeRO or of its universal checkpoints.
        strict: raise StateMismatchError, before anything changes, if the checkpoint lacks an entry
            of the state. Entries that only the checkpoint has are reported, and are no error.
        rename: prefixes of names in the checkpoint and the live prefixes that replace them, as in
            Checkpointer.restore; or a function from a name in the checkpoint to the live name.

    Raises:
        UsageError: the state is not a dict, the path is not a checkpoint, or a prefix matches
            nothing.
        StateMismatchError: an entry is missing; also if not strict, if the checkpoint has nothing
            of the state.
        UnsupportedValueError: a pickle holds more than data.
    """
    check_takes_values(state)
    reader = _ForeignReader(check_path(path, "the checkpoint"))
    matcher = _StockMatcher(reader, rename)
    for key, part in state.items():
        matcher.match(state, key, part, str(key))
    matcher.check(os.fspath(path), strict)
    _on_all_ranks(lambda: reader.read(matcher.targets))
    with torch.no_grad():
        for act in matcher.acts:
            act(reader.objects)
    return matcher.report()


def _on_all_ranks(read: Callable[[], None]) -> None:
    """An error of a rank is raised on all ranks: none goes on with a state that others lack."""
    if (world := rank_and_world()[1]) == 1:
        read()
        return
    fault: Exception | None = None
    try:
        read()
    except Exception as error:
        fault = error
    faults: list[Exception | None] = [None] * world
    distributed.all_gather_object(faults, fault)
    for number, each in enumerate(faults):
        if each is not None:
            annotate(each, f"rank {number} could not read the checkpoint")
            raise each.with_fact("rank", number) if isinstance(each, StateholdError) else each


# -- matching -----------------------------------------------------------------------------------

Act = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class _Found:
    names: dict[str, str]  # live name -> name in the checkpoint
    missing: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class _StockMatcher:
    """Where the parts of a state are in a checkpoint."""

    def __init__(
        self, reader: _ForeignReader, rename: Mapping[str, str] | Callable[[str], str] | None
    ) -> None:
        self._saved = reader.entries
        self._are_equal = reader.are_equal
        self._selection = Selection(rename=None if callable(rename) else rename)
        renamed = rename if callable(rename) else self._selection.renamed
        self._value_of, wholes = reader.value_of, dict[str, str]()
        self._names = {renamed(name): name for name in missing_of(self._saved, reader.wholes)}
        for name, leaf in reader.wholes.items():
            below = leaf.removeprefix(name)
            if (new := renamed(leaf)).endswith(below):
                wholes[new.removesuffix(below)] = name
        self._known = ChainMap(self._names, wholes)
        self._fields: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name in (*self._names, *wholes):
            base, _, last = name.rpartition(".")
            if name in self._names or base in self._fields:
                self._fields[base][last] = name
        self._found = _Found({})
        self._asked: dict[str, None] = {}
        self._parameters: dict[int, str] = {}
        self._tensors: dict[str, Any] = {}  # live name -> tie_of() the tensor
        self.targets: dict[str, Any] = {}
        self.acts: list[Act] = []

    def report(self) -> StockReport:
        used = set(self._found.names.values())
        inside = tuple(f"{name}." for name in used.intersection(self._known.maps[1].values()))
        rest = [
            name
            for name, own in self._names.items()
            if own not in used and not own.startswith(inside)
        ]
        return StockReport(tuple(self._found.names), tuple(self._found.missing), tuple(rest))

    def check(self, path: str, strict: bool) -> None:
        # As for a step of our own, a pattern that matches nothing is a typing error.
        names = Names(taken=(), saved=list(self._saved), live=list(self._asked))
        check_answers([Answer(self._selection.answers(names), loads=True, has_rest=False)])
        self._take_ties()
        missing = dict.fromkeys(self._found.missing, "not in the checkpoint")
        problems = self._found.problems | (missing if strict else {})
        if problems:
            self._fail(
                path,
                f"the state and the checkpoint differ in {places(len(problems))}; nothing was "
                "changed",
                problems,
                "rename= maps names; strict=False leaves missing entries unchanged",
            )
        if not self._found.names:
            self._fail(
                path,
                "nothing of the state is in the checkpoint; nothing was changed",
                missing,
                "rename= maps names of the checkpoint to those of the state",
            )

    def _take_ties(self) -> None:
        """A live tensor with several names is loaded by those that the checkpoint has."""
        found, held = self._found, dict[Any, str]()
        for path, tie in self._tensors.items():
            if path in found.names and path not in found.problems:
                first = held.setdefault(tie, path)
                if not self._are_equal(found.names[path], found.names[first]):
                    got = f"got other values than {first}"
                    found.problems[path] = f"expected one tensor, as it is tied, {got}"
        tied = {path: held[tie] for path, tie in self._tensors.items() if tie in held}
        found.missing = [path for path in found.missing if path not in tied]
        found.names |= {path: found.names[first] for path, first in tied.items()}

    def _fail(self, path: str, summary: str, problems: dict[str, str], hint: str) -> NoReturn:
        facts = {"checkpoint": path, **dict(list(problems.items())[:_SHOWN])}
        if len(problems) > _SHOWN:
            facts["..."] = f"{len(problems) - _SHOWN} more"
        rest = self.report().unexpected
        if rest:
            facts["only there"] = some(rest, _SHOWN)
        raise StateMismatchError(summary, facts=facts, hint=hint)

    def match(self, holder: Any, key: Any, live: Any, path: str) -> None:
        if isinstance(live, torch.Tensor):
            self._tensor(live, path, [path])
        elif isinstance(live, nn.Module):
            self._module(live, path)
        elif isinstance(live, Optimizer):
            self._optimizer(live, path)
        elif is_stateful(live):
            self._object(live, path)
        elif isinstance(live, MutableMapping) or (isinstance(live, list) and holds_state(live)):
            for inner, part in enumerate(live) if isinstance(live, list) else live.items():
                self.match(live, inner, part, f"{path}.{inner}")
        else:
            self._value(path, [path], partial(setitem, holder, key))

    def _name(self, path: str, candidates: list[str], known: Mapping[str, str]) -> str | None:
        """The name in the checkpoint; noted as loaded, or as missing."""
        self._asked.update(dict.fromkeys((path, *candidates)))
        found = next((known[name] for name in candidates if name in known), None)
        if found is None:
            self._found.missing.append(path)
        else:
            self._found.names[path] = found
        return found

    def _tensor(self, live: torch.Tensor, path: str, candidates: list[str]) -> None:
        name = self._name(path, candidates, self._names)
        self._tensors[path] = tie_of(live)
        if name is None:
            return
        saved = self._saved[name]
        got = list(saved.shape) if isinstance(saved, Streamed) else "a value"
        if got != list(live.shape):
            self._found.problems[path] = f"expected shape {list(live.shape)}, got {got}"
        elif name in self.targets and self.targets[name] is not live:
            self.acts.append(partial(_copy, live, self.targets[name]))
        else:
            self.targets[name] = live

    def _value(self, path: str, candidates: list[str], put: Callable[[Any], Any]) -> None:
        name = self._name(path, candidates, self._known)
        if name is None:
            return
        saved = self._saved[name]
        if isinstance(saved, Streamed):
            made = self.targets.setdefault(
                name, torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
            )
            self.acts.append(lambda _: put(made))
        else:
            self.targets[name] = None
            self.acts.append(lambda objects: put(objects[name]))

    def _module(self, live: nn.Module, path: str) -> None:
        self._parameters |= modules.look_into([(path, live)])[1]
        own = modules.own_tensors(live)
        handed: dict[str, Any] = {}
        for name, value in modules.entries(live).items():
            where = f"{path}.{name}"
            if isinstance(value, torch.Tensor) and id(value) in own:
                self._tensor(value, where, [where, name])
            else:
                self._value(where, [where, name], partial(setitem, handed, name))
        if handed or modules.acts_when_loaded(live):
            self.acts.append(lambda _: modules.load(live, handed))

    def _object(self, live: Any, path: str) -> None:
        state = live.state_dict()
        for key, part in state.items():
            self.match(state, key, part, f"{path}.{key}")
        self.acts.append(lambda _: live.load_state_dict(state))

    # -- optimizers ------------------------------------------------------------------------------

    def _optimizer(self, live: Optimizer, path: str) -> None:
        self._rename_parameters(path)
        groups = self._groups(path)
        saved = list(groups.values())
        owners, by_name = nodes.owners_of(saved), nodes.are_by_name(saved)
        by_group: list[list[str]] = [[] for _ in live.param_groups]
        sizes, got = (
            ", ".join(str(len(group[PARAMS])) for group in each)
            for each in (live.param_groups, saved)
        )
        if not by_name and sizes != got:
            self._found.problems[path] = f"expected groups of {sizes}, got groups of {got}"
            return
        numbers, has_state = chain(*(group[PARAMS] for group in saved)), bool(groups)
        for number, (at, full, parameter) in enumerate(
            optimizers.parameters(live, self._parameters)
        ):
            inner = full.partition(".")[2] or full
            known = [each for each in (inner, full) if each in owners]
            known = known if by_name else [next(numbers)]
            if groups and not known:
                self._found.missing.append(f"{path}.state.{inner}")
            by_group[at] += known[:1]
            names = [*map(str, known)] or [inner, full, str(number)]
            bases = [f"{head}state.{name}" for name in names for head in (f"{path}.", "")]
            self._asked.update(dict.fromkeys((*bases, *names)))
            fields = next((self._fields[base] for base in bases if base in self._fields), {})
            has_state |= bool(fields)
            self._state(live, live.param_groups[at], parameter, f"{path}.state.{inner}", fields)
        if not has_state:
            self._found.missing.append(path)
        for index, group in enumerate(live.param_groups if groups else ()):
            options, differing = nodes.options_for(by_group, index, owners, saved)
            where = f"{path}.{GROUPS}.{index}"
            if differing:
                got = f"several groups, which differ in {', '.join(differing)}"
                self._found.problems[where] = f"expected the options of one group, got {got}"
            base = next((base for base in groups if groups[base] is options), "")
            for key in group:  # other options stay as they are
                if key != PARAMS and f"{base}.{key}" in self._known:
                    put = partial(setitem, group, key)
                    self._value(f"{where}.{key}", [f"{base}.{key}"], put)

    def _groups(self, path: str) -> dict[str, dict[str, Any]]:
        """The options and the parameters of each saved group, by its name."""
        for head in (f"{path}.{GROUPS}.", f"{GROUPS}."):
            found = {
                base: {key: self._value_of(self._known[name]) for key, name in fields.items()}
                for base, fields in self._fields.items()
                if base.startswith(head)
            }
            for base, group in found.items():
                own, renamed = group.get(PARAMS), self._selection.renamed
                own = own if isinstance(own, list) else [base.removeprefix(head)]
                group[PARAMS] = [renamed(each) if type(each) is str else each for each in own]
            if found:
                return found
        return {}

    def _rename_parameters(self, path: str) -> None:
        """`rename` also holds for the names of parameters within an optimizer's names."""
        if not self._selection.rename:
            return
        for head in (f"{path}.state.", "state."):
            for base in [base for base in self._fields if base.startswith(head)]:
                new = head + self._selection.renamed(base[len(head) :])
                self._fields.setdefault(new, self._fields[base])

    def _state(
        self, live: Optimizer, group: Group, parameter: torch.Tensor, where: str, fields: Group
    ) -> None:
        state, shapes = live.state.get(parameter, {}), []
        self._found.missing += [f"{where}.{key}" for key in state if key not in fields]
        for key, name in fields.items():
            saved = self._saved[self._known[name]]
            if not isinstance(saved, Streamed):
                put = partial(_set_state, live, parameter, key)
                self._value(f"{where}.{key}", [name], put)
                continue
            tensor = state.get(key)
            shapes.append(saved.shape)
            if not isinstance(tensor, torch.Tensor) or tensor.shape != saved.shape:
                tensor = _made(saved, key, group, parameter)
                self.acts.append(partial(_set_state, live, parameter, key, tensor))
            self._tensor(tensor, f"{where}.{key}", [name])
        if not may_make(live, parameter, shapes):
            got = f"got tensors of {', '.join(map(str, map(list, shapes)))}"
            self._found.problems[where] = f"expected the state of {list(parameter.shape)}, {got}"


def _set_state(
    live: Optimizer, parameter: torch.Tensor, key: str, value: Any, _: object = None
) -> None:
    def there(each: Any) -> Any:
        return each.to(parameter.device) if isinstance(each, torch.Tensor) else each

    live.state[parameter][key] = (
        value if isinstance(value, torch.Tensor) else replaced(value, there)
    )


def _copy(target: torch.Tensor, source: torch.Tensor, _: object) -> None:
    target.copy_(source)


def _made(
    saved: Streamed, key: str, group: Mapping[str, Any], parameter: torch.Tensor
) -> torch.Tensor:
    """A new state tensor, sharded like its parameter if it has the same shape."""
    if isinstance(parameter, DTensor) and saved.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    return empty_on(optimizers.state_device(group, key, parameter), saved.shape, saved.dtype)


# -- reading -------------------------------------------------------------------------------------


class _ForeignReader:
    """Reads a checkpoint of any format, by the names of its tensors and values.

    entries: these. objects: the values that were read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.objects: dict[str, Any] = {}
        kind, place = recognised(path)
        tree = kind.read(place)
        check_names(tree, path)
        self.entries: dict[str, Any] = {}
        for name, value in leaves(tree, lists=(list,)):
            if name in self.entries:
                facts = {"name": name, "path": path}
                raise CorruptionError("a checkpoint has a name twice", facts=facts)
            self.entries[name] = value
        # Dicts and lists that can be taken whole: the first leaf of each.
        self.wholes: dict[str, str] = {}
        for name, value in _containers(tree):
            if name not in self.entries:
                self.entries[name] = value
                self.wholes[name] = next(leaves(value, name, (list,)))[0]

    def read(self, targets: Mapping[str, torch.Tensor | None]) -> None:
        """Read values (None), and fill tensors, by their names in the checkpoint."""
        for name in (name for name, live in targets.items() if live is None):
            self.objects[name] = self.value_of(name)
        parts = [(name, *part) for name in targets for part in _parts_of(targets[name], name)]
        for name, target, box in parts:  # nothing was filled before
            _copy_box(self.entries[name], box, target)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bytes."""
        one, two = self.entries[name], self.entries[other]
        if one is two or (one.dtype, one.shape) != (two.dtype, two.shape):
            return one is two
        return all(map(torch.equal, one.parts(), two.parts()))

    def value_of(self, name: str) -> Any:
        value = replaced(self.entries[name], read_now)
        untrusted.check_data(value, name, self._path, "leave this entry out of the state")

        def leaf(each: Any) -> Any:
            return in_memory(each) if isinstance(each, Streamed) else storable(each, name)

        return replaced(value, leaf)


def _containers(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dicts in a tree, and the lists that are entered, by their names."""
    members = dict(enumerate(tree)) if is_entered(tree, (list,)) else tree
    for key, item in members.items() if isinstance(members, Mapping) else ():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(item, Mapping) or is_entered(item, (list,)):
            yield where, item
            yield from _containers(item, where)


def _parts_of(live: Any, path: str) -> Iterator[tuple[torch.Tensor, Box]]:
    """The memory of this rank for a tensor, and the boxes that belong there. None for a value."""
    mesh = getattr(live, "device_mesh", None)
    if isinstance(live, ShardedTensor):
        for shard in live.local_shards():
            at = shard.metadata
            yield shard.tensor.detach(), Box(tuple(at.shard_offsets), tuple(at.shard_sizes))
    elif live is not None and (mesh is None or mesh.get_coordinate() is not None):
        rank, world = rank_and_world()
        local = local_of(live).detach()
        place = placed(live, path, rank if world > 1 else None)
        yield local, place.box or Box.whole(local.shape)


def _copy_box(value: Streamed, box: Box, target: torch.Tensor) -> None:
    boxes = [chunk for chunk in value.chunks if len(chunk.box.shape) == len(value.shape)]
    if not boxes:  # they are runs of its elements
        target.copy_(part_of(in_memory(value), box))
    for chunk in boxes:
        if (common := chunk.box.intersection(box)) is not None:
            values = part_of(chunk.elements(value.dtype), common.relative_to(chunk.box))
            part_of(target, common.relative_to(box)).copy_(values)
