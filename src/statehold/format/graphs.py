"""Graphs of models: their layers, how a step records them, and the prefix that two of them share.

kind: how the layers were found. Graphs of different kinds have nothing in common.
    traced    by torch.fx: the inputs of a layer are the layers whose results it takes
    modules   in the order of the modules, each with the module before it as its input
    tensors   from names, dtypes and shapes alone, in their order: all that an older step says

Owns: the digests of layers, the record of a graph in the tree of a step, and the search for the
models of a step.
Invariants: the digest of a layer covers the layer itself and the digests of its inputs. So two
layers of one digest have the same layers before them, and the layers that two graphs have in common
are a prefix of both (the longest common prefix of EvoStore: Underwood, Madhyastha, Burns and
Nicolae, HPDC 2024). In one graph each digest occurs once. A record that cannot be read counts
as none, because it only helps to find a step.
Not here: how a live model gives its layers, and what is restored (tensors/graph).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

from statehold.format.entries import TensorEntry
from statehold.format.saved import SavedStep
from statehold.format.trees import members_of

Kind = Literal["traced", "modules", "tensors"]

# The key of a record, and the version of what its digests cover.
RECORD = "statehold.graph"
VERSION = 1
_DIGEST_BYTES = 16
# Instead of dtype and shape: of a tensor that is made of others, such as a quantized one.
COMPOSED = ("composed", ())
_COMPOSED_TAGS = {"$subclass", "$complex128"}
_OPTIMIZER = {"state", "param_groups"}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with tensors. name: that of its module. tensors: their names in the model."""

    name: str
    digest: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The layers of a model that have tensors, in the order in which they are used."""

    kind: Kind
    layers: tuple[Layer, ...]

    def record(self) -> dict[str, str]:
        """A plain value from which read_record() makes the graph again."""
        layers = [[each.name, each.digest, each.tensors] for each in self.layers]
        return {RECORD: json.dumps([VERSION, self.kind, layers], separators=(",", ":"))}

    @property
    def tensors(self) -> Iterator[str]:
        """The names of all tensors."""
        return (name for layer in self.layers for name in layer.tensors)

    def shared(self, other: LayerGraph) -> list[tuple[Layer, Layer]]:
        """The prefix that both have: pairs of a layer of this graph and one of the other."""
        if self.kind != other.kind:
            return []
        theirs = {each.digest: each for each in other.layers}
        pairs = [(each, theirs[each.digest]) for each in self.layers if each.digest in theirs]
        return [(one, two) for one, two in pairs if len(one.tensors) == len(two.tensors)]


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model of a step. path: its place in the state. graph: what the step records of it, if it
    does. by_tensors: what its tensors say."""

    path: str
    graph: LayerGraph | None
    by_tensors: LayerGraph

    def like(self, kind: Kind) -> LayerGraph:
        """The graph of this kind if the step has it, else that of the tensors."""
        return self.graph if self.graph is not None and self.graph.kind == kind else self.by_tensors


class Digests:
    """Digests of the layers of one graph. A layer that equals an earlier one gets a number, too: of
    two branches that are alike, the first is always the first."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._seen: dict[str, int] = {}

    def of(self, spec: Any, inputs: Any = ()) -> str:
        """The digest of a layer. spec, inputs: what JSON can hold; inputs have digests in them."""
        text = json.dumps([VERSION, self._kind, spec, inputs], sort_keys=True)
        number = self._seen[text] = self._seen.get(text, -1) + 1
        return hashlib.blake2b(f"{number} {text}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def graph_of_tensors(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> LayerGraph:
    """The graph that (name, dtype, shape) of the tensors of a model give, in their order.

    Tensors of one module that follow each other are a layer, and its input is the layer before it.
    """
    digests, before, layers = Digests("tensors"), "", list[Layer]()
    for module, found in groupby(tensors, lambda each: each[0].rpartition(".")[0]):
        group = [(name, dtype, list(shape)) for name, dtype, shape in found]
        before = digests.of(group, before)
        layers.append(Layer(module, before, tuple(name for name, _, _ in group)))
    return LayerGraph("tensors", tuple(layers))


def models_in(saved: SavedStep) -> list[SavedModel]:
    """The models of a step: dicts of tensors outside optimizers, with the graphs it records."""
    graphs = list(_records(saved.state))
    return [
        SavedModel(
            path,
            next((each for each in graphs if entries.keys() >= set(each.tensors)), None),
            graph_of_tensors(_described(entries, saved.tensors)),
        )
        for path, entries in _modules(saved.state, "")
    ]


def read_record(text: Any) -> LayerGraph | None:
    """The graph of a record's text; None if it has none that this version knows."""
    try:
        version, kind, layers = json.loads(text)
        found = tuple(Layer(name, digest, tuple(names)) for name, digest, names in layers)
    except (TypeError, ValueError, RecursionError):
        return None
    texts = [each.name for each in found] + [each.digest for each in found]
    texts += [name for each in found for name in each.tensors]
    if version != VERSION or kind not in get_args(Kind) or not all(map(_is_text, texts)):
        return None
    return LayerGraph(kind, found) if all(each.digest.isascii() for each in found) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _records(node: Any) -> Iterator[LayerGraph]:
    for name, (_, item) in (members_of(node) or {}).items():
        if name == RECORD:
            graph = read_record(item)
            if graph is not None:
                yield graph
        else:
            yield from _records(item)


def _modules(node: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and entries of each dict that has tensors; what lies below one belongs to it."""
    members = {name: item for name, (_, item) in (members_of(node) or {}).items()}
    if members.keys() >= _OPTIMIZER:
        return
    if path and any(map(_is_tensor, members.values())):
        yield path, members
        return
    for name, item in members.items():
        yield from _modules(item, f"{path}.{name}" if path else name)


def _is_tensor(node: Any) -> bool:
    return type(node) is dict and "$tensor" in node


def _described(
    entries: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, str, Sequence[int]]]:
    for name, node in entries.items():
        if not _is_tensor(node):
            if type(node) is dict and node.keys() & _COMPOSED_TAGS:
                yield name, *COMPOSED
        elif node["$tensor"] in tensors:
            tensor = tensors[node["$tensor"]]
            yield name, tensor.dtype, tensor.shape
