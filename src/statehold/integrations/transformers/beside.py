"""Models that a trainer or one of its callbacks holds beside the one that trains: a reference, a
teacher, an average.

A step holds such a model once it has changed since the training began. Until then it is what the
script makes, and a large one that stays as it is costs a step nothing.

Invariants: all ranks decide alike. A change is seen by a sample of every tensor, because version
counters miss `tensor.data.mul_()`, by which averages are often made.
Not here: models that a subclass names (StateholdTrainer.extra_state), which are always saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from statehold.integrations.trained import persistent_buffers

log = logging.getLogger("statehold")

SAMPLED = 64  # elements of a tensor


class Beside:
    """The models that `holders` hold beside `model`, as the training begins."""

    def __init__(self, holders: Iterable[Any], model: nn.Module, ranks: int) -> None:
        self._ranks = ranks
        self._changed: set[str] = set()
        self.models = dict(_held(holders, model))
        self._before = {name: _sample(each) for name, each in self.models.items()}

    def changed(self, known: Iterable[str] = ()) -> dict[str, nn.Module]:
        """The models that have changed, on any rank; all ranks call this. known: more of them."""
        others = self.models.keys() - self._changed
        new = [
            name for name in others if not _equal(_sample(self.models[name]), self._before[name])
        ]
        if self._ranks > 1:
            new = gather_object(new)
        for name in sorted(set(new)):
            log.info("%s has changed since the training began: steps hold it, too", name)
        self._changed.update(new, known)
        return {name: each for name, each in self.models.items() if name in self._changed}


def _held(holders: Iterable[Any], model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each model once, by its name: ATTRIBUTE of the first holder, CLASS-ATTRIBUTE of others."""
    seen = set(map(id, _tensors(model)))
    for i, holder in enumerate(holders):
        for attribute, value in list(getattr(holder, "__dict__", {}).items()):
            name = f"{type(holder).__name__}-{attribute}" if i else attribute
            for place, each in _modules(value):
                tensors = set(map(id, _tensors(each)))
                if tensors - seen:  # else it is the model, or a part of it
                    yield f"{name}{place}", each
                seen |= tensors


def _modules(value: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield "", value
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"-{key}", each) for key, each in items if isinstance(each, nn.Module))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *persistent_buffers(module).values()]


def _sample(module: nn.Module) -> list[torch.Tensor]:
    """Some elements of every tensor, on its device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in _tensors(module):
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.numel() and local.device.type != "meta":
            every = max(local.numel() // SAMPLED, 1)
            found.setdefault(local.device, []).append(local.reshape(-1)[::every].float())
    return [torch.cat(parts).nan_to_num() for parts in found.values()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
