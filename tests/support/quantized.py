"""Tensor subclasses as libraries of quantization have them: several tensors that show one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from statehold.tensors.storable import local_of


def _wrapper(cls: type, shape: torch.Size) -> Any:
    """A tensor that holds no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)


class Made(torch.Tensor):
    """Codes and a scale for each row; shows their products. `levels` is the same for all rows."""

    names = ("codes", "scale", "levels")

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, context: Any
    ) -> Any:
        return _wrapper(cls, codes.shape)

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, context: Any
    ) -> None:
        self.codes, self.scale, self.levels = codes, scale, levels
        self.context = context

    def __tensor_flatten__(self) -> Any:
        return list(self.names), self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.names), context)

    def shown(self) -> torch.Tensor:
        return self.codes.float() * self.scale[:, None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *others = args
        aten = torch.ops.aten
        if func is aten.copy_.default:
            source = others[0]
            if isinstance(source, Made):
                first.codes.copy_(source.codes)
                first.scale.copy_(source.scale)
            else:
                first.scale.copy_(source.abs().amax(1) / 127)
                first.codes.copy_((source / first.scale[:, None].clamp(1e-9)).round())
            return first
        if func in (aten.detach.default, aten.view.default, aten.alias.default):
            return cls(first.codes, first.scale, first.levels, first.context)
        if func in (aten.clone.default, aten._to_copy.default):
            parts = (each.clone() for each in (first.codes, first.scale, first.levels))
            return cls(*parts, first.context)
        plain = [each.shown() if isinstance(each, Made) else each for each in args]
        return func(*plain, **(kwargs or {}))

    @classmethod
    def of(cls, value: torch.Tensor, context: Any = ("rows", 1.5, torch.float32)) -> Any:
        codes = torch.zeros(value.shape, dtype=torch.int8)
        made = cls(codes, torch.zeros(len(value)), torch.arange(4.0), context)
        return made.copy_(value.detach())


class Other(Made):
    """The same under another name; nobody has allowed it."""


class Copying(Made):
    """Copies what it is given."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*(each.clone() for each in parts[:3]), parts[3])


class Around(Made):
    """Holds one that holds others."""

    names = ("inner",)

    @staticmethod
    def __new__(cls, inner: Any, context: Any) -> Any:
        return _wrapper(cls, inner.shape)

    def __init__(self, inner: Any, context: Any) -> None:
        self.inner, self.context = inner, context

    def shown(self) -> torch.Tensor:
        return self.inner.shown()


class Small(torch.optim.Optimizer):
    """Momentum whose buffer is quantized, made at the first step."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, local = self.state[parameter], local_of(parameter)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["mean"] = _like(parameter, Made.of(torch.zeros_like(local)))
                mean = local_of(state["mean"])
                mean.copy_(mean.shown() * 0.5 + local_of(parameter.grad))
                local.sub_(mean.shown(), alpha=group["lr"])
                state["step"] += 1


def _like(parameter: Any, local: Any) -> Any:
    if not hasattr(parameter, "_local_tensor"):
        return local
    return type(parameter.detach()).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def layer(rows: int = 6, columns: int = 5) -> nn.Module:
    """A module with a quantized weight and a plain bias."""
    module = nn.Module()
    module.weight = nn.Parameter(Made.of(torch.randn(rows, columns)), requires_grad=False)
    module.bias = nn.Parameter(torch.randn(rows))
    return module
