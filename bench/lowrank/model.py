"""A Llama of plain torch for the benchmarks of pairs, with the names of Hugging Face's.

Owns: the model, its splits, and the ways to compare: `full` (linear layers by Megatron's rule),
`rank` and `bottleneck` (pairs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from statehold import lowrank
from statehold.lowrank.parallel import parallelize


@dataclass(frozen=True)
class Size:
    """Of a model, and of what it trains on at a time."""

    width: int = 512
    ff: int = 1376
    layers: int = 4
    heads: int = 8
    vocabulary: int = 256
    batch: int = 4
    length: int = 256


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        layers = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layers

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            f(x).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotated(each, *positions) for each in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return found


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class MLP(nn.Module):
    def __init__(self, size: Size, *, has_silu: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.ff, bias=False)
        self.up_proj = nn.Linear(size.width, size.ff, bias=False)
        self.down_proj = nn.Linear(size.ff, size.width, bias=False)
        self.has_silu = has_silu

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = functional.silu(gate) if self.has_silu else gate
        found: Tensor = self.down_proj(gate * self.up_proj(x))
        return found


class Layer(nn.Module):
    def __init__(self, size: Size, *, has_silu: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(size), MLP(size, has_silu=has_silu)
        self.input_layernorm = nn.RMSNorm(size.width, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(size.width, eps=1e-6)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Llama(nn.Module):
    """has_silu: in the MLP. CoLA's models have none there from 350M on."""

    def __init__(self, size: Size, *, has_silu: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size, has_silu=has_silu) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-6)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.width // size.heads // 2
        places, powers = (torch.arange(n, device="cpu") for n in (size.length, half))
        angles = torch.outer(places, 10_000.0 ** (-powers / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        found: Tensor = self.lm_head(self.norm(x))
        return found

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def made(size: Size, way: str, rank: int | None = None) -> Llama:
    """The same model for the same way. rank: of the pairs (a quarter of the width)."""
    torch.manual_seed(0)
    model = Llama(size, has_silu=way == "full" or size.width < 1024)
    if way != "full":
        lowrank.convert(model, rank=rank or size.width // 4)
    return model


def split(model: Llama, way: str, mesh: DeviceMesh) -> None:
    """Over all ranks of a mesh, whose one dimension is "tp"."""
    if way != "full":
        parallelize(model, mesh, way="rank" if way == "rank" else "bottleneck")
        return
    columns, rows = ColwiseParallel(), RowwiseParallel()
    names = {**dict.fromkeys(("q", "k", "v", "gate", "up"), columns), "o": rows, "down": rows}
    parts = {
        f"layers.*.{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj": style
        for name, style in names.items()
    }
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {**parts, "lm_head": head})
