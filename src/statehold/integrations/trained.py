"""Which tensors of a model go into a step: all of them, or what an adapter model trains.

The frozen base of a peft model comes from where the script takes it, so a step does not hold it. In
any other model a frozen parameter may exist nowhere else, so a step holds the whole model.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["persistent_buffers", "trained_part"]


def trained_part(
    bare: nn.Module, wrapped: nn.Module | None = None
) -> nn.Module | dict[str, torch.Tensor]:
    """What a state holds of a model: for a peft model, its trained parameters and its buffers.

    wrapped: the model as it trains, such as under DistributedDataParallel.
    """
    if not _is_peft(bare):
        return bare if wrapped is None else wrapped
    kept = {name: each for name, each in bare.named_parameters() if each.requires_grad}
    return {**kept, **persistent_buffers(bare)}


def _is_peft(model: nn.Module) -> bool:
    """Whether a class of peft wraps the base; without importing peft."""
    return any(each.__name__ == "PeftModel" and each.__module__.startswith("peft.")
               for each in type(model).__mro__)  # fmt: skip


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that its state_dict() has, by name."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found
