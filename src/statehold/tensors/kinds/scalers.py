"""Gradient scalers (torch.amp.GradScaler): their state without a wait for the device.

state_dict() of a scaler gives numbers that lie on a device, and waits for the device twice. So the
numbers are cloned there, in the order of the device's work, and read on the stage thread.
Invariants: what a step has is what state_dict() gives. The nodes of such numbers hold what the
scaler began with until they are filled in, before the save is staged. A scaler that is disabled or
was not used yet has no numbers on a device, and a subclass may give its state in its own way: both
are asked for state_dict().
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from statehold.tensors.captured import Capturing, Number
from statehold.tensors.kinds.objects import match as match
from statehold.tensors.kinds.objects import names as names
from statehold.tensors.storable import is_external

_ON_DEVICE = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
_OF_THE_STATE = ("state_dict", "get_scale", "_get_scale_async", "_get_growth_tracker")


def of(value: Any) -> GradScaler | None:
    """A scaler whose state_dict() waits for a device."""
    if not isinstance(value, GradScaler) or not value.is_enabled():
        return None
    kind = type(value)
    if any(getattr(kind, name) is not getattr(GradScaler, name, None) for name in _OF_THE_STATE):
        return None
    held = [getattr(value, name, None) for name in _ON_DEVICE.values()]
    waits = all(isinstance(each, torch.Tensor) and is_external(each) for each in held)
    return value if waits else None


def capture(to: Capturing, scaler: GradScaler, path: str) -> Any:
    to.values.check_depth(scaler, path, 2)  # an infinity that is filled in is a node
    alike = object.__new__(type(scaler))
    vars(alike).update(vars(scaler), **dict.fromkeys(_ON_DEVICE.values()))
    node = to.encoded(alike.state_dict(), path)
    to.numbers += [
        Number(getattr(scaler, name).clone(), node, key)
        for key, name in _ON_DEVICE.items()
        if key in node
    ]
    return node
