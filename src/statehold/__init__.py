"""statehold: asynchronous, crash-safe checkpoints for PyTorch training.

    with statehold.Checkpointer("runs/llama", keep=3) as ckpt:
        state = {"model": model, "optimizer": optimizer, "rng": statehold.Rng()}
        start = ckpt.restore(state) or 0
        for step in range(start, steps):
            train_step()
            ckpt.save(step + 1, state)

    weights = statehold.load("runs/llama", "model")

Importing this package loads neither torch nor the native core; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from statehold import errors as errors
from statehold._version import __version__ as __version__

if TYPE_CHECKING:
    from statehold import lineage as lineage
    from statehold import metrics as metrics
    from statehold import offload as offload
    from statehold import resilience as resilience
    from statehold.checkpoint.cadence.costs import Interval as Interval
    from statehold.checkpoint.checkpointer import Checkpointer as Checkpointer
    from statehold.checkpoint.levels.promoting import LevelStatus as LevelStatus
    from statehold.checkpoint.levels.specs import Directory as Directory
    from statehold.checkpoint.levels.specs import Level as Level
    from statehold.checkpoint.levels.specs import Memory as Memory
    from statehold.checkpoint.levels.specs import ObjectStore as ObjectStore
    from statehold.checkpoint.save.handle import Save as Save
    from statehold.checkpoint.telemetry.watch import SaveStats as SaveStats
    from statehold.errors import StateholdError as StateholdError
    from statehold.format.selection import RestoreReport as RestoreReport
    from statehold.integrations.formats.convert import export_step as export_step
    from statehold.integrations.formats.convert import import_step as import_step
    from statehold.options.io import Io as Io
    from statehold.options.keep import Keep as Keep
    from statehold.reading.copying import CopiedStep as CopiedStep
    from statehold.reading.copying import copy_step as copy_step
    from statehold.reading.load import Run as Run
    from statehold.reading.load import Step as Step
    from statehold.reading.load import TensorInfo as TensorInfo
    from statehold.reading.load import load as load
    from statehold.reading.load import open as open
    from statehold.subscription.subscribe import Subscription as Subscription
    from statehold.subscription.subscribe import Update as Update
    from statehold.subscription.subscribe import subscribe as subscribe
    from statehold.tensors.composed import allow_tensor_class as allow_tensor_class
    from statehold.tensors.kinds.rng import Rng as Rng
    from statehold.tensors.marks import Gated as Gated
    from statehold.tensors.marks import Volatile as Volatile

__all__ = [
    "Checkpointer",
    "CopiedStep",
    "Directory",
    "Gated",
    "Interval",
    "Io",
    "Keep",
    "Level",
    "LevelStatus",
    "Memory",
    "ObjectStore",
    "RestoreReport",
    "Rng",
    "Run",
    "Save",
    "SaveStats",
    "StateholdError",
    "Step",
    "Subscription",
    "TensorInfo",
    "Update",
    "Volatile",
    "__version__",
    "allow_tensor_class",
    "copy_step",
    "errors",
    "export_step",
    "import_step",
    "lineage",
    "load",
    "metrics",
    "offload",
    "open",
    "resilience",
    "subscribe",
]

_HOMES = {
    "Checkpointer": "statehold.checkpoint.checkpointer",
    "CopiedStep": "statehold.reading.copying",
    "Directory": "statehold.checkpoint.levels.specs",
    "Gated": "statehold.tensors.marks",
    "Interval": "statehold.checkpoint.cadence.costs",
    "Io": "statehold.options.io",
    "Keep": "statehold.options.keep",
    "Level": "statehold.checkpoint.levels.specs",
    "LevelStatus": "statehold.checkpoint.levels.promoting",
    "Memory": "statehold.checkpoint.levels.specs",
    "ObjectStore": "statehold.checkpoint.levels.specs",
    "RestoreReport": "statehold.format.selection",
    "Rng": "statehold.tensors.kinds.rng",
    "Run": "statehold.reading.load",
    "Save": "statehold.checkpoint.save.handle",
    "SaveStats": "statehold.checkpoint.telemetry.watch",
    "StateholdError": "statehold.errors",
    "Step": "statehold.reading.load",
    "Subscription": "statehold.subscription.subscribe",
    "TensorInfo": "statehold.reading.load",
    "Update": "statehold.subscription.subscribe",
    "Volatile": "statehold.tensors.marks",
    "allow_tensor_class": "statehold.tensors.composed",
    "copy_step": "statehold.reading.copying",
    "export_step": "statehold.integrations.formats.convert",
    "import_step": "statehold.integrations.formats.convert",
    "lineage": "statehold.lineage",
    "load": "statehold.reading.load",
    "metrics": "statehold.metrics",
    "offload": "statehold.offload",
    "open": "statehold.reading.load",
    "resilience": "statehold.resilience",
    "subscribe": "statehold.subscription.subscribe",
}


if not TYPE_CHECKING:  # otherwise a type checker accepts every name

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            from statehold.options.keywords import meant

            question = meant(name, __all__)
            raise AttributeError(
                f"module 'statehold' has no attribute {name!r}{f'; {question}' if question else ''}"
            )
        module = importlib.import_module(home)
        return module if home == f"statehold.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
