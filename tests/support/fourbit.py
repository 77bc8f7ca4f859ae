"""A look-alike of bitsandbytes' 4-bit layer: the same attributes, methods and state_dict() entries.

Values are kept as 15 levels of blocks of 4; with `compress_statistics` the scales as bytes.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import torch
from torch import nn

NAME = "bitsandbytes.nn.modules"
_BYTES = torch.arange(256.0) / 255


class QuantState:
    def __init__(self, absmax: Any, **members: Any) -> None:
        self.absmax = absmax
        for name in ("shape", "code", "blocksize", "quant_type", "dtype", "offset", "state2"):
            setattr(self, name, members.get(name))

    def packed(self) -> dict[str, torch.Tensor]:
        found = {"absmax": self.absmax, "quant_map": self.code}
        rest = {"blocksize": self.blocksize, "quant_type": self.quant_type}
        if self.state2 is not None:
            found |= {"nested_absmax": self.state2.absmax}
            found |= {"nested_quant_map": self.state2.code.clone()}
            rest |= {"nested_offset": self.offset.item()}
        blob = torch.tensor(list(json.dumps(rest).encode()), dtype=torch.uint8)
        return found | {f"quant_state.bitsandbytes__{self.quant_type}": blob}


class Params4bit(nn.Parameter):
    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = False,
        blocksize: int = 4,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: Any = None,
    ) -> Any:
        made: Any = data.detach().as_subclass(cls).requires_grad_(requires_grad)
        made.blocksize, made.compress_statistics = blocksize, compress_statistics
        made.quant_type, made.quant_storage, made.module = quant_type, quant_storage, module
        made.quant_state, made.bnb_quantized = None, False
        return made

    @classmethod
    def from_prequantized(
        cls, data: torch.Tensor, stats: Any, requires_grad: bool, device: Any
    ) -> Any:
        made = cls(data.to(device), requires_grad)
        made.quant_state, made.bnb_quantized = _state_from(dict(stats)), True
        return made

    def to(self, device: Any = None, *_: Any, **__: Any) -> Any:
        """As a module calls it."""
        if device is None or torch.device(device).type == "meta" or self.bnb_quantized:
            raise NotImplementedError
        blocks = self.data.reshape(-1, self.blocksize)
        absmax = blocks.abs().amax(1)
        self.quant_state = QuantState(
            absmax, shape=self.shape, code=torch.linspace(-1, 1, 15), blocksize=self.blocksize,
            quant_type=self.quant_type, dtype=self.dtype,
        )  # fmt: skip
        levels = ((blocks / absmax[:, None]).mul(7).round() + 7).to(torch.uint8).reshape(-1)
        self.data = (levels[::2] * 16 + levels[1::2])[:, None]
        if self.compress_statistics:
            _compress(self.quant_state)
        self.module.quant_state, self.bnb_quantized = self.quant_state, True
        return self


def _compress(state: QuantState) -> None:
    state.offset, scales = state.absmax.mean(), state.absmax - state.absmax.mean()
    largest = scales.abs().max()[None]
    state.state2 = QuantState(largest, code=_BYTES.clone(), blocksize=256, dtype=torch.float32)
    state.absmax = ((scales / largest + 1) * 127).to(torch.uint8)


def _state_from(stats: dict[str, Any]) -> QuantState:
    dtype, state2, offset = getattr(torch, stats["dtype"]), None, None
    if "nested_absmax" in stats:
        state2 = QuantState(
            stats["nested_absmax"], code=stats["nested_quant_map"],
            blocksize=stats["nested_blocksize"], dtype=getattr(torch, stats["nested_dtype"]),
        )  # fmt: skip
        offset = torch.tensor(float(stats["nested_offset"]))
    members = {name: stats[name] for name in ("shape", "blocksize", "quant_type")}
    code = stats["quant_map"]
    return QuantState(
        stats["absmax"], code=code, dtype=dtype, offset=offset, state2=state2, **members
    )


class Linear4bit(nn.Linear):
    def __init__(self, rows: int, columns: int, bias: bool = True, **options: Any) -> None:
        super().__init__(rows, columns, bias, options.pop("device", None))
        options.pop("compute_dtype", None)
        self.weight: Any = Params4bit(self.weight.data, module=self, **options)
        self.quant_state: Any = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        state = getattr(self.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            state.absmax.zero_()  # there it is rounded
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if state is not None:
            for name, value in state.packed().items():
                destination[f"{prefix}weight.{name}"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, packed = self.weight.quant_state, self.weight.detach().reshape(-1)
        values = state.code[torch.stack([packed // 16, packed % 16], 1).reshape(-1).long()]
        scales = state.absmax
        if state.state2 is not None:
            scales = state.state2.code[scales.long()] * 255 / 127 - 1
            scales = scales * state.state2.absmax + state.offset
        weight = (values.reshape(-1, state.blocksize) * scales[:, None]).reshape(state.shape)
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)


for _each in (Params4bit, Linear4bit):
    _each.__module__ = NAME


def library() -> ModuleType:
    """A module to be found under NAME."""
    found = ModuleType(NAME)
    found.Params4bit, found.Linear4bit = Params4bit, Linear4bit  # type: ignore[attr-defined]
    return found
