"""Small networks that begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import nn


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers between these widths, each with an activation behind it."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers)
