"""The flat names of torch.distributed.checkpoint <-> the tree of a step.

Owns: the nesting of leaves by the paths that a planner recorded, and the flattening of a tree into
the names that the planners of torch (2.4 and later) give to the same state.
Invariants: `leaves(nest(x))` has the names of x. A mapping is always entered, a list only if it
holds mappings or tensors, a tuple never. Keys are joined with dots.
Not here: tensors and values themselves; this module sees the nodes of `values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from statehold.encoding import values
from statehold.integrations.formats.streamed import nested
from statehold.tensors import nodes

Path = tuple[str | int, ...]
_MAPPINGS = ("$dict", "$ordered", "$counter")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or a value at `path` in the tree."""

    path: Path
    node: Any

    @property
    def tensor(self) -> str | None:
        """The name of the tensor at this leaf, or None for a value."""
        return tensor_of(self.node)


def tensor_of(node: Any) -> str | None:
    """The name in a $tensor node; None for any other."""
    return node.get("$tensor") if type(node) is dict else None


def name_of(path: Path) -> str:
    return ".".join(map(str, path))


def nest(nodes: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """The tree with each node at its path; flat without paths, or if paths collide."""
    items = [(paths.get(name, (name,)), node) for name, node in nodes.items()]
    return nested(items, values.mapping_of) or values.mapping_of(dict(nodes))


def leaves(tree: Any) -> dict[str, Leaf]:
    """Every leaf by its name, in the order of the tree."""
    return {
        name_of(path): Leaf(path, node) for path, node in _below((), tree) if _members(node) is None
    }


def containers(tree: Any) -> dict[str, Any]:
    """Every mapping and list that `leaves` enters, by its name."""
    return {name_of(path): node for path, node in _below((), tree) if _members(node) is not None}


def _below(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    for key, item in _members(node) or ():
        yield (*path, key), item
        yield from _below((*path, key), item)


def _members(node: Any) -> list[tuple[str | int, Any]] | None:
    """The children that a planner would enter below a node, or None for a leaf."""
    if type(node) is list:
        return list(enumerate(node)) if any(map(_is_entered, node)) else None
    if type(node) is not dict:
        return None
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return list(node.items())
    if tag in _MAPPINGS:
        return [(_key(nodes.key_of(key)), item) for key, item in node[tag]]
    return None


def _key(key: Any) -> str:
    return key if type(key) is str else str(key)


def _is_entered(item: Any) -> bool:
    """Whether a list is entered because of this item."""
    return tensor_of(item) is not None or _members(item) is not None
