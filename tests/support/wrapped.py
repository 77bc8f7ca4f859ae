"""Modules and optimizers behind wrappers as frameworks have them, or with a state of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compiled(module: nn.Module) -> Any:
    """In the wrapper of torch.compile; importing its default backend takes a process seconds."""
    return torch.compile(module, backend="eager")


class Subclassing(torch.optim.Optimizer):
    """A wrapper that is an Optimizer and passes everything on by properties."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class _Passing:
    """A wrapper whose class is made at run time, so that it passes for the class it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer = inner
        self.__class__ = type(f"Passing{type(inner).__name__}", (_Passing, type(inner)), {})

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


Imitating = _Passing


class Holder:
    """A wrapper that is no Optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self) -> None:
        self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class Hooked(torch.optim.AdamW):
    """With hooks that change nothing, and count."""

    @staticmethod
    def on(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        inner.register_state_dict_post_hook(lambda _, state: dict(state))
        inner.register_load_state_dict_post_hook(_count)
        return inner

    @staticmethod
    def loads(optimizer: Any) -> int:
        return int(getattr(optimizer, "loads_seen", 0))


def _count(optimizer: Any) -> None:
    optimizer.loads_seen = Hooked.loads(optimizer) + 1


class Translating(torch.optim.AdamW):
    """With methods of its own that do what torch's do."""

    @staticmethod
    def of(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return Translating(inner.param_groups)

    def state_dict(self) -> Any:
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        _count(self)


class Extra(Subclassing):
    """A wrapper with a scale that is its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.scale = 1.0

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.optimizer

    def state_dict(self) -> Any:
        return super().state_dict() | {"scale": self.scale}

    def load_state_dict(self, state: Any) -> None:
        self.scale = state["scale"]
        super().load_state_dict(state)


class Flat(Subclassing):
    """A wrapper that saves under names which only it understands."""

    def state_dict(self) -> Any:
        return {
            f"{index}/{key}": value
            for index, entries in self.optimizer.state_dict()["state"].items()
            for key, value in entries.items()
        }

    def load_state_dict(self, state: Any) -> None:
        whole = self.optimizer.state_dict()
        whole["state"] = {}
        for name, value in state.items():
            index, key = name.split("/")
            whole["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(whole)


class FlatByName(torch.optim.AdamW):
    """As torchtitan's container: a flat state_dict() with names of parameters in it."""

    def state_dict(self) -> Any:
        groups = self.param_groups
        states = {
            f"state.{index}.weight.{key}": value
            for index, parameter in enumerate(groups[0]["params"])
            for key, value in self.state[parameter].items()
        }
        options = {f"param_groups.{index}.weight.lr": groups[0]["lr"]
                   for index, _ in enumerate(groups[0]["params"])}  # fmt: skip
        return {**states, **options}

    def load_state_dict(self, state: Any) -> None:
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            head = f"state.{index}.weight."
            self.state[parameter] = {
                name.removeprefix(head): value
                for name, value in state.items()
                if name.startswith(head)
            }
        self.param_groups[0]["lr"] = state["param_groups.0.weight.lr"]


class Nested(torch.optim.Optimizer):
    """Keeps its moments in a dict in the state of a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter].setdefault("of", {})
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            mean.add_(parameter.grad)
            parameter.sub_(mean, alpha=0.1)
