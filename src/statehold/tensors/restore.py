"""Match a step with the live state, say where its bytes go, and apply the plain values afterwards.

Owns: the comparison of names, all of it before anything changes; what is restored of it; the order
of the last act: containers and optimizers, then load_state_dict() of other objects, then random
generators (restoration).
Invariants: `prepare` changes nothing that is live. Destinations are live storages wherever there is
a tensor of the saved shape and dtype; only what is missing (a fresh optimizer's state, new dict
entries) is allocated. `finish` is called only when every byte has arrived and was verified.
Not here: optimizers (restore_optimizers), memory (destinations), reading (engine), choosing the
step (checkpointer).

A live dict takes the content of the saved one; entries that the step lacks are missing. Objects
with load_state_dict() decide themselves what they accept. Optimizers know their parameters by name.
In a job of several ranks what this rank has no place for may be another's: the caller judges.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from statehold.encoding import values
from statehold.errors import ManifestError, UsageError, noting
from statehold.format.saved import SavedStep
from statehold.format.selection import EVERYTHING, Answer, Names, Selection, check_answers
from statehold.format.trees import tensors_of
from statehold.tensors import dtypes, loaders, modules, nodes, optimizers
from statehold.tensors.composed import is_composed, refuse
from statehold.tensors.destinations import can_cast
from statehold.tensors.marks import Mark
from statehold.tensors.matching import ABSENT, missing_of, replace_content
from statehold.tensors.parts import is_stateful
from statehold.tensors.pieces import Piece, Pieced
from statehold.tensors.placements import Placed
from statehold.tensors.restoration import Restoration, mismatch
from statehold.tensors.restore_optimizers import OptimizerMatching
from statehold.tensors.rng import Rng, unchanged
from statehold.tensors.storable import device_of, local_of, name_of, overlaps_itself
from statehold.tensors.subclasses import is_allowed, parts_of, remark_of

_RESIZED = (torch.Tensor, nn.Parameter, nn.Buffer)

_NOTHING = object()


def names_of(
    state: Mapping[str, Any],
    saved: Any,
    selection: Selection,
    parameters: Mapping[int, str],
) -> Names:
    """The dotted names of a live state and of the saved tree for it: what a selection is asked on.

    A module's entries, an optimizer's entries by parameter and option, and the members of dicts,
    lists and tuples have names of their own. An object with load_state_dict() is one name: it is
    restored as a whole. Nothing is changed or allocated.

    parameters: the names of the live parameters, by their ids.
    """
    walk = _Walk(selection, parameters)
    renamed = nodes.renamed(nodes.members(saved) or {}, state, selection)
    live = list(walk.content(state, {}, ""))
    return Names(
        taken=dict.fromkeys((*live, *walk.content(state, renamed, ""))),
        saved=list(saved_names(saved, "")),
        live=live,
        open=[path for path in _dicts(state, "") if path],
    )


def live_names(
    live: Any, path: str, selection: Selection, parameters: Mapping[int, str]
) -> Iterator[str]:
    """The names of a part of a live state, at `path`."""
    return _Walk(selection, parameters).names(live, _NOTHING, path)


def below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


class _Walk:
    def __init__(self, selection: Selection, parameters: Mapping[int, str]) -> None:
        self._selection = selection
        self._parameters = parameters

    def content(self, live: Any, saved: Mapping[Any, Any], path: str) -> Iterator[str]:
        """The names in a dict, or in what is known by keys like one; its own if it is empty."""
        known = live if isinstance(live, Mapping) else {}
        for key in dict.fromkeys((*known, *saved)):
            live_part, node = known.get(key, _NOTHING), saved.get(key, _NOTHING)
            yield from self.names(live_part, node, below(path, key))
        if path and not known and not saved:
            yield path

    def names(self, live: Any, node: Any, path: str) -> Iterator[str]:
        while isinstance(live, Mark):
            live = live.value
        if isinstance(live, nn.Module):
            names = dict.fromkeys((*modules.entries(live), *(nodes.members(node) or ())))
            yield from (f"{path}.{name}" for name in names) if names else (path,)
        elif (optimizer := optimizers.behind(live)) is not None:
            yield from self._optimizer(optimizer, node, path)
        elif isinstance(live, torch.Tensor) or is_stateful(live):
            yield path
        elif type(live) in (dict, OrderedDict) or live is _NOTHING:
            yield from self.content(live, nodes.members(node) or {}, path)
        elif type(live) in (list, tuple):
            items = node if type(node) is list else nodes.payload(node, "$tuple") or ()
            yield from self.content(dict(enumerate(live)), dict(enumerate(items)), path)
        else:
            yield path

    def _optimizer(self, live: torch.optim.Optimizer, node: Any, path: str) -> Iterator[str]:
        whole = optimizers.members_of(node) or {}
        found = optimizers.saved_groups(whole.get("param_groups", [])) or []
        if not optimizers.are_by_name(found):
            yield path
            return
        said = nodes.members(whole.get("state")) or {}
        states = {self._selection.renamed(name): each for name, each in said.items()}
        for _, name, parameter in optimizers.parameters(live, self._parameters):
            where, entry = f"{path}.state.{name}", nodes.members(states.pop(name, None))
            yield from self.content(live.state.get(parameter, {}), entry or {}, where)
        owners = (self._selection.renamed(name) for name in optimizers.owners_of(found))
        yield from (f"{path}.state.{name}" for name in (*states, *owners))
        for index, group in enumerate(live.param_groups):
            saved = found[index] if index < len(found) else {}
            for key in dict.fromkeys((*group, *saved)):
                yield f"{path}.param_groups.{index}.{key}"
        if "other" in whole or optimizers.other_state(live):
            yield f"{path}.other"


def saved_names(node: Any, path: str) -> Iterator[str]:
    """The names in a saved tree, which prefixes in `rename` are of."""
    members = nodes.members(node)
    for key, item in (members or {}).items():
        yield from saved_names(item, below(path, key))
    if path and not members:
        yield path


def _dicts(live: Any, path: str) -> Iterator[str]:
    """The dicts in a live state, which take names that they do not have."""
    while isinstance(live, Mark):
        live = live.value
    if type(live) in (dict, OrderedDict):
        yield path
        for key, part in live.items():
            yield from _dicts(part, below(path, key))


def prepare(
    state: Mapping[str, Any],
    saved: SavedStep,
    *,
    selection: Selection = EVERYTHING,
    rank: int | None = None,
    alone: bool = True,
    world: int | None = None,
) -> Restoration:
    """Match `state`, of `rank` of several ranks or of one (None), with a step.

    alone: what this rank has no place for is no other rank's. world: the number of ranks; None: as
    many as have saved the step. Raises StateMismatchError that lists every difference, UsageError
    for a pattern that matches nothing. Of several ranks, another one may match it: the caller
    judges their answers together.
    """
    with unchanged():  # state_dict() of live objects may draw
        matcher = _Matcher(state, saved, selection, rank, alone, world)
        matcher.top(state, saved.state)
        matcher.take_casts()
    restoration = matcher.restoration
    if rank is None:
        check_answers([Answer(restoration.patterns, loads=True, has_rest=False)])
    if matcher.problems:
        raise mismatch(matcher.problems, restoration)
    if rank is None:
        check_answers([restoration.answer])
    return restoration


def check_takes_values(state: object) -> MutableMapping[Any, Any]:
    """A state that is restored. Raises UsageError for what cannot be one."""
    if not isinstance(state, MutableMapping):
        raise UsageError(
            "the state of a restore must be a mutable mapping",
            facts={"expected": "a dict", "got": type(state).__name__},
            hint='give the parts names: restore({"model": model, "optimizer": optimizer})',
        )
    return state


class _Matcher(OptimizerMatching):
    """One comparison of a live state with a saved tree."""

    def top(self, state: Mapping[str, Any], node: Any) -> None:
        """The state itself: its names are the step's, no more and no fewer."""
        saved = nodes.members(node)
        if saved is None:
            raise ManifestError("the state of the manifest is not an object")
        saved = nodes.renamed(saved, state, self._selection)
        for key in missing_of(saved, state):
            if any(map(self._selection.takes, saved_names(saved[key], str(key)))):
                self.unexpected(str(key), "an entry of the step")
                self._note_plain(str(key), any(tensors_of(saved[key])))
        present = {key: item for key, item in saved.items() if key in state}
        self._mapping(check_takes_values(state), present, "")
        if self._selection.has_patterns:
            names = names_of(state, node, self._selection, self._names)
            self.restoration.patterns = self._selection.answers(names)

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
        if isinstance(live, Piece):
            self._tensor(live.tensor, node, path, self._memory.place_of_piece(live, path))
            return live
        if isinstance(live, nn.Module):
            return self._module(live, node, path)
        if (optimizer := optimizers.behind(live)) is not None:
            self._optimizer(optimizer, node, path)
            return live
        if is_stateful(live):
            return self._object(live, node, path)
        if type(live) in (dict, OrderedDict) and (saved := nodes.members(node)) is not None:
            return self._mapping(live, saved, path)
        if type(live) is list and type(node) is list:
            return self._list(live, node, path)
        if type(live) is tuple and (items := nodes.payload(node, "$tuple")) is not None:
            return self._tuple(live, items, path)
        return self._plain(live, node, path)

    def _note_plain(self, path: str, has_tensors: bool) -> None:
        if not has_tensors:
            self.restoration.plain.add(path)

    def _marked(self, live: Mark[Any], node: Any, path: str) -> Mark[Any]:
        value = self.match(live.value, node, path)
        if value is not live.value:
            self.restoration.containers.append(lambda: setattr(live, "value", value))
        return live

    def _mapping(self, live: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: str) -> Any:
        content = {}
        for key, node in saved.items():
            where = below(path, key)
            if key in live:
                content[key] = self.match(live[key], node, where)
            elif self._selection.takes(where):
                content[key] = self._new(node, where)
        for key in missing_of(live, saved):
            where = below(path, key)
            if any(map(self._selection.takes, self._names_in(live[key], where))):
                self.missing(where, "an entry of the step", "nothing")
                self._note_plain(where, holds_state(live[key]))
                if type(key) is int and {*map(type, saved)} == {str}:
                    self.restoration.numbered.add(where)
            else:
                self.restoration.kept.append(where)
            content[key] = live[key]
        self.restoration.containers.append(lambda: replace_content(live, content))
        return live

    def _names_in(self, live: Any, path: str) -> Iterator[str]:
        return live_names(live, path, self._selection, self._names)

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
        if (refusal := loaders.refusal(live, path)) is not None:
            raise refusal
        if holds_state(live):
            self.problem(path, f"state of a {type(live).__name__}", "a value of another kind")
            return live
        if not is_storable_kind(live):  # a class, a generator: somebody meant another object
            self.problem(path, "a live value that a step can hold", f"a {type(live).__name__}")
            return live
        if live is not None and (is_composed(node) or nodes.payload(node, "$tensor") is not None):
            self.problem(path, "a plain value", "a tensor")
            return live
        if isinstance(live, int | float | str | bytes) and _has_tensors(node):
            self.problem(path, "a plain value", "entries with tensors, such as those of a module")
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
        entries, own, before = modules.entries(live), modules.own_tensors(live), len(self.problems)
        for name in missing_of(saved, entries):
            self.unexpected(f"{path}.{name}", self._described(saved[name]))
        handed: dict[str, Any] = {}
        for name, value in entries.items():
            where = f"{path}.{name}"
            if name not in saved:
                if self._selection.takes(where):
                    self.missing(where, _describe(value))
                else:
                    self.restoration.kept.append(where)
                continue
            if isinstance(value, nn.Parameter) and self._selection.takes(where):
                self.restoration.parameters[where] = value.requires_grad
            if self._resizes(live, name, value, saved, where):
                self.restoration.loaded.append(where)
                handed[name] = self.rebuild(ABSENT, saved[name])
            elif id(value) in own:
                self._tensor(value, saved[name], where)
            elif self._takes(where) and not self._differs(saved[name], where):
                handed[name] = self.rebuild(ABSENT, saved[name])
        takes_any = any(self._selection.takes(f"{path}.{name}") for name in entries)
        if handed or (takes_any and modules.acts_when_loaded(live)):
            self.restoration.objects.append(partial(_load, modules.hand_over, live, handed, path))
        names = (name.removeprefix(f"{path}.") for name, _ in self.problems[before:])
        if any(modules.has_own_way(live, name) for name in names):
            self.restoration.by_hand.append(path)
        return live

    def _resizes(
        self, live: nn.Module, name: str, value: Any, saved: Mapping[Any, Any], path: str
    ) -> bool:
        """Whether a module gives an entry of its own the saved shape when it is loaded."""
        key = nodes.payload(saved[name], "$tensor")
        is_plain = type(value) in _RESIZED and not is_lazy(value)
        if key is None or not is_plain or not self._selection.takes(path):
            return False
        if self._memory.shape_of(key) == value.shape or self._memory.dtype_of(key) != value.dtype:
            return False
        inside = name.rpartition(".")[0]
        owner = modules.owners(live).get(inside, live)
        shapes = {
            own: self.outlined(saved[full])
            for own in (*owner._parameters, *owner._buffers)
            if (full := f"{inside}.{own}".lstrip(".")) in saved
        }
        return modules.takes(owner, shapes)

    def _object(self, live: Any, node: Any, path: str) -> Any:
        if isinstance(live, Rng) and self._other_ranks and self._selection.takes(path):
            self.restoration.kept.append(path)  # all ranks would draw the numbers of one
            self.restoration.has_own = True
            return live
        if not self._takes(path) or self._differs(node, path):
            return live
        if isinstance(live, Rng):
            state = self.rebuild(ABSENT, node)
            self.restoration.generators.append(lambda: live.load_state_dict(state))
            return live
        value = self.rebuild(self._state_of(live, node), node)
        try:
            value = loaders.fitted(live, value)
        except loaders.PositionRefused as refused:
            self.problem(path, *refused.args)
        self.restoration.objects.append(partial(_load, loaders.load, live, value, path))
        self.restoration.stateful.append((path, live))
        return live

    def _state_of(self, live: Any, node: Any) -> Any:
        """The live state of an object, whose tensors are filled."""
        if loaders.found_in(live):
            return ABSENT  # its state_dict() would make an iterator, and start its workers
        if isinstance(live, Pieced):
            return live.state_to_fill(self.outlined(node))
        return live.state_dict()

    # -- tensors ---------------------------------------------------------------------------

    def _tensor(
        self, live: torch.Tensor, node: Any, path: str, place: Placed | None = None
    ) -> torch.Tensor:
        if not self._takes(path) or self._differs(node, path):
            return live
        name = nodes.payload(node, "$tensor")
        if name is None and not is_composed(node):
            self.problem(path, _describe(live), "a plain value")
            return live
        if is_lazy(live):
            self._materialize(live, node, path)
            return live
        refuse(live, path)
        place = place or self._memory.place(live, path)
        if name is None or is_allowed(local_of(live)):
            self._compose_in_place(live, node, place, path)
        elif not self._memory.fits(live, name, place):
            if self._memory.fits(live, name, place, casts=True):
                self.restoration.castable.append(path)
            self.problem(path, _describe(live), self._described(node) + self._no_cast(live, name))
        elif overlaps_itself(local_of(live)):
            self.problem(path, "a tensor that can be written", "an expanded one: clone() it")
        elif (other := self._memory.fill(live, name, place)) is not None:
            self.problem(path, "one tensor, as it is tied", f"other values than {other}")
        else:
            self.restoration.live += [live] if (local := local_of(live)) is live else [live, local]
        return live

    def _no_cast(self, live: torch.Tensor, name: str) -> str:
        """Why a cast that was asked for does not help."""
        is_possible = can_cast(live.dtype, self._memory.dtype_of(name))
        is_asked = self._selection.cast and not is_possible
        return "; cast=True converts only floats to floats" if is_asked else ""

    def _materialize(self, live: Any, node: Any, path: str) -> None:
        """Give an uninitialized parameter or buffer its saved shape, once its bytes are there."""
        name = nodes.payload(node, "$tensor")
        saved = None if name is None else self._memory.dtype_of(name)
        is_cast = self._selection.cast and saved is not None and can_cast(live.dtype, saved)
        if name is None or not (is_cast or live.dtype == saved):
            expected = f"{_dtype(live)} of any shape, as it is uninitialized"
            self.problem(path, expected, self._described(node))
            return
        made = self._memory.make(name, device_of(live), dtype=live.dtype)

        def act() -> None:
            if is_lazy(live):  # else it is tied, and has its shape
                live.materialize(made.shape)
                live.data = made

        self.restoration.containers.append(act)

    def _compose_in_place(self, live: torch.Tensor, node: Any, place: Placed, path: str) -> None:
        """Fill what a complex tensor, or one of a class of its own, is made of."""
        if (got := self._composed.take(live, node, place, path)) is not None:
            self.problem(path, _describe(live), got)
        else:
            self.restoration.live += map(local_of, parts_of(live))

    def _described(self, node: Any) -> str:
        if is_composed(node):
            return self._composed.described(node)
        name = nodes.payload(node, "$tensor")
        return "a plain value in the step" if name is None else self._memory.described(name)


def _load(load: Callable[[Any, Any], None], live: Any, value: Any, path: str) -> None:
    with noting(
        f'while "{path}" was restored; other parts may be restored already. '
        f'skip=["{path}"] leaves it out'
    ):
        load(live, value)


def is_storable_kind(value: Any) -> bool:
    """Whether a value that has no state of its own is of a type that a step can hold."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return True
    return values.is_plain(value) or isinstance(
        value, torch.Size | torch.dtype | torch.device | PurePath
    )


def holds_state(value: Any) -> bool:
    """Whether a live value has something that only a step's tensors or objects can restore."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor | nn.Module | Mark | Piece) or is_stateful(value):
            return True
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return False


def _has_tensors(node: Any) -> bool:
    return nodes.members(node) is not None and any(tensors_of(node))


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if is_lazy(value):
        return f"an uninitialized tensor of {_dtype(value)}"
    if is_allowed(local := local_of(value)):
        return f"{name_of(type(local))} {list(value.shape)}{remark_of(local)}"
    return dtypes.described(value.dtype, tuple(value.shape))


def _is(left: Any, right: Any) -> bool:
    return left is right
