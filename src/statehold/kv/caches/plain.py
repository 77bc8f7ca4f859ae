"""The layers that a cache of transformers has for a model, and the bytes of plain ones as pages.

A layer is plain if it holds the keys and values of all tokens, and nothing else. Windows, states
and shared layers hold something else, so nothing of them can be taken for a page. A layer that lies
on tiers is plain, too: it has a method whole().
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from statehold.errors import refused
from statehold.tensors.devices.elements import host_memory


def plain_layers(config: Any) -> list[Any]:
    """The layers that transformers makes for a model. Raises UsageError for no config."""
    if not isinstance(config, PreTrainedConfig):
        raise refused("not a configuration of transformers", "that of a model", config)
    return list(DynamicCache(config=config).layers)


def is_plain(layer: Any) -> bool:
    """Whether a layer holds the keys and values of all tokens."""
    return type(layer) is DynamicLayer


def as_pages(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The bytes of [batch, heads, tokens, dim], cut by tokens into so many rows."""
    batch, heads, _, dim = tensor.shape
    cut = tensor.detach().reshape(batch, heads, count, -1, dim).movedim(2, 0)
    return cut.reshape(count, -1).view(torch.uint8)


def views(pages: torch.Tensor) -> list[memoryview]:
    """The memory of each row, which lives as long as one of the views."""
    view, size = host_memory(pages), pages.shape[1]
    return [view[at : at + size] for at in range(0, len(view), size)]
