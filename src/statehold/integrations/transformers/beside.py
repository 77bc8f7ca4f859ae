"""Models that a trainer or one of its callbacks holds beside the one that trains: a reference, a
teacher, an average. They may be modules or bare tensors, and lie in a container or in an object.

A step holds what has changed since the training began. Until then it is what the script makes, and
a large one that stays as it is costs a step nothing.

Invariants: all ranks decide alike. A change is seen by a sample of every tensor, because version
counters miss `tensor.data.mul_()`, by which averages are often made. A bare tensor counts only if
it has a public name, and keeps its shape: others are results of a step, and may be large. What is
made later could not be restored when the training begins again, so a warning names its modules.
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
from statehold.tensors.marks import Volatile

log = logging.getLogger("statehold")

SAMPLED = 64  # elements of a tensor
CONTAINED_MAX = 4096  # more are data
_OF_OTHERS = ("builtins", "torch", "transformers", "accelerate")  # their objects hold no models

Held = nn.Module | torch.Tensor


class Beside:
    """The models that `holders` hold beside `model`, as the training begins."""

    def __init__(self, holders: Iterable[Any], model: nn.Module, ranks: int) -> None:
        self._holders = list(holders)
        self._model = model
        self._ranks = ranks
        self._changed: set[str] = set()
        self._late: set[str] = set()
        self.models = dict(_held(self._holders, model))
        self._shapes = {name: getattr(each, "shape", None) for name, each in self.models.items()}
        self._before = {name: _sample(each) for name, each in self.models.items()}

    def changed(self, known: Iterable[str] = ()) -> dict[str, Volatile[Held]]:
        """The models that have changed, on any rank; all ranks call this. known: more of them.

        Nobody knows when they change next, so they are copied before save() returns.
        """
        now = dict(_held(self._holders, self._model))
        self._warn_of(now)
        self.models = {name: each for name, each in now.items() if self._is_same(name, each)}
        others = self.models.keys() - self._changed
        new = [
            name for name in others if not _equal(_sample(self.models[name]), self._before[name])
        ]
        if self._ranks > 1:
            new = gather_object(new)
        if found := ", ".join(sorted(set(new))):
            log.info("changed since the training began, so steps hold it, too: %s", found)
        self._changed.update(new, known)
        models = self.models.items()
        return {name: Volatile(each) for name, each in models if name in self._changed}

    def _is_same(self, name: str, now: Held) -> bool:
        """Whether the training began with it: with a tensor of this shape, or with a module."""
        shape = getattr(now, "shape", None)
        return name in self._shapes and self._shapes[name] == shape

    def _warn_of(self, now: dict[str, Held]) -> None:
        modules = {name for name, each in now.items() if isinstance(each, nn.Module)}
        if late := sorted(modules - self._shapes.keys() - self._late):
            self._late.update(late)
            log.warning(
                "made after the training began, so no step holds it: %s. Make it before, or in "
                "on_train_begin() of a callback",
                ", ".join(late),
            )


def _held(holders: Iterable[Any], model: nn.Module) -> Iterator[tuple[str, Held]]:
    """Each model once, by its name: ATTRIBUTE of the first holder, CLASS-ATTRIBUTE of others."""
    seen = set(map(id, _tensors(model)))
    for i, holder in enumerate(holders):
        for attribute, each in _parts(holder):
            tensors = set(map(id, _tensors(each)))
            if tensors - seen:  # else it is the model, or a part of it
                yield f"{type(holder).__name__}-{attribute}" if i else attribute, each
            seen |= tensors


def _parts(holder: Any, depth: int = 2) -> Iterator[tuple[str, Held]]:
    """What the attributes of an object are or contain, and those of an object of the script."""
    for attribute, value in list(getattr(holder, "__dict__", {}).items()):
        items = [("", value)]
        if isinstance(value, list | tuple | dict) and len(value) <= CONTAINED_MAX:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            items = [(f"-{key}", each) for key, each in pairs]
        elif depth > 1 and type(value).__module__.partition(".")[0] not in _OF_OTHERS:
            items = [(f"-{name}", each) for name, each in _parts(value, depth - 1)]
        for place, each in items:
            is_bare = isinstance(each, torch.Tensor) and each.layout is torch.strided
            if isinstance(each, nn.Module) or (is_bare and not attribute.startswith("_")):
                yield f"{attribute}{place}", each


def _tensors(held: Held) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    return [*held.parameters(), *persistent_buffers(held).values()]


def _sample(held: Held) -> list[torch.Tensor]:
    """Some elements of every tensor, on its device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in _tensors(held):
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.numel() and local.device.type != "meta":
            every = max(local.numel() // SAMPLED, 1)
            found.setdefault(local.device, []).append(local.reshape(-1)[::every].float())
    return [torch.cat(parts).nan_to_num() for parts in found.values()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
