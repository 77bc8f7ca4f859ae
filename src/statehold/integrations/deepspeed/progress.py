"""What an engine counts itself, the scale of its loss, and the shapes of its parameters.

Invariants: a state is taken between two updates only, since a step holds no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statehold.errors import UsageError

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_OF_ZERO = ("overflow", "custom_loss_scaler", "external_loss_scale")


class EngineProgress:
    """shapes: those of the parameters, by name."""

    def __init__(self, engine: Any, shapes: Mapping[str, list[int]]) -> None:
        self._engine = engine
        self._shapes = dict(shapes)

    def state_dict(self) -> dict[str, Any]:
        engine, zero = self._engine, self._engine.optimizer
        every = engine.gradient_accumulation_steps()
        if engine.micro_steps % every:
            raise UsageError(
                "a save in the middle of an accumulation would lose its gradients",
                facts={"micro steps": engine.micro_steps, "accumulation": every},
                hint="save after a step() that updates: engine.micro_steps % "
                "engine.gradient_accumulation_steps() == 0",
            )
        return {
            **{name: getattr(engine, name) for name in _COUNTS},
            "updates": engine.micro_steps // every,
            "zero": {name: _plain(getattr(zero, name, None)) for name in _OF_ZERO},
            "loss_scaler": {
                name: value for name, value in vars(zero.loss_scaler).items() if _is_plain(value)
            },
            "shapes": self._shapes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine, zero = self._engine, self._engine.optimizer
        for name in _COUNTS:
            setattr(engine, name, state[name])
        engine.micro_steps = state["updates"] * engine.gradient_accumulation_steps()
        for name, value in state["zero"].items():
            if hasattr(zero, name):
                setattr(zero, name, value)
        for name, value in state["loss_scaler"].items():
            if name in vars(zero.loss_scaler):
                setattr(zero.loss_scaler, name, value)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    """A number that may be in a tensor; `overflow` of some paths is one."""
    return value.item() if hasattr(value, "item") else value
