"""Runs that descend from runs: which step a run began from, and what runs share.

    Graph      the graph of a model, to be put into a state

Importing this package loads no torch; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statehold.tensors.graph import Graph as Graph

__all__ = ["Graph"]

_HOMES = {
    "Graph": "statehold.tensors.graph",
}


if not TYPE_CHECKING:  # otherwise a type checker accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'statehold.lineage' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
