"""Values of a step that are built anew: what the leaves of its tree mean.

Not here: memory for tensors, and their bytes (the caller's `tensor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from statehold.tensors import foreign, subclasses


def value_of(tag: str, payload: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value of a leaf, for values.decode. `tensor` makes the tensor of a name."""
    if tag == "$tensor":
        return tensor(payload)
    if tag == "$ndarray":
        return tensor(payload).numpy()
    if tag == "$complex128":
        is_tensor = isinstance(payload, torch.Tensor)
        return torch.view_as_complex(payload) if is_tensor else payload.view("c16")[..., 0]
    if tag == "$subclass":
        return subclasses.build_saved(payload)
    return foreign.value_of(tag, payload)
