"""What a step says, for people and for --json: metrics, tags, and the plain values of its tree.

Invariants: equal states have equal leaves, and different ones do not.

Not here: what save() accepts (checkpoint/save/call), where it is written (format/entries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from statehold.cli.output import plain
from statehold.format.manifest import Commit, Manifest
from statehold.format.trees import Differs, members_of

# -- metrics and tags ------------------------------------------------------------------------------


def said(manifest: Manifest | Commit) -> dict[str, Any]:
    """What a manifest says of its save, in the output of --json."""
    found = {name: getattr(manifest, name) for name in _OF_A_SAVE}
    return {**found, "metrics": dict(manifest.about.metrics), "tags": list(manifest.about.tags)}


_OF_A_SAVE = ("created", "world_size", "version", "writer")


def in_words(metrics: Mapping[str, float], tags: Sequence[str]) -> str:
    """ "val_loss=2.1 #before-lr-drop"; nothing for a step that says nothing."""
    numbers = [f"{plain(name)}={value:g}" for name, value in metrics.items()]
    return " ".join([*numbers, *(f"#{plain(tag)}" for tag in tags)])


METRICS_SHOWN = 8  # as columns; --json and `show` have all
LEAST, MOST = "*", "^"
LEGEND = f"{LEAST} the least of its column, {MOST} the greatest"
_ENOUGH = 3  # steps, for a least and a greatest to mean something

Cell = Callable[[Mapping[str, Any]], str]


def metrics_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[tuple[int, float]]]:
    """By metric, the steps that have it, in the order in which the metrics first occur."""
    names = dict.fromkeys(name for step in steps for name in step.get("metrics", ()))
    return {
        name: [(step["step"], step["metrics"][name]) for step in steps
               if name in step.get("metrics", ())]
        for name in names
    }  # fmt: skip


def columns_of(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, Cell]]:
    """A column for each metric and one for tags, with the cell of a step; none without any."""
    found: list[tuple[str, Cell]] = [
        (plain(name), _cell_of(name, [value for _, value in points]))
        for name, points in list(metrics_of(steps).items())[:METRICS_SHOWN]
    ]
    if any(step.get("tags") for step in steps):
        found.append(("tags", lambda step: in_words({}, step.get("tags", ()))))
    return found


def _cell_of(name: str, values: Sequence[float]) -> Cell:
    known = [value for value in values if isfinite(value)]
    marks = {max(known): MOST, min(known): LEAST} if len(set(known)) >= _ENOUGH else {}

    def cell(step: Mapping[str, Any]) -> str:
        value = step.get("metrics", {}).get(name)
        return "-" if value is None else f"{value:g}{marks.get(value, '')}"

    return cell


# -- the values of a tree --------------------------------------------------------------------------
# The values are flat: the place of each, and its value. This works on encoded nodes. A container
# that is not a plain dict or list has an entry at its own place, and an empty one, too.


_TENSORS = ("$tensor", "$ndarray", "$complex128")
_NOTHING = object()


def leaves_of(node: Any) -> dict[str, Any]:
    """{path: node} of nodes that are neither a container nor a tensor."""
    return dict(_leaves(node, ""))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    left = [(path, node)]
    while left:
        path, node = left.pop()
        inner, entry = _opened(node)
        if entry is not _NOTHING:
            yield path, entry
        left += [(f"{path}.{key}" if path else key, item) for key, item in reversed(inner)]


def _opened(node: Any) -> tuple[list[tuple[str, Any]], Any]:
    """(members, the entry of the node itself)."""
    if isinstance(node, Differs):
        return [], {"ranks differ": str(node)}
    if isinstance(node, list):
        return _items(node), _NOTHING if node else []
    members = members_of(node)
    if members is not None:
        tag = next((key for key in node if key.startswith("$")), None)
        entry = {tag: len(members)} if tag else _NOTHING if members else {}
        return [(key, item) for key, (_, item) in members.items()], entry
    if isinstance(node, dict) and "$tuple" in node:
        return _items(node["$tuple"]), {"$tuple": len(node["$tuple"])}
    is_tensor = isinstance(node, dict) and any(tag in node for tag in _TENSORS)
    return [], _NOTHING if is_tensor else node


def _items(nodes: list[Any]) -> list[tuple[str, Any]]:
    return [(str(i), item) for i, item in enumerate(nodes)]
