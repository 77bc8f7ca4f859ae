"""Runs that descend from runs: which step a run began from, what runs share, and which step of many
is the nearest relative of a model.

    Graph      the graph of a model, to be put into a state
    Catalog    what the runs below a directory have, in a file that can be made again at any time
    nearest    the step that shares the longest prefix with a model
    Relative   what nearest() finds

Importing this package loads no torch; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statehold._version import lazily

if TYPE_CHECKING:
    from statehold.lineage.catalog import Catalog as Catalog
    from statehold.lineage.relatives import Relative as Relative
    from statehold.lineage.relatives import nearest as nearest
    from statehold.tensors.graph import Graph as Graph
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "statehold.lineage.catalog": "Catalog",
            "statehold.lineage.relatives": "Relative nearest",
            "statehold.tensors.graph": "Graph",
        },
    )
