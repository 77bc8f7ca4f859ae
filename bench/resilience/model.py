"""The model of the benchmarks of resilience: a small transformer that predicts bytes.

It needs torch only, so that peers in other environments train it, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HEADS, TOKENS = 8, 64
VOCABULARY = 256


class Model(nn.Module):
    """batch: the samples of a microbatch, which is named by its step and index."""

    def __init__(self, layers: int, features: int, batch: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(
            features, HEADS, 4 * features, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(features, VOCABULARY)
        self._batch = batch

    def forward(self, step: int, index: int) -> Tensor:
        made = torch.Generator().manual_seed(step * 1000 + index)
        tokens = torch.randint(VOCABULARY, (self._batch, TOKENS), generator=made, device="cpu")
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
