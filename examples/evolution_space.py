"""The search space of examples/evolution.py: small networks, their mutations, and their task.

The task: say which of eight classes a random deep network gives to a point of 16 dimensions.
Batches are new every time, so no network can learn them by heart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

INPUTS, CLASSES = 16, 8
WIDTHS = (16, 32, 48, 64)
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
DEPTHS = (2, 6)

# The hidden layers: width and activation of each.
Genes = tuple[tuple[int, str], ...]


def gene(rng: random.Random) -> tuple[int, str]:
    return rng.choice(WIDTHS), rng.choice(list(ACTIVATIONS))


def random_genes(rng: random.Random) -> Genes:
    return tuple(gene(rng) for _ in range(rng.randint(*DEPTHS)))


def mutated(genes: Genes, rng: random.Random) -> Genes:
    """One layer more, one less, or another one in its place."""
    place = rng.randrange(len(genes))
    kinds = ["change"]
    kinds += ["insert"] if len(genes) < DEPTHS[1] else []
    kinds += ["remove"] if len(genes) > DEPTHS[0] else []
    kind = rng.choice(kinds)
    new = () if kind == "remove" else (gene(rng),)
    return genes[:place] + new + genes[place + (kind != "insert") :]


def network(genes: Genes) -> nn.Sequential:
    layers: list[nn.Module] = []
    width = INPUTS
    for wide, activation in genes:
        layers += [nn.Linear(width, wide), ACTIVATIONS[activation]()]
        width = wide
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


@dataclass
class Task:
    """Labelled points. seed: of the network that gives the labels, and of what is tested."""

    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [(INPUTS, 32), (32, 32), (32, CLASSES)]
        self._teacher = [torch.randn(a, b, generator=generator) * 2.5 / a**0.5 for a, b in sizes]
        self.test = self.points(4000, generator)

    def points(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, INPUTS, generator=generator)
        y = x
        for index, weight in enumerate(self._teacher):
            y = (y if index == 0 else y.tanh()) @ weight
        return x, y.argmax(dim=1)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x, y = self.points(128, generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """The share of the test points that get the right class."""
        x, y = self.test
        return (model(x).argmax(dim=1) == y).float().mean().item()
