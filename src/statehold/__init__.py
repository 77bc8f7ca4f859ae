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

from typing import TYPE_CHECKING

from statehold import errors as errors
from statehold._version import __version__ as __version__
from statehold._version import lazily

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
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "statehold._version": "__version__",
            "statehold.checkpoint.cadence.costs": "Interval",
            "statehold.checkpoint.checkpointer": "Checkpointer",
            "statehold.checkpoint.levels.promoting": "LevelStatus",
            "statehold.checkpoint.levels.specs": "Directory Level Memory ObjectStore",
            "statehold.checkpoint.save.handle": "Save",
            "statehold.checkpoint.telemetry.watch": "SaveStats",
            "statehold.errors": "StateholdError errors",
            "statehold.format.selection": "RestoreReport",
            "statehold.integrations.formats.convert": "export_step import_step",
            "statehold.lineage": "",
            "statehold.metrics": "",
            "statehold.offload": "",
            "statehold.options.io": "Io",
            "statehold.options.keep": "Keep",
            "statehold.reading.copying": "CopiedStep copy_step",
            "statehold.reading.load": "Run Step TensorInfo load open",
            "statehold.resilience": "",
            "statehold.subscription.subscribe": "Subscription Update subscribe",
            "statehold.tensors.composed": "allow_tensor_class",
            "statehold.tensors.kinds.rng": "Rng",
            "statehold.tensors.marks": "Gated Volatile",
        },
    )
