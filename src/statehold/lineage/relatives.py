"""nearest(): the step of many runs that shares the longest prefix of layers with a model.

Owns: the order of the candidates, and the proof of the first one.
Invariants: the catalogue proposes, and the manifest of the step decides. A proposal that the
manifest does not confirm has the catalogue made again, and the search begins again.
Not here: prefixes (format/graphs), the catalogue (catalog), loading the prefix
(Checkpointer.restore).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statehold.errors import StateholdError, StepNotFoundError
from statehold.format.entries import sha256
from statehold.format.graphs import models_in
from statehold.format.saved import open_step
from statehold.lineage.catalog import Candidate, Catalog
from statehold.process.warn import logger
from statehold.reading.places import file_system
from statehold.steps.shelf import DirectoryShelf
from statehold.tensors.graph import Graph, shared_with

if TYPE_CHECKING:
    from torch import nn

# Steps that other jobs retire as fast as they are found must not keep a job for ever.
LOOKS_MAX = 10


@dataclass(frozen=True, slots=True)
class Relative:
    """A step that shares layers with a model.

    Attributes:
        run: the run directory.
        step: the number of the step.
        layers: how many layers with tensors it shares with the model.
        total: how many layers with tensors the model has.
        metrics: what was saved with the step.
    """

    run: str
    step: int
    layers: int
    total: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The name of the step, for restore(source=..., prefix=True)."""
        return f"{self.run}@{self.step}"

    def __str__(self) -> str:
        return f"{self.source}: {self.layers} of {self.total} layers"


def nearest(
    model: nn.Module | Graph,
    catalog: Catalog | str | os.PathLike[str],
    *,
    metric: str | None = None,
    lowest: bool = False,
) -> Relative | None:
    """The step that shares the longest prefix with `model`; None if no step shares a layer.

    Brings the catalogue up to date first. The longest prefix is that with the most layers that have
    tensors. Of several such steps the best one is taken, and of equal ones the newest.

    Args:
        model: the new model, or its graph.
        catalog: a Catalog, or the directory that has the runs. A directory that does not exist has
            no runs, and the log says so.
        metric: the name of the metric that says which step is better. A step without it, or with
            NaN or infinity, is worse than all others. None: the newest step.
        lowest: whether a lower value of the metric is better.

    Raises:
        UsageError: `model` is not a model, or the file of the catalogue is no catalogue.
        StorageError: the catalogue cannot be written.
        StepNotFoundError: other jobs delete the steps as fast as they are found.
    """
    graph = model if isinstance(model, Graph) else Graph(model)
    if not isinstance(catalog, Catalog):
        if not os.path.isdir(catalog):  # the first run of all makes it when it saves
            logger.warning("no directory %s yet, so no run is a relative", os.fspath(catalog))
            return None
        catalog = Catalog(catalog)
    digests = [each.digest for of in (graph.layers, graph.by_tensors) for each in of.layers]
    catalog.scan()
    for look in range(LOOKS_MAX):
        found = catalog.sharing(graph.kind, digests)
        for best in sorted(found, key=lambda each: _rank(each, metric, lowest), reverse=True):
            shares = _layers_of(best, graph)
            if shares == best.layers:
                total = len(graph.layers.layers)
                return Relative(best.run, best.step, best.layers, total, best.metrics)
            if shares is None or not look:
                break  # later the catalogue is new, so what is wrong is the record of the step
        else:
            return None
        logger.warning(
            "the catalogue %s is stale: step %d of %s has changed or is gone; making it again",
            catalog.file, best.step, best.run,
        )  # fmt: skip
        catalog.rebuild()
    facts = {"directory": catalog.directory}
    raise StepNotFoundError("steps are deleted as fast as they are found", facts=facts)


def _rank(each: Candidate, metric: str | None, lowest: bool) -> tuple[int, float, str, int, str]:
    """What is greatest for the best candidate."""
    value = each.metrics.get(metric, math.nan) if metric is not None else math.nan
    value = (-value if lowest else value) if math.isfinite(value) else -math.inf
    return each.layers, value, each.created, each.step, each.run


def _layers_of(each: Candidate, graph: Graph) -> int | None:
    """How many layers the step shares; None if it has another manifest, or is gone."""
    shares = None
    with contextlib.closing(file_system()) as fs, contextlib.suppress(StateholdError):
        shelf = DirectoryShelf(fs, each.run)
        if sha256(shelf.manifest(each.step)) == each.manifest:
            shares = 0  # of a record that cannot be read
            step = open_step(fs.read_file, shelf.where(each.step), each.step, 0, 0)
            shares = max((len(shared_with(graph, model)) for model in models_in(step)), default=0)
    return shares
