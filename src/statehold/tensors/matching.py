"""Match a step with the live state, and say where its bytes go, before anything changes.

Owns: the walk through a live state and a saved tree, for tensors, containers and plain values; what
is left to do once the bytes have arrived; the report, and the error for a state that differs.
Invariants: nothing live changes here. Destinations are live storages wherever there is a tensor of
the saved shape and dtype; only what is missing (a fresh optimizer's state, new dict entries) is
allocated.
Not here: modules, optimizers and other objects (kinds), memory (destinations), the order of the
acts that are left (kinds), choosing the step (checkpointer).
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from statehold.encoding import values
from statehold.errors import StateMismatchError, some
from statehold.format.saved import SavedStep
from statehold.format.selection import Answer, RestoreReport, Selection, suggested
from statehold.format.trees import tensors_of
from statehold.layout.layout import Layout
from statehold.tensors import dtypes, nodes
from statehold.tensors.composed import (
    Composed,
    is_allowed,
    is_composed,
    parts_of,
    refuse,
    remark_of,
)
from statehold.tensors.destinations import Casts, Destination, Destinations, can_cast
from statehold.tensors.marks import Mark, bare
from statehold.tensors.placements import Piece, Placed
from statehold.tensors.storable import (
    KindOf,
    device_of,
    is_stateful,
    local_of,
    memory_of,
    name_of,
    overlaps_itself,
)
from statehold.tensors.stored import Fill

HOST = torch.device("cpu")
ABSENT = object()
_MADE_OF_TENSORS = ("$ndarray", "$complex128", "$subclass")
# They ask no kind: lists of numbers may be long.
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Parameter}


# -- what was found --------------------------------------------------------------------------------


PROBLEMS_SHOWN = 20
NAMES_IN_HINT = 3
# A parameter that no module in the state has.
_BY_PLACE = re.compile(r"\.state\.[0-9]+$")
# (whether generators are restored, too; whether another number of ranks has saved the step)
Doubts = Callable[[bool, bool], Iterator[str]]
_HINT = "build the state as it was when the step was saved, or leave out what differs with {}"


@dataclass(slots=True)
class Restoration:
    """Where the bytes go, and what is left to do once they have arrived.

    `used`: the saved tensors that this rank takes. `shared`: the destinations as they were, if some
    share live memory, for check_shared(). `patterns`: see Answer. `has_own`: whether a
    generator goes on, because another number of ranks has saved the step. `plain`: which of the
    missing and unexpected entries hold values only. `numbered`: missing entries
    of dicts by number, where the step has them by name. `by_hand`: modules that
    may take what differs when they are loaded. `castable`: entries whose
    dtypes are other floats. `parameters`: those of modules that
    are restored, and whether they need gradients. `trains`: an optimizer is restored, too.
    `doubted`: by path, what may not go on as it was. `streams`: what reads more of the step once
    the destinations are filled; `streamed` are these tensors. The other lists are of a
    RestoreReport.
    """

    step: int = 0
    destinations: list[Destination] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    shared: list[Destination] = field(default_factory=list)
    live: list[torch.Tensor] = field(default_factory=list)
    containers: list[Callable[[], Any]] = field(default_factory=list)
    objects: list[Callable[[], Any]] = field(default_factory=list)
    generators: list[Callable[[], Any]] = field(default_factory=list)
    doubted: list[tuple[str, Doubts]] = field(default_factory=list)
    streams: list[Callable[[Fill], None]] = field(default_factory=list)
    streamed: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    patterns: Mapping[str, list[str] | None] = field(default_factory=dict)
    has_own: bool = False
    plain: set[str] = field(default_factory=set)
    numbered: set[str] = field(default_factory=set)
    castable: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    parameters: dict[str, bool] = field(default_factory=dict)
    trains: bool = False
    by_hand: list[str] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        """What the selection found here."""
        return Answer(
            self.patterns,
            loads=bool(self.loaded) or self.has_own,
            has_rest=bool(self.missing or self.unexpected or self.kept),
            lacks=bool(self.missing),
        )

    @property
    def report(self) -> RestoreReport:
        return RestoreReport(
            self.step,
            loaded=tuple(self.loaded),
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            kept=tuple(self.kept),
            cast=tuple(self.cast),
        )

    def doubts(self, *, other_ranks: bool, frozen: Set[str] | None = None) -> Iterator[str]:
        """After the last act: what may not go on as it was, and what the user can do.

        other_ranks: another number of ranks has saved the step. frozen: the parameters that needed
        no gradient then; None if the step does not say it.
        """
        if frozen is not None and self.trains:
            needing = [name for name, needs in self.parameters.items() if needs and name in frozen]
            others = [
                name for name, needs in self.parameters.items() if not needs and name not in frozen
            ]
            for names, then, now, value in (
                (others, "needed gradients", "need none", True),
                (needing, "needed no gradients", "need them", False),
            ):
                if names:
                    yield (
                        f"step {self.step} is restored, but these parameters {then} when it was "
                        f"saved, and {now} now: {some(names)}. restore() does not change that; "
                        f"call requires_grad_({value}) if they should be as they were"
                    )
        for path, doubts in self.doubted:
            for doubt in doubts(bool(self.generators), other_ranks):
                yield f'step {self.step} is restored; "{path}" may continue differently: {doubt}'


def mismatch(problems: list[tuple[str, str]], found: Restoration) -> StateMismatchError:
    """The error for a state and a step that differ; found: what was found out until then."""
    facts = dict(problems[:PROBLEMS_SHOWN])
    if len(problems) > PROBLEMS_SHOWN:
        facts["..."] = f"{len(problems) - PROBLEMS_SHOWN} more"
    for given, near in found.patterns.items():
        if near is not None:
            facts[given] = f"matches nothing on this rank: {suggested(near)}"
    return StateMismatchError(
        f"the state and the step differ in {places(len(problems))}; nothing was changed",
        facts=facts,
        hint=_advice([name for name, _ in problems], found),
    )


def places(count: int) -> str:
    """ "1 place", "2 places"."""
    return f"{count} place{'s' if count != 1 else ''}"


def _advice(names: list[str], found: Restoration) -> str:
    """What is most likely meant by a state that differs from the step."""
    tops = dict.fromkeys(name.split(".")[0] for name in found.loaded)
    whole = {name for name in names if "." not in name} - found.plain
    here, there = ([name for name in those if name in whole]
                   for those in (found.missing, found.unexpected))  # fmt: skip
    if len(here) == len(there) == 1:
        rename = f'rename={{"{there[0]}": "{here[0]}"}}'
        return f'if "{there[0]}" of the step is "{here[0]}" now: {rename}'
    by_place = [name for name in found.missing if _BY_PLACE.search(name)]
    if found.numbered.intersection(by_place):
        part = by_place[0].rpartition(".state.")[0]
        return (
            f'the step was saved with the optimizer itself: put it into the state as "{part}", '
            "not its state_dict()"
        )
    if by_place:
        return (
            "an optimizer names its parameters by the modules of the state: put the model that "
            "it updates into the state, not another copy"
        )
    if tops and not found.missing and all(name.split(".")[0] not in tops for name in names):
        part = ", ".join(f'"{name}"' for name in tops)
        return f"to restore this part of the step alone: restore(state, only=[{part}])"
    return _HINT.format(_ways_out(names, found))


def _ways_out(names: list[str], found: Restoration) -> str:
    """The arguments of restore() with which the parts that fit are restored."""
    shown = ", ".join(f'"{name}"' for name in names[:NAMES_IN_HINT])
    skip = f"skip=[{shown}{', ...' if len(names) > NAMES_IN_HINT else ''}]"
    if found.castable and found.castable == names:
        return f"{skip}; cast=True converts them to the dtypes of the state"
    if all(any("." in name for name in side) for side in (found.missing, found.unexpected)):
        skip += "; rename= maps names of the step to those of the state"
    if found.by_hand:
        part = found.by_hand[0]
        return (
            f"{skip}. A module that loads its entries in a way of its own takes them with "
            f'restore(state, skip=["{part}"]) and '
            f'load_state_dict(statehold.load("RUN@{found.step}", "{part}"))'
        )
    if {*found.missing, *found.unexpected}.issuperset(names):
        return f"{skip}; strict=False leaves out all that only one side has"
    return skip


# -- the names of a state --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Walk:
    """The dotted names of a live state and of a saved tree for it: what a selection is asked on.

    Kinds give names to what is of them, and the members of dicts, lists and tuples have names of
    their own. Nothing is changed or allocated.

    names_of_parameters: of the live ones, by their ids.
    """

    kind_of: KindOf
    selection: Selection
    names_of_parameters: Mapping[int, str]

    def content(self, live: Any, saved: Mapping[Any, Any], path: str) -> Iterator[str]:
        """The names in a dict, or in what is known by keys like one; its own if it is empty."""
        known = live if isinstance(live, Mapping) else {}
        for key in dict.fromkeys((*known, *saved)):
            live_part, node = known.get(key, ABSENT), saved.get(key, ABSENT)
            yield from self.names(live_part, node, below(path, key))
        if path and not known and not saved:
            yield path

    def names(self, live: Any, node: Any, path: str) -> Iterator[str]:
        live = bare(live)
        if type(live) in (dict, OrderedDict) or live is ABSENT:
            yield from self.content(live, nodes.members(node) or {}, path)
        elif type(live) in (list, tuple):
            items = node if type(node) is list else nodes.payload(node, "$tuple") or ()
            yield from self.content(dict(enumerate(live)), dict(enumerate(items)), path)
        elif type(live) not in _PLAIN and (found := self.kind_of(live)) is not None:
            kind, thing = found
            yield from kind.names(self, thing, node, path)
        else:
            yield path


def below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def tie_of(tensor: torch.Tensor) -> Any:
    """Equal for the names of one tensor: its memory, or its id where that says nothing."""
    is_seen = type(tensor) in _PLAIN and tensor.numel() and tensor.device.type != "meta"
    return memory_of(tensor) if is_seen else id(tensor)


def saved_names(node: Any, path: str) -> Iterator[str]:
    """The names in a saved tree, which prefixes in `rename` are of."""
    members = nodes.members(node)
    for key, item in (members or {}).items():
        yield from saved_names(item, below(path, key))
    if path and not members:
        yield path


# -- the comparison --------------------------------------------------------------------------------
# A live dict takes the content of the saved one; entries that the step lacks are missing. In a job
# of several ranks what this rank has no place for may be another's: the caller judges.


class Matching:
    """One comparison of a live state with a saved tree."""

    def __init__(
        self,
        saved: SavedStep,
        selection: Selection,
        kind_of: KindOf,
        modules: Iterable[str],
        names: Mapping[int, str],
        replicas: Mapping[int, Layout],
        rank: int | None,
        alone: bool,
        world: int | None,
    ) -> None:
        """modules: their paths. names: of their entries, by ids. The others as for prepare()."""
        self.problems: list[tuple[str, str]] = []
        self.walk = Walk(kind_of, selection, names)
        self.selection, self.modules, self.names = selection, modules, names
        # The nodes of live tensors, by tie_of(). Only a state that lacks a name asks.
        self.tied: Callable[[], Mapping[Any, Any]] = dict
        self.later: list[Callable[[], None]] = []  # checks, for when all of the state is matched
        self.other_ranks = world is not None and world != saved.world_size
        self._saved, self._kind_of, self._alone = saved, kind_of, alone
        self._casts = Casts(names) if selection.cast else None
        self.memory = Destinations(saved, replicas, rank, self._casts)
        self._composed = Composed(self.memory)
        self.restoration = Restoration(
            saved.step, self.memory.found, self.memory.used, containers=self.memory.acts
        )

    def take_casts(self) -> None:
        """Leave to the restoration what is converted."""
        if self._casts is not None and (names := self._casts.names):
            self.restoration.cast = [self.selection.renamed(name) for name in names]
            self.restoration.streamed |= {*names}
            self.restoration.streams.append(self._casts.fill)
            for name in self._casts.sharing(self.memory.found):
                path = self.selection.renamed(name)
                self.problem(path, "memory of its own, for a conversion", "memory that it shares")

    def problem(self, path: str, expected: str, got: str) -> None:
        self.problems.append((path, f"expected {expected}, got {got}"))

    def missing(self, path: str, expected: str, got: str = "nothing in the step") -> None:
        """The live state has what the step lacks."""
        self.restoration.missing.append(path)
        if self.selection.strict:
            self.problem(path, expected, got)

    def of_another_name(self, live: Any) -> Any:
        """The node of a live tensor that the step has by another name of the state, or ABSENT."""
        return self.tied().get(tie_of(live), ABSENT) if isinstance(live, torch.Tensor) else ABSENT

    def unexpected(self, path: str, got: str) -> None:
        """The step has what this process has no place for."""
        if self.selection.takes(path):
            self.restoration.unexpected.append(path)
            if self.selection.strict and self._alone:
                self.problem(path, "nothing", got)

    def takes(self, path: str) -> bool:
        """Whether a leaf is restored; what is not is kept."""
        taken = self.selection.takes(path)
        (self.restoration.loaded if taken else self.restoration.kept).append(path)
        return taken

    def differs(self, node: Any, path: str) -> bool:
        """Whether ranks saved different values, and none of them is meant here: a problem."""
        found = nodes.differing(node) if self._saved.world_size > 1 else None
        if found is not None:
            saved = f"{self._saved.world_size} ranks saved their own ({found})"
            advice = f'restore on as many ranks, or leave it out with skip=["{path}"]'
            self.problems.append((path, f"{saved}, none of which is this rank's: {advice}"))
        return found is not None

    # -- live things -----------------------------------------------------------------------

    def match(self, live: Any, node: Any, path: str) -> Any:
        """What belongs in the place of `live`: itself where it is restored in place."""
        if not self.selection.reaches(path):
            self.restoration.kept.append(path)
            return live
        if isinstance(live, Mark):
            return self._marked(live, node, path)
        if isinstance(live, torch.Tensor):
            return self.tensor(live, node, path)
        if isinstance(live, Piece):
            name = nodes.payload(node, "$tensor")
            piece = live if name is None else live.as_saved(self.memory.shape_of(name))
            self.tensor(piece.tensor, node, path, self.memory.place_of_piece(piece, path))
            return live
        if (held := type(live)) in (dict, OrderedDict):
            if (saved := nodes.members(node)) is not None:
                return self.mapping(live, saved, path)
        elif held is list:
            if type(node) is list:
                return self._list(live, node, path)
        elif held is tuple:
            if (items := nodes.payload(node, "$tuple")) is not None:
                return self._tuple(live, items, path)
        elif held not in _PLAIN and (found := self._kind_of(live)) is not None:
            kind, thing = found
            kind.match(self, thing, node, path)
            return live
        return self.plain(live, node, path)

    def note_plain(self, path: str, has_state: bool) -> None:
        if not has_state:
            self.restoration.plain.add(path)

    def _marked(self, live: Mark[Any], node: Any, path: str) -> Mark[Any]:
        value = self.match(live.value, node, path)
        if value is not live.value:
            self.restoration.containers.append(lambda: setattr(live, "value", value))
        return live

    def mapping(self, live: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: str) -> Any:
        content = {}
        for key, node in saved.items():
            where = below(path, key)
            if key in live:
                content[key] = self.match(live[key], node, where)
            elif self.selection.takes(where):
                content[key] = self._new(node, where)
        for key in missing_of(live, saved):
            where = below(path, key)
            names = self.walk.names(live[key], ABSENT, where)
            if (node := self.of_another_name(live[key])) is not ABSENT:
                self.tensor(live[key], node, where)
            elif any(map(self.selection.takes, names)):
                self.missing(where, "an entry of the step", "nothing")
                self.note_plain(where, holds_state(live[key]))
                if type(key) is int and {*map(type, saved)} == {str}:
                    self.restoration.numbered.add(where)
            else:
                self.restoration.kept.append(where)
            content[key] = live[key]
        self.restoration.containers.append(lambda: replace_content(live, content))
        return live

    def _list(self, live: list[Any], items: list[Any], path: str) -> list[Any]:
        content = self._items(live, items, path)
        self.restoration.containers.append(lambda: live.__setitem__(slice(None), content))
        return live

    def _tuple(self, live: tuple[Any, ...], items: list[Any], path: str) -> tuple[Any, ...]:
        content = self._items(live, items, path)
        unchanged = len(live) == len(content) and all(map(is_, live, content))
        return live if unchanged else tuple(content)

    def _items(self, live: list[Any] | tuple[Any, ...], items: list[Any], path: str) -> list[Any]:
        both = zip(live, items, strict=False)
        content = [self.match(*each, f"{path}.{at}") for at, each in enumerate(both)]
        for index in range(len(live), len(items)):
            if self.selection.takes(where := f"{path}.{index}"):
                if index > len(content):
                    self.problem(where, "a selection with the items before it", "one without")
                content.append(self._new(items[index], where))
        content += self._surplus(live, len(items), path)
        return content

    def _surplus(self, live: Sequence[Any], begin: int, path: str) -> Sequence[Any]:
        """What stays of the live items that the step lacks: all up to the last one that has to."""
        end = begin
        for index in range(begin, len(live)):
            if not self.selection.takes(where := f"{path}.{index}"):
                self.restoration.kept.append(where)
            elif holds_state(live[index]):
                self.missing(where, "an entry of the step", "nothing")
            else:
                continue
            end = index + 1
        return live[begin:end]

    def plain(self, live: Any, node: Any, path: str, refusal: Exception | None = None) -> Any:
        if not self.takes(path) or self.differs(node, path):
            return live
        if refusal is not None:
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
        return self._refilled(live, self.rebuild(live, node))

    def _refilled(self, live: Any, new: Any) -> Any:
        """The live container where it can take what is in the new one; else the new one."""
        if type(live) is not type(new) or type(live) not in (deque, set, Counter):
            return new
        if getattr(live, "maxlen", None) != getattr(new, "maxlen", None):
            return new
        self.restoration.containers.append(partial(_refill, live, new))
        return live

    def _new(self, node: Any, path: str) -> Any:
        """The saved value for a place where nothing is."""
        self.restoration.loaded.append(path)
        return None if self.differs(node, path) else self.rebuild(ABSENT, node)

    # -- tensors ---------------------------------------------------------------------------

    def tensor(
        self, live: torch.Tensor, node: Any, path: str, place: Placed | None = None
    ) -> torch.Tensor:
        if not self.takes(path) or self.differs(node, path):
            return live
        name = nodes.payload(node, "$tensor")
        if name is None and not is_composed(node):
            self.problem(path, described(live), "a plain value")
            return live
        if is_lazy(live):
            self._materialize(live, node, path)
            return live
        refuse(live, path)
        place = place or self.memory.place(live, path)
        if name is None or is_allowed(local_of(live)):
            self._compose_in_place(live, node, place, path)
        elif not self.memory.fits(live, name, place):
            if self.memory.fits(live, name, place, casts=True):
                self.restoration.castable.append(path)
            self.problem(path, described(live), self.described(node) + self._no_cast(live, name))
        elif overlaps_itself(local_of(live)):
            self.problem(path, "a tensor that can be written", "an expanded one: clone() it")
        elif (other := self.memory.fill(live, name, place)) is not None:
            self.problem(path, "one tensor, as it is tied", f"other values than {other}")
        else:
            self.restoration.live += [live] if (local := local_of(live)) is live else [live, local]
        return live

    def _no_cast(self, live: torch.Tensor, name: str) -> str:
        """Why a cast that was asked for does not help."""
        is_possible = can_cast(live.dtype, self.memory.dtype_of(name))
        is_asked = self.selection.cast and not is_possible
        return "; cast=True converts only floats to floats" if is_asked else ""

    def _materialize(self, live: Any, node: Any, path: str) -> None:
        """Give an uninitialized parameter or buffer its saved shape, once its bytes are there."""
        name = nodes.payload(node, "$tensor")
        saved = None if name is None else self.memory.dtype_of(name)
        is_cast = self.selection.cast and saved is not None and can_cast(live.dtype, saved)
        if name is None or not (is_cast or live.dtype == saved):
            expected = f"{_dtype(live)} of any shape, as it is uninitialized"
            self.problem(path, expected, self.described(node))
            return
        made = self.memory.make(name, device_of(live), dtype=live.dtype)

        def act() -> None:
            if is_lazy(live):  # else it is tied, and has its shape
                live.materialize(made.shape)
                live.data = made

        self.restoration.containers.append(act)

    def _compose_in_place(self, live: torch.Tensor, node: Any, place: Placed, path: str) -> None:
        """Fill what a complex tensor, or one of a class of its own, is made of."""
        if (got := self._composed.take(live, node, place, path)) is not None:
            self.problem(path, described(live), got)
        else:
            self.restoration.live += map(local_of, parts_of(live))

    def described(self, node: Any) -> str:
        if is_composed(node):
            return self._composed.described(node)
        name = nodes.payload(node, "$tensor")
        return "a plain value in the step" if name is None else self.memory.described(name)

    # -- values without a live counterpart of their own --------------------------------------

    def rebuild(
        self, live: Any, node: Any, device: torch.device = HOST, beside: torch.Tensor | None = None
    ) -> Any:
        """The saved value; tensors that `live` has in the same place are filled and used.

        beside: the parameter whose state it is, which says how tensors that are made are sharded.
        """
        name = nodes.payload(node, "$tensor")
        if isinstance(live, Piece):
            return self._piece(live, name)
        if name is not None:
            if isinstance(live, torch.Tensor) and self.memory.usable(live, name):
                return live
            return self.memory.make(name, device, beside)
        if is_composed(node):
            return self.compose(live, node, device, beside)
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
        place = self.memory.place_of_piece(live, path)
        if name is None or not self.memory.usable(live.tensor, name, place):
            expected = dtypes.described(live.tensor.dtype, live.shape)
            got = "a plain value" if name is None else self.memory.described(name)
            self.problem(path, expected, got)
        self.restoration.live.append(live.tensor)
        return live

    def outlined(self, node: Any) -> Any:
        """The value of a node with its tensors on the meta device, where they have no memory."""

        def leaf(tag: str, payload: Any) -> Any:
            if tag == "$tensor":
                shape, dtype = self.memory.shape_of(payload), self.memory.dtype_of(payload)
                return torch.empty(shape, dtype=dtype, device="meta")
            return None if tag in _MADE_OF_TENSORS else nodes.value_of(tag, payload)

        return values.decode(node, leaf)

    def compose(
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
            place = place or self.memory.place(live, path)
            if self._composed.take(live, node, place, path) is None:
                return live
        return self._composed.make(node, device, beside, path)

    def _array(self, live: Any, name: str) -> Any:
        if type(live).__name__ == "ndarray" and live.flags.writeable and live.flags.c_contiguous:
            tensor = torch.from_numpy(live)
            if self.memory.usable(tensor, name):
                return live
        return self.memory.make(name, HOST).numpy()

    def _leaf(self, tag: str, payload: Any, device: torch.device) -> Any:
        if tag == "$tensor":
            return self.memory.make(payload, device)
        if tag == "$ndarray":
            return self.memory.make(payload, HOST).numpy()
        if tag == "$complex128":  # of an array: a view of pairs
            return payload.view("complex128")[..., 0]
        return nodes.value_of(tag, payload)


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


def described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if is_lazy(value):
        return f"an uninitialized tensor of {_dtype(value)}"
    if is_allowed(local := local_of(value)):
        return f"{name_of(type(local))} {list(value.shape)}{remark_of(local)}"
    return dtypes.described(value.dtype, tuple(value.shape))


def missing_of(these: Iterable[Any], others: Container[Any]) -> list[Any]:
    """The keys of `these` that `others` lack, in order."""
    return [key for key in these if key not in others]


def _refill(live: Any, new: Any) -> None:
    live.clear()
    (live.extend if isinstance(live, deque) else live.update)(new)


def replace_content(live: MutableMapping[Any, Any], content: Mapping[Any, Any]) -> None:
    live.clear()
    live.update(content)
