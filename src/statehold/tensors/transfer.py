"""Which tensors of a step a model can take over: those of the prefix that both graphs share.

Owns: which model of the state and which of the step are meant.
Invariants: nothing live changes. State of optimizers, generators and everything else stays as it
is: moments belong to the gradients of the old model, and a new layer changes these.

Transfer: the selection of tensors that go from the model of a step into another model. Pure.

Invariants: exactly the tensors of the pairs are taken, each by its whole name. All else in the
model is kept, and all else in the step is left out: neither is an error.

Not here: graphs (graph, format/graphs), the restore (restore).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from statehold.errors import StateMismatchError, UsageError
from statehold.format.graphs import Layer, SavedModel, models_in
from statehold.format.saved import SavedStep
from statehold.format.selection import Names, Selection
from statehold.tensors.graph import Graph
from statehold.tensors.kinds import parts
from statehold.tensors.kinds.modules import unwrapped
from statehold.tensors.marks import Mark

# -- the selection ---------------------------------------------------------------------------------


class Transfer(Selection):
    """pairs: saved name -> live name of each tensor."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        super().__init__(rename={saved: live for saved, live in pairs.items() if saved != live})
        self.strict = False
        self._live = frozenset(pairs.values())
        self._above_live = _above(pairs.values())
        self._above_saved = _above(self.rename)

    @property
    def is_everything(self) -> bool:
        return False

    @property
    def has_patterns(self) -> bool:
        return False

    def takes(self, name: str) -> bool:
        return name in self._live

    def reaches(self, name: str) -> bool:
        return name in self._live or name in self._above_live

    def renamed(self, name: str) -> str:
        return self.rename.get(name, name)

    def renames_below(self, name: str) -> bool:
        return name in self._above_saved

    def answers(self, names: Names) -> dict[str, list[str] | None]:
        return {}


def _above(names: Iterable[str]) -> frozenset[str]:
    """Every name that one of these lies below, and the empty one."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return frozenset(found)


# -- the models ------------------------------------------------------------------------------------


def transfer_into(state: Mapping[str, Any], *, alone: bool) -> Callable[[SavedStep], Transfer]:
    """What the model of `state` takes from a step that is given later.

    alone: no other rank has a part of the model. The selection then raises StateMismatchError for
    a step that shares nothing. Raises UsageError if the state does not say which model is meant.
    """
    path, graph = _model_of(state)

    def choose(saved: SavedStep) -> Transfer:
        models = sorted(models_in(saved), key=lambda each: each.path != path)
        shared = [(each, shared_with(graph, each)) for each in models]
        model, layers = max(shared, key=lambda each: len(each[1]), default=(None, []))
        if alone and not layers:
            raise _nothing_shared(path, graph, models)
        return Transfer(_pairs(model.path, path, layers) if model else {})

    return choose


def shared_with(graph: Graph, saved: SavedModel) -> list[tuple[Layer, Layer]]:
    """The prefix that a model shares with one of a step: pairs of saved and live layers."""
    theirs = saved.like(graph.kind)
    return theirs.shared(graph.like(theirs))


def _pairs(saved: str, live: str, layers: list[tuple[Layer, Layer]]) -> dict[str, str]:
    return {
        f"{saved}.{old}": f"{live}.{new}"
        for theirs, ours in layers
        for old, new in zip(theirs.tensors, ours.tensors, strict=True)
    }


def _model_of(state: Mapping[str, Any]) -> tuple[str, Graph]:
    """The model whose graph the state has, or its only one, with its path."""
    found = [(path, part) for path, part in parts(state) if isinstance(part, nn.Module)]
    graph = next((each for each in map(_bare, state.values()) if isinstance(each, Graph)), None)
    if graph is not None:
        meant = unwrapped(graph.model)
        found = [(path, part) for path, part in found if unwrapped(part) is meant]
    if not found or (len(found) > 1 and graph is None):
        facts = {"expected": "one model", "got": ", ".join(path for path, _ in found) or "none"}
        hint = 'say which one: add "graph": statehold.lineage.Graph(model) to the state'
        raise UsageError("prefix=True needs to know the model", facts=facts, hint=hint)
    path, model = found[0]
    return path, graph or Graph(model)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Mark) else value


def _nothing_shared(path: str, graph: Graph, models: list[SavedModel]) -> StateMismatchError:
    known = ", ".join(f"{each.path} ({each.like(graph.kind).kind})" for each in models[:8])
    first = next(iter(graph.layers.layers), None)
    return StateMismatchError(
        "the model shares no layer with the step; nothing was changed",
        facts={"model": f"{path} ({graph.kind})", "models of the step": known or "none",
               "first layer": first.name if first else "none"},
        hint="a shared layer has the same class, settings, shapes, dtypes, and inputs; "
        "lineage.nearest() finds a step that shares layers",
    )  # fmt: skip
