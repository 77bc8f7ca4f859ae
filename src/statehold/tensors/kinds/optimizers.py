"""Optimizers: a step has an optimizer by the names of its parameters, so that neither the order of
groups in memory nor the index that Optimizer.state_dict() would give matters to a restore:
    {"state": {parameter name: {key: value}}, "param_groups": [{option: value, "params": [name]}],
     "other": {key: value}}
"other" is what the optimizer keeps in its state under keys that are no parameters, if anything.
A parameter that no module in the state holds is named by its running index, as torch does.
An optimizer whose class or hooks change what state_dict() means is saved through that instead,
unless it has gathered_state(), because its state lies elsewhere than in `state`.
Wrappers, such as Accelerate's and Lightning's, are looked through: names are the same without them.

Owns: which saved group has the options for a live one, which saved entries a parameter gets, and in
what kind of tensors.
Invariants: parameters are known by their names where these were saved, else by their places as in
torch. A step may hold more of them than this process, as that of a pipeline does. Ranks may have
had different groups: all are looked at. What is made for a sharded parameter is sharded as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, count
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from statehold.encoding import values
from statehold.layout.layout import Box
from statehold.tensors import nodes, placements
from statehold.tensors.captured import STATES, Capturing, Flat
from statehold.tensors.composed import is_composed
from statehold.tensors.found import Eager
from statehold.tensors.kinds import objects
from statehold.tensors.matching import ABSENT, HOST, Matching, Walk, missing_of, replace_content
from statehold.tensors.nodes import GROUPS, OTHER, PARAMS, STATE, Group
from statehold.tensors.placements import Placed
from statehold.tensors.stepping import may_make, parameters_of
from statehold.tensors.storable import device_of, is_dtensor, local_of, storage_of
from statehold.tensors.stored import (
    GathersState,
    InStep,
    StoredOptimizer,
    StreamedOptimizer,
    saved_parameters,
)

LEVELS = 3  # of nodes: an optimizer, its state or groups, a parameter or a group
_WRAPPED = ("optimizer", "_optimizer")  # where wrappers keep the optimizer that they wrap
_HOOKS = tuple(
    f"_optimizer_{action}_{when}_hooks"
    for action in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def of(value: Any) -> Optimizer | None:
    """The optimizer that `value` is, or around which it is a wrapper; None for anything else."""
    while (inner := _wrapped(value)) is not None:
        value = inner
    return value if isinstance(value, Optimizer) else None


def _wrapped(value: Any) -> Optimizer | None:
    """The optimizer to which `value` passes everything on, if it does."""
    for name in _WRAPPED:
        inner = getattr(value, "__dict__", {}).get(name)
        if isinstance(inner, Optimizer) and _passes_on(value, inner):
            return inner
    return None


def _passes_on(wrapper: Any, inner: Optimizer) -> bool:
    """Whether a wrapper has no state of its own: groups and state are those of `inner`, the same
    objects, and its state_dict() shows nothing else."""
    has = getattr(wrapper, GROUPS, None), getattr(wrapper, STATE, None)
    if not all(map(is_, has, (inner.param_groups, inner.state))):
        return False
    if isinstance(of(inner), GathersState):
        return _shows(wrapper, inner)
    shown, expected = wrapper.state_dict(), inner.state_dict()
    return shown.keys() == expected.keys() and _same_entries(shown[STATE], expected[STATE])


def _shows(wrapper: Any, inner: Optimizer) -> bool:
    """Whether its state_dict() is that of `inner`, which is not asked: it would read all state."""
    stand_in = {STATE: {0: {"value": object()}}, GROUPS: [{PARAMS: [0]}]}
    vars(inner)["state_dict"] = lambda: stand_in
    try:
        return bool(wrapper.state_dict() == stand_in)
    except Exception:  # it needs more of a state_dict(), so it does something with it
        return False
    finally:
        del vars(inner)["state_dict"]


def _same_entries(shown: Mapping[Any, Any], expected: Mapping[Any, Any]) -> bool:
    """Whether two parts of state_dict() hold the same objects."""
    if shown.keys() != expected.keys():
        return False
    return all(
        _same_entries(shown[key], value) if isinstance(value, dict) else shown[key] is value
        for key, value in expected.items()
    )


def is_state_dict(value: Any) -> bool:
    """Whether a value, or the members of a node, have the form of Optimizer.state_dict()."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get(STATE), Mapping)
        and isinstance(value.get(GROUPS), list)
        and all(isinstance(group, Mapping) for group in value[GROUPS])
    )


def is_by_name(shown: Any) -> bool:
    """Whether a state_dict() calls parameters by names; torch's own calls them by numbers."""
    return is_state_dict(shown) and nodes.are_by_name(shown[GROUPS])


def keys_by_parameter(optimizer: Optimizer, shown: Any) -> dict[torch.Tensor, Any] | None:
    """What its state_dict() calls each parameter, in their order; None where that cannot be told
    from the places in the groups."""
    if not is_state_dict(shown):
        return None
    live = [group[PARAMS] for group in optimizer.param_groups]
    keys = [group.get(PARAMS) for group in shown[GROUPS]]
    if not all(isinstance(each, list) for each in keys) or [*map(len, keys)] != [*map(len, live)]:
        return None
    return dict(zip(chain(*live), chain(*keys), strict=True))


def is_standard(optimizer: Optimizer) -> bool:
    """Whether the state lies where torch's Optimizer keeps it."""
    kind = type(optimizer)
    return (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
        and not any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def _names_of(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[list[list[str]], list[torch.Tensor]]:
    """The names of the parameters of each group, as parameters() has them, and all parameters."""
    found: list[torch.Tensor] = []
    by_group: list[list[str]] = []
    for group in optimizer.param_groups:
        ids = list(map(id, group[PARAMS]))
        try:
            known = list(map(names.__getitem__, ids))
        except KeyError:  # no module in the state has it
            known = list(map(names.get, ids, map(str, count(len(found)))))
        by_group.append(known)
        found += group[PARAMS]
    return by_group, found


def parameters(
    optimizer: Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(group index, name, parameter) of every parameter, in the order of the groups."""
    running = count()
    for index, group in enumerate(optimizer.param_groups):
        for parameter, number in zip(group[PARAMS], running, strict=False):
            yield index, names.get(id(parameter), str(number)), parameter


def _states_of(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[Any | None]:
    """What the optimizer keeps for each of its parameters; None where it keeps nothing."""
    state: Mapping[torch.Tensor, Any] = optimizer.state
    if isinstance(optimizer, GathersState):
        state = optimizer.gathered_state()
    if len(state) == len(parameters) and all(map(is_, state, parameters)):
        return list(state.values())  # hashing a tensor takes long
    return [state.get(parameter) for parameter in parameters]


def other_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The entries of the state whose keys are no parameters, such as a common step."""
    kinds = set(map(type, optimizer.state))
    if all(issubclass(kind, torch.Tensor) for kind in kinds):
        return {}
    return {
        key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)
    }


def state_device(group: Mapping[str, Any], key: str, parameter: torch.Tensor) -> torch.device:
    """Where a state tensor lives that has to be made: with its parameter.

    Only `step` stays on the host, unless the update reads it on the device. torch's own
    load_state_dict() has the same rule.
    """
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return HOST if on_host else device_of(local_of(parameter))


# -- into a step -----------------------------------------------------------------------------------


def capture(to: Capturing, optimizer: Optimizer, path: str) -> Any:
    if not (is_standard(optimizer) or isinstance(optimizer, GathersState)):
        return objects.capture(to, optimizer, path)
    with to.values.within(optimizer, path, LEVELS):
        to.values.check_depth(optimizer, path)  # for the state and the options of a parameter
        by_group, found = _names_of(optimizer, to.names)
        names = list(chain.from_iterable(by_group))
        if to.entries and not to.names.keys() >= set(map(id, found)):
            to.later.append(partial(_doubt_lost, to, names, found, path))
        node = {STATE: _States(to, f"{path}.{STATE}").node(optimizer, names, found)}
        groups = []
        for index, (group, own) in enumerate(zip(optimizer.param_groups, by_group, strict=True)):
            where = f"{path}.{GROUPS}.{index}"
            options = {key: to.values.encode(item, f"{where}.{key}")
                       for key, item in group.items() if key != PARAMS}  # fmt: skip
            groups.append(values.mapping_of({PARAMS: own, **options}))
        node[GROUPS] = groups
        if others := other_state(optimizer):
            node[OTHER] = to.values.encode(others, f"{path}.{OTHER}")
        return node


def _doubt_lost(to: Capturing, names: list[str], found: list[torch.Tensor], path: str) -> None:
    """A doubt for each parameter that no module has, and whose values nothing else has either."""
    held = {each.data_ptr() for each in to.tensors.live.storages}
    to.doubts += [
        f'the values of a parameter of "{path}" are not saved: number {number}, of shape '
        f"{list(parameter.shape)}, is in no module of the state. Put the module that has "
        "it into the state"
        for number, parameter in zip(names, found, strict=True)
        if id(parameter) not in to.names and storage_of(local_of(parameter)) not in held
    ]


@dataclass(slots=True)
class _States:
    """The states of an optimizer's parameters, in a capture, at `path`."""

    to: Capturing
    path: str
    # Of parameters whose state may be in the files of another rank: what this rank has in memory of
    # it is then written whole, by the first replica, as files are.
    whole: set[int] = field(default_factory=set)

    def node(self, optimizer: Optimizer, names: list[str], found: list[torch.Tensor]) -> Any:
        """Of each parameter that has a state, by the parameter's name."""
        held = None
        if isinstance(optimizer, StoredOptimizer):
            held = self._stored(optimizer, names, found)
        held = _states_of(optimizer, found) if held is None else held
        if type(None) in set(map(type, held)):  # not all have a state
            has_state = [state is not None for state in held]
            columns: list[list[Any]] = [names, found, held]
            names, found, held = (list(compress(each, has_state)) for each in columns)
        nodes = []
        for begin in range(0, len(names), STATES):
            chosen = slice(begin, begin + STATES)
            nodes.append(self._batch(begin, names[chosen], held[chosen], found[chosen]))
        flat = chain.from_iterable(nodes)
        return self.to.seen.mapping(self.path, nodes, lambda: zip(names, flat, strict=True))

    def _stored(
        self, optimizer: StoredOptimizer, names: list[str], found: list[torch.Tensor]
    ) -> list[Any] | None:
        """What the optimizer keeps for each parameter, a part of it in files; None: all of it is
        in memory."""
        to, paths = self.to, [f"{self.path}.{name}" for name in names]
        saved = saved_parameters(paths, map(to.place, found, paths), to.rank, to.world)
        self.whole |= set(compress(map(id, found), [each.is_shared for each in saved]))
        stored = optimizer.stored_parameters(saved)
        if stored is None:
            return None
        to.stored.append(stored)
        return list(stored.tree)

    def _batch(
        self, begin: int, names: list[str], held: list[Any], found: list[torch.Tensor]
    ) -> list[Any]:
        """The nodes of some parameters' states, the first of which is number `begin`."""
        to = self.to

        def paths() -> list[str]:
            return [f"{self.path}.{name}" for name in names]

        def one_by_one() -> list[Any]:
            return list(map(self._one, held, paths(), found))

        flat = Flat.of(held)
        if flat is None:
            return one_by_one()
        marked, places = to.eager(Eager.NONE), to.places_of(found)
        observed = marked, to.rank, names, flat.shape, places
        is_own = places is None and not self.whole
        new = (lambda: flat.new(paths(), marked is Eager.ALL)) if is_own else None
        key = self.path, begin
        nodes, is_known = to.found.batch(key, observed, flat.tensors, one_by_one, new)
        return flat.with_others(nodes, paths()) if is_known and flat.others else nodes

    def _one(self, state: Any, path: str, parameter: torch.Tensor) -> Any:
        to, place = self.to, self.to.place(parameter, path)
        is_whole = id(parameter) in self.whole

        def place_of(value: torch.Tensor) -> Placed:
            return placements.beside(value, parameter, place)

        def other(value: Any, where: str) -> Any:
            if isinstance(value, torch.Tensor):
                beside = None if is_dtensor(value) else place_of(value)
                how = {"lazy": False, "is_gated": True} if is_whole else {"lazy": True}  # copies
                return to.tensor(value, where, place=beside, **how)
            return to.values.encode(value, where)

        if is_whole:
            return values.mapping_of({key: other(state[key], f"{path}.{key}") for key in state})
        given, eager = None if place.layout is None else place_of, to.eager(Eager.NONE)
        return values.mapping_of(to.found.nodes(state.items(), path, eager, given, other))


# -- out of a step: names --------------------------------------------------------------------------


def names(walk: Walk, live: Optimizer, node: Any, path: str) -> Iterator[str]:
    whole = nodes.members_of_optimizer(node) or {}
    found = nodes.saved_groups(whole.get(GROUPS, [])) or []
    if not nodes.are_by_name(found):
        yield path
        return
    renamed = walk.selection.renamed
    said = nodes.members(whole.get(STATE)) or {}
    states = {renamed(name): each for name, each in said.items()}
    for _, name, parameter in parameters(live, walk.names_of_parameters):
        where, entry = f"{path}.{STATE}.{name}", nodes.members(states.pop(name, None))
        yield from walk.content(live.state.get(parameter, {}), entry or {}, where)
    owners = map(renamed, nodes.owners_of(found))
    yield from (f"{path}.{STATE}.{name}" for name in (*states, *owners))
    for index, group in enumerate(live.param_groups):
        saved = found[index] if index < len(found) else {}
        yield from (f"{path}.{GROUPS}.{index}.{key}" for key in dict.fromkeys((*group, *saved)))
    if OTHER in whole or other_state(live):
        yield f"{path}.{OTHER}"


# -- out of a step: match --------------------------------------------------------------------------


def match(to: Matching, live: Optimizer, node: Any, path: str) -> None:
    to.restoration.trains = True
    whole, saved = nodes.members_of_optimizer(node), None
    said = whole or {}
    has_states = nodes.members(said.get(STATE)) is not None
    groups = nodes.saved_groups(said.get(GROUPS)) if has_states else None
    if groups is not None and nodes.are_by_name(groups):
        saved = _ByName(to, live, path, said, groups)
        if saved.streamed():
            return
    usual = node if whole is None else nodes.mapping_of(whole)
    if not is_standard(live):
        shown = live.state_dict() if saved is None else saved.shown()
        if saved is None or is_by_name(shown):
            _handed_over(to, live, shown, usual, path)
        elif nodes.is_flat(shown) and nodes.is_flat(nodes.members(node)):
            _handed_over(to, live, shown, node, path)
        else:
            saved.translated(shown)
    elif saved is not None:
        saved.in_place()
    elif groups is not None:
        _handed_over(to, live, live.state_dict(), usual, path)
    else:
        to.problem(path, "the state of an optimizer", "a value of another kind")


class _ByName:
    """A live optimizer, and what a step has by the names of its parameters: the live ones here."""

    def __init__(
        self, to: Matching, live: Optimizer, path: str, said: Group, groups: Sequence[Group]
    ) -> None:
        self._to, self._live, self._path = to, live, path
        self._states_at = f"{path}.{STATE}"
        self._memory, self._takes = to.memory, to.selection.takes
        self._found = list(parameters(live, to.names))
        renamed = self._renaming(nodes.owners_of(groups))
        self._states = {
            renamed(name): each for name, each in (nodes.members(said[STATE]) or {}).items()
        }
        self._groups = [
            {**group, PARAMS: list(map(renamed, group.get(PARAMS, [])))} for group in groups
        ]
        self._owners = nodes.owners_of(self._groups)
        self._other = said.get(OTHER, {})

    def _renaming(self, saved: Iterable[str]) -> Callable[[str], str]:
        """From saved names of parameters to live ones. Torch's get_state_dict() leaves the name of
        the model out of them."""
        renamed = self._to.selection.renamed
        full = {name for _, name, _ in self._found}
        if not full.isdisjoint(map(renamed, saved)):
            return renamed
        heads = sorted((f"{path}." for path in self._to.modules), key=len, reverse=True)
        found: dict[str, list[str]] = {}
        for name in full:
            head = next((each for each in heads if name.startswith(each)), "")
            found.setdefault(name.removeprefix(head), []).append(name)
        full_by_inner = {inner: names[0] for inner, names in found.items() if len(names) == 1}
        return lambda name: full_by_inner.get(inner := renamed(name), inner)

    def shown(self) -> Any:
        """Its state_dict(). Of one that has lost its state only the groups, if it gets all of the
        state of the step."""
        if isinstance(self._live, GathersState) and self._live.has_lost_state:
            entries = (
                f"{self._states_at}.{name}.{key}"
                for name, state in self._states.items()
                for key in nodes.members(state) or {}
            )
            if all(map(self._takes, entries)):
                return Optimizer.state_dict(self._live)
        return self._live.state_dict()

    def in_place(self) -> None:
        """Fill the tensors of the live optimizer, and put what is missing beside them."""
        live, options = self._live, self._options()
        self._take_options(options)
        content = self._content(live.state, options)
        others = self._others(other_state(live))
        self._to.restoration.containers.append(lambda: _set_state(live, content, others))

    def translated(self, shown: Any) -> None:
        """Hand what was saved by name to an optimizer with a state_dict() of its own."""
        to, live, path = self._to, self._live, self._path
        keys = keys_by_parameter(live, shown)
        if keys is None:
            got = "the state of an optimizer by the names of its parameters"
            to.problem(path, f"what the state_dict() of {type(live).__name__} returns", got)
            return
        options = self._options()
        states = dict(shown[STATE])
        current = {parameter: states.pop(key, {}) for parameter, key in keys.items()}
        groups = [
            {**group, **self._group(index, group, options[index])}
            for index, group in enumerate(shown[GROUPS])
        ]
        content = {**current, **self._content(current, options)}
        states = self._others(states)
        states |= {keys[parameter]: entries for parameter, entries in content.items() if entries}
        for key in missing_of(shown, (STATE, GROUPS)):
            if self._takes(f"{path}.{key}"):
                to.missing(f"{path}.{key}", "an entry of the step", "nothing")
        value = {**shown, STATE: states, GROUPS: groups}
        to.restoration.objects.append(lambda: live.load_state_dict(value))

    # -- piece by piece ----------------------------------------------------------------------

    def streamed(self) -> bool:
        """Have a live optimizer read its state by itself; False if it cannot read all of it."""
        live, restoration = self._live, self._to.restoration
        if not isinstance(live, StreamedOptimizer) or not self._to.selection.is_everything:
            return False
        if self._other or {name for _, name, _ in self._found} != set(self._owners):
            return False
        states = {
            index: self._pieces(self._states[name], parameter, f"{self._states_at}.{name}")
            for index, (_, name, parameter) in enumerate(self._found)
            if name in self._states
        }
        if None in states.values():
            return False
        groups = self._take_options(self._options())
        for _, name, _ in self._found:
            members = nodes.members(self._states.get(name)) or {}
            restoration.loaded += [f"{self._states_at}.{name}.{key}" for key in members]
        content: dict[int, dict[str, Any]] = {
            index: {
                key: self._memory.make(each, HOST) if isinstance(each, str) else each
                for key, each in (state or {}).items()
            }
            for index, state in states.items()
        }
        live.check_stored(groups, content)
        pieces = (each for state in content.values() for each in state.values())
        names = {each.name for each in pieces if isinstance(each, InStep)}
        restoration.streamed |= names
        self._memory.used |= names
        restoration.streams.append(lambda fill: live.load_stored(content, fill))
        return True

    def _pieces(
        self, node: Any, parameter: torch.Tensor, path: str
    ) -> dict[str, InStep | str] | None:
        """The fields of a parameter in the step, and the names of its numbers; None if the state
        is of another kind."""
        found: dict[str, InStep | str] = {}
        place = self._memory.place(parameter, path)
        if not local_of(parameter).is_contiguous():
            return None  # a step has its tensors in another order
        for key, each in (nodes.members(node) or {}).items():
            name = nodes.payload(each, "$tensor")
            if name is None or self._memory.dtype_of(name) != torch.float32:
                return None
            shape = self._memory.shape_of(name)
            if shape == tuple(parameter.shape) and key != "step":
                found[key] = InStep(name, place.box or Box.whole(shape))
            elif shape == ():
                found[key] = name
            else:
                return None
        return found

    # -- options -----------------------------------------------------------------------------

    def _take_options(self, options: list[Group]) -> list[Group]:
        """Have each live group take its saved options. Returns the groups as they will be."""
        groups = list[Group]()
        for index, group in enumerate(self._live.param_groups):
            taken = self._group(index, group, options[index])
            self._to.restoration.containers.append(partial(group.update, taken))
            groups.append({**group, **taken})
        return groups

    def _options(self) -> list[Group]:
        """The saved options for each live group, which they will replace.

        A saved group of another kind of optimizer is refused: each side has options of its own.
        Options of one side alone are no sign of that: another version of torch added them, or a
        scheduler. A step that holds none says nothing.
        """
        to, live, found = self._to, self._live, list[Group]()
        by_group: list[list[str]] = [[] for _ in live.param_groups]
        for index, name, _ in self._found:
            by_group[index].append(name)
        for index, group in enumerate(live.param_groups):
            where = f"{self._path}.{GROUPS}.{index}"
            options, differing = nodes.options_for(by_group, index, self._owners, self._groups)
            if differing := [key for key in differing if self._takes(f"{where}.{key}")]:
                got = f"parameters of several groups, which differ in {', '.join(differing)}"
                to.problem(where, "the options of one group of the step", got)
                options = {}
            found.append(options)
            unknown = [key for key in missing_of(options, group) if self._takes(f"{where}.{key}")]
            lacking = [key for key in missing_of(live.defaults, options) if key in group]
            if options and unknown and lacking:
                to.restoration.missing += [f"{where}.{key}" for key in lacking]
                to.restoration.unexpected += [f"{where}.{key}" for key in unknown]
                if to.selection.strict:
                    ours = f"the options of {type(live).__name__} ({', '.join(lacking)})"
                    theirs = f"those of another kind of optimizer ({', '.join(unknown)})"
                    to.problem(where, ours, theirs)
        return found

    def _group(self, index: int, live: Group, saved: Group) -> dict[str, Any]:
        """The saved options that replace the live ones; those the step lacks stay."""
        to, options = self._to, {}
        for key, node in saved.items():
            where = f"{self._path}.{GROUPS}.{index}.{key}"
            if key != PARAMS and to.takes(where) and not to.differs(node, where):
                options[key] = to.rebuild(live.get(key, ABSENT), node)
        return options

    # -- states ------------------------------------------------------------------------------

    def _content(
        self, current: Mapping[torch.Tensor, Any], options: list[Group]
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """The entries for each parameter that is restored; `current` are those that it has."""
        to, content = self._to, dict[torch.Tensor, dict[str, Any]]()
        groups = [{**a, **b} for a, b in zip(self._live.param_groups, options, strict=True)]
        for index, name, parameter in self._found:
            where, has = f"{self._states_at}.{name}", current.get(parameter, {})
            if not to.selection.reaches(where):
                to.restoration.kept.append(where)
            elif name not in self._owners:
                if any(map(self._takes, (where, *(f"{where}.{key}" for key in has)))):
                    to.missing(where, "a parameter of the step's optimizer", "nothing")
                else:
                    to.restoration.kept.append(where)
            elif not to.differs(self._states.get(name), where):
                known = nodes.members(self._states.get(name)) or {}
                content[parameter] = self._state(has, groups[index], parameter, known, where)
        to.later.append(self._check_shapes)
        for name in missing_of(self._owners, {name for _, name, _ in self._found}):
            to.unexpected(f"{self._states_at}.{name}", "a parameter of the step's optimizer")
        return content

    def _check_shapes(self) -> None:
        """Refuse the state of parameters that do not take their values, and had other shapes."""
        to, live = self._to, self._live
        alike = set(to.restoration.loaded).difference(path for path, _ in to.problems)
        odd = [each for each in self._found if each[1] not in alike]
        of_all = isinstance(live, torch.optim.LBFGS)  # one parameter has the state of all
        for _, name, parameter in self._found if odd and of_all else odd:
            said = to.of_another_name(parameter) if id(parameter) in to.names else ABSENT
            state, where = self._states.get(name), f"{self._states_at}.{name}"
            _check_shape(to, live, parameter, state, where, said)

    def _others(self, live: dict[Any, Any]) -> dict[Any, Any]:
        """The entries whose keys are no parameters."""
        if self._to.differs(self._other, f"{self._path}.{OTHER}") or not self._takes(self._path):
            return live
        return dict(self._to.rebuild(live, self._other))

    def _state(
        self, current: Group, options: Group, parameter: torch.Tensor, saved: Group, path: str
    ) -> dict[str, Any]:
        beside = self._memory.place(parameter, path)
        content = {}
        for key in dict.fromkeys((*saved, *current)):
            where = f"{path}.{key}"
            if not self._takes(where):
                self._to.restoration.kept.append(where)
                if key in current:
                    content[key] = current[key]
            elif key in saved:
                self._to.restoration.loaded.append(where)
                value = current.get(key, ABSENT)
                content[key] = self._entry(value, saved[key], parameter, beside, key, options)
        return content

    def _entry(
        self, live: Any, node: Any, parameter: torch.Tensor, beside: Placed, key: str, group: Group
    ) -> Any:
        """One entry of the state of a parameter, which lies where `beside` says."""
        name, device = nodes.payload(node, "$tensor"), state_device(group, key, parameter)
        is_tensor = isinstance(live, torch.Tensor)
        if name is None and not (is_tensor and is_composed(node)):
            return self._to.rebuild(live, node, device, parameter)
        has_own_place = not is_tensor or is_dtensor(live)
        place = None if has_own_place else placements.beside(live, parameter, beside)
        if name is None:
            return self._to.compose(live, node, device, parameter, place)
        is_elsewhere = is_tensor and key == "step" and device_of(local_of(live)) != device
        if is_tensor and not is_elsewhere and self._memory.usable(live, name, place):
            return live
        return self._memory.make(name, device, parameter)


def _check_shape(
    to: Matching, live: Optimizer, parameter: torch.Tensor, state: Any, path: str, said: Any = None
) -> None:
    """Refuse the state of a parameter of another shape. said: what the step has of the parameter.

    Where that says nothing, the shapes in the state do, if they are made by torch's own step().
    """
    shapes = {
        key: to.memory.shape_of(name)
        for key, node in (nodes.members(state) or {}).items()
        if (name := nodes.payload(node, "$tensor")) is not None
    }
    before, takes = nodes.payload(said, "$tensor"), to.selection.takes
    taken = [key for key, shape in shapes.items() if shape and takes(f"{path}.{key}")]
    if not taken or is_lazy(parameter):
        return
    is_same = before is None or to.memory.shape_of(before) == tuple(parameter.shape)
    if not (is_same and may_make(live, parameter, shapes.values())):
        got = ", ".join(f"{key} of shape {list(shapes[key])}" for key in taken)
        to.problem(path, f"the state of a parameter of shape {list(parameter.shape)}", got)


def _set_state(
    optimizer: Optimizer, state: Mapping[torch.Tensor, dict[str, Any]], others: Mapping[Any, Any]
) -> None:
    """Give every parameter exactly the saved entries, in the dicts that are already there."""
    for key in other_state(optimizer).keys() - others.keys():
        del optimizer.state[key]
    optimizer.state.update(others)
    for parameter, saved in state.items():
        if not saved:
            optimizer.state.pop(parameter, None)
            continue
        replace_content(optimizer.state[parameter], saved)


# -- out of a step: through load_state_dict() ------------------------------------------------------


def _handed_over(to: Matching, live: Optimizer, shown: Any, node: Any, path: str) -> None:
    """Hand what its state_dict() returned to an optimizer, in tensors as its parameters are."""
    if not to.takes(path) or to.differs(node, path):
        return
    rest = dict(nodes.members(node) or {})
    owners = _parameters_by_key(to, live, shown, rest, path)
    has = shown if isinstance(shown, Mapping) else {}
    value: Any = {}
    if owners:
        current, states = has[STATE], nodes.members(rest.pop(STATE)) or {}
        for key in filter(owners.__contains__, states):
            _check_shape(to, live, owners[key], states[key], path)
        value[STATE] = {
            key: to.rebuild(current.get(key, ABSENT), entries, HOST, owners.get(key))
            for key, entries in states.items()
        }
    known = set(to.memory.made_plain)
    if nodes.members(node) is None:
        value = to.rebuild(shown, node)
    for key, each in rest.items():
        value[key] = to.rebuild(has.get(key, ABSENT), each)
    _check_kinds(to, live, to.memory.made_plain - known)
    to.restoration.objects.append(lambda: live.load_state_dict(value))


def _parameters_by_key(
    to: Matching, live: Optimizer, shown: Any, saved: Mapping[str, Any], path: str
) -> dict[Any, torch.Tensor]:
    """The parameters by the keys of their saved state; none where these say nothing."""
    keys = keys_by_parameter(live, shown)
    if keys is None or not is_state_dict(saved):
        return {}
    if is_by_name(shown):
        return {key: parameter for parameter, key in keys.items()}
    sizes = [len(group[PARAMS]) for group in live.param_groups]
    places = [(nodes.members(group) or {}).get(PARAMS, []) for group in saved[GROUPS]]
    if list(map(len, places)) == sizes:
        return dict(zip(chain(*places), keys, strict=True))
    if is_standard(live):
        got = f"groups of {', '.join(str(len(each)) for each in places)} in the step"
        to.problem(f"{path}.{GROUPS}", f"groups of {', '.join(map(str, sizes))}", got)
    return {}


def _check_kinds(to: Matching, live: Optimizer, made: set[str]) -> None:
    """Refuse plain tensors where they may well stand for pieces of sharded parameters."""
    sharded = list(filter(is_dtensor, parameters_of(live)))
    for name in sorted(made):
        if any(to.memory.has_shape_of(parameter, name) for parameter in sharded):
            expected = f"a live DTensor in what the state_dict() of {type(live).__name__} returns"
            got = "none, and nothing says which parameter it belongs to: take one step before "
            to.problem(name, expected, f"{got}restoring, so that the optimizer has its state")
