"""statehold: asynchronous, crash-safe checkpoints for PyTorch training.

    with statehold.Checkpointer("runs/llama", keep=3) as ckpt:
        state = {"model": model, "optimizer": optimizer, "rng": statehold.Rng()}
        start = ckpt.restore(state) or 0
        for step in range(start, steps):
            train_step(...)
            ckpt.save(step + 1, state)

Importing this package loads neither torch nor the native core; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from statehold import errors as errors
from statehold._version import __version__ as __version__

if TYPE_CHECKING:
    from statehold import metrics as metrics
    from statehold.checkpointer import Checkpointer as Checkpointer
    from statehold.errors import StateholdError as StateholdError
    from statehold.levels.specs import Directory as Directory
    from statehold.levels.specs import Memory as Memory
    from statehold.levels.specs import ObjectStore as ObjectStore
    from statehold.save import Save as Save
    from statehold.save import SaveStats as SaveStats
    from statehold.state.marks import Gated as Gated
    from statehold.state.marks import Volatile as Volatile
    from statehold.state.rng import Rng as Rng
    from statehold.state.subclasses import allow_tensor_class as allow_tensor_class

__all__ = [
    "Checkpointer",
    "Directory",
    "Gated",
    "Memory",
    "ObjectStore",
    "Rng",
    "Save",
    "SaveStats",
    "StateholdError",
    "Volatile",
    "__version__",
    "allow_tensor_class",
    "errors",
    "metrics",
]

_HOMES = {
    "Checkpointer": "statehold.checkpointer",
    "Directory": "statehold.levels.specs",
    "Gated": "statehold.state.marks",
    "Memory": "statehold.levels.specs",
    "ObjectStore": "statehold.levels.specs",
    "Rng": "statehold.state.rng",
    "Save": "statehold.save",
    "SaveStats": "statehold.save",
    "StateholdError": "statehold.errors",
    "Volatile": "statehold.state.marks",
    "allow_tensor_class": "statehold.state.subclasses",
    "metrics": "statehold.metrics",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'statehold' has no attribute {name!r}")
    module = importlib.import_module(home)
    return module if home == f"statehold.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
