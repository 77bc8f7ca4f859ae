"""What a state holds: a file for each kind of thing, their table, and the whole of a state.

The file of a kind says how a thing is recognised (`of`), what a step has of it (`capture`), what a
selection calls its entries (`names`), and how it takes what a step has (`match`, which leaves acts
for the end of the restore). A new kind is one more file, and one more line in KINDS.

Owns: the order in which kinds are asked; which modules, optimizers and schedulers a state has; the
order of the last acts: containers and optimizers, load_state_dict() of others, random generators.
Invariants: `prepare` changes nothing that is live. What objects draw while they load leaves no
trace, so a state may be restored in parts, the generators first or last.
Not here: tensors, marks, containers and plain values, which the walks take themselves (captured,
matching); what the loaders in an object leave out of its state (loaders); memory (destinations).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from statehold.errors import ManifestError, refused
from statehold.format.saved import SavedStep
from statehold.format.selection import EVERYTHING, Answer, Names, Selection, check_answers
from statehold.format.trees import tensors_of
from statehold.tensors import nodes
from statehold.tensors.captured import Capture, Capturing
from statehold.tensors.destinations import apart
from statehold.tensors.found import Seen
from statehold.tensors.kinds import modules, objects, optimizers, rng
from statehold.tensors.kinds.rng import unchanged
from statehold.tensors.marks import Mark, bare
from statehold.tensors.matching import (
    Matching,
    Restoration,
    Walk,
    below,
    mismatch,
    missing_of,
    saved_names,
    tie_of,
)

_PARTLESS = {bool, int, float, str, bytes, type(None), torch.Tensor, nn.Parameter}


class Kind(Protocol):
    """What a file of this folder has."""

    def of(self, value: Any, /) -> Any | None:
        """The thing of this kind that a value is, or around which it is a wrapper."""

    def capture(self, to: Capturing, thing: Any, path: str, /) -> Any | None:
        """Its node in the tree of a step; None for what no step can hold."""

    def names(self, walk: Walk, thing: Any, node: Any, path: str, /) -> Iterator[str]:
        """The names that a selection may take, of the thing or of its node in a step."""

    def match(self, to: Matching, thing: Any, node: Any, path: str, /) -> None:
        """Say what a restore does to it, and change nothing yet."""


KINDS: tuple[Kind, ...] = (modules, optimizers, rng, objects)


def kind_of(value: Any) -> tuple[Kind, Any] | None:
    """The first kind that a value is of, and the thing itself."""
    for kind in KINDS:
        if (thing := kind.of(value)) is not None:
            return kind, thing
    return None


def parts(state: Any) -> Iterator[tuple[str, Any]]:
    """(path, object) of the modules, optimizers and schedulers of torch in dicts, lists and tuples,
    in their order; of a wrapper around an optimizer the optimizer.

    Visits a container once, however often and however deep it is held: what is too deep, or holds
    itself, is for `values` to refuse.
    """
    seen: set[int] = set()
    left = [("", state)]
    while left:
        path, value = left.pop()
        is_plain = type(value) in (dict, list, tuple)  # as most of a state is
        if not is_plain and isinstance(value, nn.Module | LRScheduler):
            yield path, value
        elif not is_plain and (optimizer := optimizers.of(value)) is not None:
            yield path, optimizer
        elif (is_plain or isinstance(value, Mark | Mapping | list | tuple)) and id(
            value
        ) not in seen:
            seen.add(id(value))
            if isinstance(value, Mark):
                left.append((path, value.value))
                continue
            members = value.items() if isinstance(value, dict | Mapping) else enumerate(value)
            left += [
                (f"{path}.{key}" if path else str(key), item)
                for key, item in members
                if type(item) not in _PARTLESS  # long lists of numbers should cost little
            ][::-1]


# -- a whole state --------------------------------------------------------------------------------


def capture(
    state: Mapping[str, Any],
    rank: int | None = None,
    stepping: Iterable[torch.optim.Optimizer] = (),
    seen: Seen | None = None,
    *,
    world: int = 1,
    own: bool = True,
) -> Capture:
    """Capture a state, or `rank`'s part of one that `world` ranks save (None: it is alone).

    stepping: optimizers whose every step() waits at the gate, whether the state has them or not.
    seen: what the capture before saw; it makes this one faster, and changes nothing else.
    own: with random generators and data loaders, which replicas do not have in common.
    Raises UnsupportedValueError, with the path, for what no step can hold.
    """
    if not isinstance(state, Mapping):
        text = "the state must be a mapping of names to values"
        hint = 'give the parts names: save(step, {"model": model, "optimizer": optimizer})'
        raise refused(text, "a dict", type(state).__name__, hint)
    found = list(parts(state))
    entries, names = modules.look_into(found)
    replicas = {} if rank is None else modules.replicas_in(found)
    held = [part for _, part in found if isinstance(part, torch.optim.Optimizer)]
    to = Capturing(kind_of, rank, world, own, held, stepping, seen or Seen())
    to.entries, to.names, to.replicas = entries, names, replicas
    return to.result(state)


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
        found = [(path, part) for path, part in parts(state) if isinstance(part, nn.Module)]
        entries, names = modules.look_into(found)
        replicas = {} if rank is None else modules.replicas_in(found)
        paths = [path for path, _ in found]
        to = Matching(saved, selection, kind_of, paths, names, replicas, rank, alone, world)
        _match(to, state, saved.state, selection, entries)
        for check in to.later:
            check()
        to.take_casts()
    restoration = to.restoration
    if rank is None:
        check_answers([Answer(restoration.patterns, loads=True, has_rest=False)])
    if to.problems:
        raise mismatch(to.problems, restoration)
    live = [*restoration.destinations]
    if beside := list(apart(restoration.destinations)):
        restoration.shared, restoration.containers[:0] = live, beside
    if rank is None:
        check_answers([restoration.answer])
    return restoration


def finish(
    restoration: Restoration, *, draws: bool = True, written: Callable[[], object] = int
) -> None:
    """Apply everything that is not tensor bytes.

    draws: whether an act may draw random numbers. To undo that takes longer than a few acts.
    written: called while the tensors have the bytes of the step, which an act may change.
    """
    # Memory was written behind autograd's back: a backward that has saved these must raise.
    torch.autograd.graph.increment_version(
        [tensor for tensor in restoration.live if not tensor.is_inference()]
    )
    written()
    with torch.no_grad():
        with unchanged() if draws else contextlib.nullcontext():
            for act in (*restoration.containers, *restoration.objects):
                act()
        for act in restoration.generators:
            act()


def check_takes_values(state: object) -> MutableMapping[Any, Any]:
    """A state that is restored. Raises UsageError for what cannot be one."""
    if not isinstance(state, MutableMapping):
        text = "the state of a restore must be a mutable mapping"
        hint = 'give the parts names: restore({"model": model, "optimizer": optimizer})'
        raise refused(text, "a dict", type(state).__name__, hint)
    return state


Entries = Mapping[int, Mapping[str, Any]]  # of modules, by their ids


def _match(
    to: Matching, state: Mapping[str, Any], node: Any, selection: Selection, entries: Entries
) -> None:
    """The state itself: its names are the step's, no more and no fewer."""
    members = nodes.members(node)
    if members is None:
        raise ManifestError("the state of the manifest is not an object")
    saved = nodes.renamed(members, state, selection)
    to.tied = cache(lambda: dict(_ties(state, saved, entries)))
    for key in missing_of(saved, state):
        if any(map(selection.takes, saved_names(saved[key], str(key)))):
            to.unexpected(str(key), "an entry of the step")
            to.note_plain(str(key), any(tensors_of(saved[key])))
    present = {key: item for key, item in saved.items() if key in state}
    to.mapping(check_takes_values(state), present, "")
    if selection.has_patterns:
        walk = to.walk
        live = list(walk.content(state, {}, ""))
        names = Names(
            taken=dict.fromkeys((*live, *walk.content(state, saved, ""))),
            saved=list(saved_names(node, "")),
            live=live,
            open=[path for path in _dicts(state, "") if path],
        )
        to.restoration.patterns = selection.answers(names)


def _ties(live: Any, saved: Mapping[Any, Any], entries: Entries) -> Iterator[tuple[Any, Any]]:
    """tie_of() and the node of each live tensor that the step has, once for each of its names."""
    known = entries.get(id(live), live if isinstance(live, Mapping) else {})
    for key in (key for key in known if key in saved):
        part, node = bare(known[key]), saved[key]
        if isinstance(part, torch.Tensor) and type(node) is dict:
            yield tie_of(part), node
        else:
            yield from _ties(part, nodes.members(node) or {}, entries)


def _dicts(live: Any, path: str) -> Iterator[str]:
    """The dicts in a live state, which take names that they do not have."""
    live = bare(live)
    if type(live) in (dict, OrderedDict):
        yield path
        for key, part in live.items():
            yield from _dicts(part, below(path, key))
