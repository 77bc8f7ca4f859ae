"""What a state is made of: the modules and optimizers in it, and objects that give their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from statehold.tensors import optimizers
from statehold.tensors.marks import Mark

_PARTLESS = {bool, int, float, str, bytes, type(None), torch.Tensor, nn.Parameter}


def parts(state: Any) -> Iterator[tuple[str, Any]]:
    """(path, object) of the modules and optimizers in dicts, lists and tuples, in their order; of a
    wrapper around an optimizer the optimizer.

    Visits a container once, however often and however deep it is held: what is too deep, or holds
    itself, is for `values` to refuse.
    """
    seen: set[int] = set()
    left = [("", state)]
    while left:
        path, value = left.pop()
        if isinstance(value, nn.Module):
            yield path, value
        elif (optimizer := optimizers.behind(value)) is not None:
            yield path, optimizer
        elif isinstance(value, Mark | Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mark):
                left.append((path, value.value))
                continue
            members = value.items() if isinstance(value, Mapping) else enumerate(value)
            left += [
                (f"{path}.{key}" if path else str(key), item)
                for key, item in members
                if type(item) not in _PARTLESS  # long lists of numbers should cost little
            ][::-1]


def is_stateful(value: Any) -> bool:
    """Whether `value` can give and take its state itself. A class is not an object with state."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )
