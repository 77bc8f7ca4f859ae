"""Runs that descend from runs: which step a run began from, what runs share, and which step of many
is the nearest relative of a model.

    Graph      the graph of a model, to be put into a state
    Catalog    what the runs below a directory have, in a file that can be made again at any time
    nearest    the step that shares the longest prefix with a model
    Relative   what nearest() finds

Importing this package loads no torch; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statehold.lineage.catalog import Catalog as Catalog
    from statehold.lineage.relatives import Relative as Relative
    from statehold.lineage.relatives import nearest as nearest
    from statehold.tensors.graph import Graph as Graph

__all__ = ["Catalog", "Graph", "Relative", "nearest"]

_HOMES = {
    "Catalog": "statehold.lineage.catalog",
    "Graph": "statehold.tensors.graph",
    "Relative": "statehold.lineage.relatives",
    "nearest": "statehold.lineage.relatives",
}


if not TYPE_CHECKING:  # otherwise a type checker accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'statehold.lineage' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
