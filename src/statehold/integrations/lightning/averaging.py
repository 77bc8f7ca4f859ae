"""Callbacks of Lightning that average weights, and change those of the module by themselves.

They write in hooks, and not by an optimizer, so no save would notice them: a step could have the
weights of two moments. Here each of these changes waits for the copies of saves under way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import callbacks

# What changes the weights of the module, by the name of the callback.
_CHANGES = {
    "StochasticWeightAveraging": ("transfer_weights",),
    "WeightAveraging": ("_swap_models", "_copy_average_to_current"),
}


def wait_for_copies(trainer: Any, gate: Callable[[], None]) -> None:
    """Have the callbacks of a Trainer call `gate` before they change weights."""
    for kind, names in _CHANGES.items():
        averaging = getattr(callbacks, kind, ())  # an older Lightning has fewer
        for each in trainer.callbacks:
            if isinstance(each, averaging):
                for name in names:
                    _guard(each, name, gate)


def _guard(callback: Any, name: str, gate: Callable[[], None]) -> None:
    vars(callback).pop(name, None)  # of an earlier Trainer
    setattr(callback, name, partial(_after, gate, getattr(callback, name)))


def _after(gate: Callable[[], None], change: Callable[..., None], *args: Any) -> None:
    gate()
    change(*args)
