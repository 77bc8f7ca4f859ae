"""Graph: the graph of a live model, as a part of a state.

Owns: how a model is traced, what counts as a layer, and what the digest of a layer covers; which
tensors of a step a model can take over.
Invariants: the model is not changed and not run: torch.fx traces a copy of its modules that shares
their tensors. Other threads may call models meanwhile. A model that cannot be traced has its
modules in their order instead; `kind` and `reason` say so.

Not here: digests, the record in a step, and prefixes (format/graphs); the restore (kinds).
"""

from __future__ import annotations

import copy
import hashlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from statehold.errors import StateMismatchError, UsageError
from statehold.format.graphs import (
    COMPOSED,
    Digests,
    Kind,
    Layer,
    LayerGraph,
    SavedModel,
    graph_of_tensors,
    models_in,
)
from statehold.format.saved import SavedStep
from statehold.format.selection import Names, Selection
from statehold.tensors import dtypes
from statehold.tensors.composed import above, is_allowed
from statehold.tensors.devices.elements import flat
from statehold.tensors.kinds import modules, parts
from statehold.tensors.marks import bare
from statehold.tensors.storable import local_of, name_of

# -- the graph of a model --------------------------------------------------------------------------

# The content of a larger tensor that no step holds does not count.
_CONSTANT_BYTES_MAX = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SHOWN = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class Graph:
    """The graph of a model, to be put into a state beside it.

        state = {"model": model, "graph": Graph(model), "optimizer": optimizer}

    Each saved step then records the graph, and lineage.nearest() and restore(prefix=True) compare
    it with that of another model. A restore loads nothing into it. Make it after the model has all
    its layers, and before the model is sharded.

    Attributes:
        model: the model.
        kind: "traced" if torch.fx can trace the model, else "modules": the order of the modules.
        reason: why the model could not be traced; None if it was.

    Raises:
        UsageError: `model` is not a module.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            facts = {"expected": "a torch.nn.Module", "got": type(model).__name__}
            raise UsageError("a graph is that of a model", facts=facts)
        self.model = model
        self.reason: str | None = None
        try:
            self.layers = _Traced(model).graph()
        except Exception as error:  # the model's own code runs: it may raise anything
            self.reason = f"{type(error).__name__}: {error}"[:500]
            self.layers = _Modules(model).graph()
        self.by_tensors = graph_of_tensors(_described(model))

    @property
    def kind(self) -> Kind:
        return self.layers.kind

    def like(self, other: LayerGraph) -> LayerGraph:
        """The graph of this model that can have something in common with the other."""
        return self.layers if self.layers.kind == other.kind else self.by_tensors

    def state_dict(self) -> dict[str, str]:
        return self.layers.record()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: the graph is that of the live model."""

    def __repr__(self) -> str:
        return f"<Graph of {type(self.model).__name__}: {len(self.layers.layers)} layers>"


def _described(model: nn.Module) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name, value in modules.entries(model).items():
        if isinstance(value, torch.Tensor):
            yield name, *_form(value)


def _form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype and the shape, as a step has them."""
    if is_lazy(tensor):
        return "uninitialized", ()
    if tensor.dtype is torch.complex128 or is_allowed(local_of(tensor)):
        return COMPOSED
    code = dtypes.code_of(tensor.dtype, "")
    return code, dtypes.stored_shape(tensor.dtype, tuple(tensor.shape), "")


class _Layers:
    """The layers of one model, in the order in which they are found. The digest of a layer covers

        its class, and its public attributes that are plain values (stride, eps, num_heads, ...)
        its tensors: name below the layer, dtype, and shape; of a tensor that an earlier layer
            has, too, that layer
        the same of the modules in it
        its inputs; of a function or a method also its name and its constants

    A trace is that of train mode. Neither devices nor requires_grad count. Weights do not count,
    except for small tensors that no step holds.
    """

    kind: Kind

    def __init__(self, model: nn.Module) -> None:
        self.model = modules.unwrapped(model)
        self.digests = Digests(self.kind)
        self.found: list[Layer] = []
        self._names = modules.names_in(modules.entries(model), "")
        self._tied: dict[int, tuple[str, str]] = {}  # tensor: digest of its layer, name below it

    def add(self, name: str, spec: Any, tensors: Mapping[str, torch.Tensor], inputs: Any) -> str:
        """The digest of a layer; keeps it if it has tensors that no earlier layer has."""
        described = [[below, *self._tensor(each)] for below, each in tensors.items()]
        digest = self.digests.of([spec, described], inputs)
        new = {below: each for below, each in tensors.items() if self._is_new(each)}
        self._tied |= {id(each): (digest, below) for below, each in new.items()}
        if new:
            names = tuple(self._names[id(each)].removeprefix(".") for each in new.values())
            self.found.append(Layer(name, digest, names))
        return digest

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._names and id(tensor) not in self._tied

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if id(tensor) in self._tied:
            return "tied", *self._tied[id(tensor)]
        if id(tensor) in self._names:
            return _form(tensor)
        return "constant", *_form(tensor), _content(tensor)

    def graph(self) -> LayerGraph:
        raise NotImplementedError


class _Modules(_Layers):
    """The modules in their order: each module's input is the one before it."""

    kind: Kind = "modules"

    def graph(self) -> LayerGraph:
        before = ""
        for name, module in self.model.named_modules():
            # The attributes of the whole, such as the number of its layers, would end every prefix.
            spec = name_of(type(module)) if module is self.model else _spec(module)
            before = self.add(name, spec, dict(_tensors(module, recurse=False)), before)
        return LayerGraph("modules", tuple(self.found))


class _Traced(_Layers):
    """The calls that torch.fx finds in forward()."""

    kind: Kind = "traced"

    def graph(self) -> LayerGraph:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        root = copy.deepcopy(self.model, {id(each): each for each in tensors}).train()
        inputs: dict[fx.Node, str] = {}
        with _TRACING:
            nodes = _Tracer().trace(root).nodes
        for node in nodes:
            inputs[node] = self._node(root, node, inputs)
        return LayerGraph("traced", tuple(self.found))

    def _node(self, root: nn.Module, node: fx.Node, known: Mapping[fx.Node, str]) -> str:
        given = [_plain(each, known.__getitem__) for each in (node.args, node.kwargs)]
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            spec = [_spec(each) for each in module.modules()]
            return self.add(str(node.target), spec, dict(_tensors(module)), given)
        if node.op == "get_attr":
            value = self._attribute(root, operator.attrgetter(str(node.target)))
            tensors = {"": value} if isinstance(value, torch.Tensor) else {}
            return self.add(str(node.target), "attribute", tensors, given)
        if node.op == "placeholder":  # the names of inputs are free
            return self.digests.of("input")
        return self.digests.of([node.op, _plain(node.target)], given)

    def _attribute(self, root: nn.Module, get: Callable[[nn.Module], Any]) -> Any:
        """Of the model itself, because forward() may have set that of the copy."""
        try:
            return get(self.model)
        except AttributeError:  # a constant that the trace has put there
            return get(root)


# torch.fx replaces methods of nn.Module for the whole process while it traces. Two traces at once
# would put each other's methods back.
_TRACING = threading.Lock()


class _Tracer(fx.Tracer):
    """Records the calls of the thread that has made it. Those of other threads stay as they are."""

    # Otherwise operations on a buffer, such as counting calls, would be done, and not recorded.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _spec(module: nn.Module) -> list[Any]:
    """The class of a module, and its settings."""
    public = sorted(name for name in vars(module) if name[0] != "_" and name != "training")
    plain = ((name, _plain(vars(module)[name])) for name in public)
    return [name_of(type(module)), {name: each for name, each in plain if each != _OTHER}]


# A value of which nothing is known that stays the same in another process.
_OTHER = ["other"]


def _plain(value: Any, node: Callable[[fx.Node], str] | None = None) -> Any:
    """A value as JSON can hold it. node: gives the digest of a result."""
    if isinstance(value, fx.Node) and node is not None:
        return ["result", node(value)]
    if isinstance(value, _PLAIN):
        return [type(value).__name__, repr(value)]
    if isinstance(value, _SHOWN):
        return [str(value)]
    if isinstance(value, tuple | list):
        return ["items", [_plain(each, node) for each in value]]
    if isinstance(value, slice):
        return ["slice", [_plain(each, node) for each in (value.start, value.stop, value.step)]]
    if isinstance(value, Mapping):
        return ["members", [[str(key), _plain(each, node)] for key, each in value.items()]]
    if callable(value) and hasattr(value, "__qualname__"):
        return ["named", f"{getattr(value, '__module__', None)}.{value.__qualname__}"]
    return _OTHER


def _content(tensor: torch.Tensor) -> str:
    """A digest of the bytes of a small tensor that no step holds, such as a table of angles."""
    if tensor.is_meta or tensor.nbytes > _CONSTANT_BYTES_MAX:
        return ""
    content = flat(tensor.detach().cpu().contiguous(), 0, tensor.nbytes).tolist()
    return hashlib.blake2b(bytes(content), digest_size=8).hexdigest()


# -- the selection ---------------------------------------------------------------------------------
# A model takes over exactly the tensors of the layers of the prefix that both graphs share, each by
# its whole name. All else in the model is kept, and all else in the step is left out: neither is an
# error. State of optimizers, generators and everything else stays as it is: moments belong to the
# gradients of the old model, and a new layer changes these.


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
    return frozenset({"", *chain.from_iterable(map(above, names))})


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
    graph = next((each for each in map(bare, state.values()) if isinstance(each, Graph)), None)
    if graph is not None:
        meant = modules.unwrapped(graph.model)
        found = [(path, part) for path, part in found if modules.unwrapped(part) is meant]
    if not found or (len(found) > 1 and graph is None):
        facts = {"expected": "one model", "got": ", ".join(path for path, _ in found) or "none"}
        hint = 'say which one: add "graph": statehold.lineage.Graph(model) to the state'
        raise UsageError("prefix=True needs to know the model", facts=facts, hint=hint)
    path, model = found[0]
    return path, graph or Graph(model)


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
