"""Gradient scalers (torch.amp.GradScaler): their state without a wait for the device.

state_dict() of a scaler gives numbers that lie on a device, and waits for the device twice. So the
numbers are cloned there, in the order of the device's work, and read on the stage thread.
Invariants: what a step has is what state_dict() gives. The nodes of such numbers hold what the
scaler began with until they are filled in, before the save is staged. A scaler that is disabled or
was not used yet has no numbers on a device, and a subclass may give its state in its own way: both
are asked for state_dict().
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from statehold.encoding import values
from statehold.tensors.storable import is_external

_ON_DEVICE = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
_OF_THE_STATE = ("state_dict", "get_scale", "_get_scale_async", "_get_growth_tracker")


@dataclass(slots=True)
class Number:
    """A number in the tree of a step whose value lies on a device, in a tensor of its own."""

    tensor: torch.Tensor
    node: dict[str, Any]
    key: str

    def fill_in(self, value: float) -> None:
        """Put the value in its place. The place is there already: others may read the tree."""
        self.node[self.key] = values.encode(value, self.key)


def waits_for_device(value: Any) -> bool:
    """Whether `value` is a scaler whose state_dict() waits for a device."""
    if not isinstance(value, GradScaler) or not value.is_enabled():
        return False
    kind = type(value)
    if any(getattr(kind, name) is not getattr(GradScaler, name, None) for name in _OF_THE_STATE):
        return False
    held = [getattr(value, name, None) for name in _ON_DEVICE.values()]
    return all(isinstance(each, torch.Tensor) and is_external(each) for each in held)


def known(scaler: GradScaler) -> dict[str, Any]:
    """Its state_dict() without what lies on the device."""
    alike = object.__new__(type(scaler))
    vars(alike).update(vars(scaler), **dict.fromkeys(_ON_DEVICE.values()))
    return alike.state_dict()


def numbers(scaler: GradScaler, node: dict[str, Any]) -> list[Number]:
    """What is to be filled into the node of `known`."""
    return [
        Number(getattr(scaler, name).clone(), node, key)
        for key, name in _ON_DEVICE.items()
        if key in node
    ]
