"""A small Llama of plain torch, in any dtype, with the names of Hugging Face's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from statehold import lowrank

WIDTH, FF, HEADS, RANK, VOCABULARY = 32, 64, 4, 8, 40


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            f(x).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FF, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Decoder(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        """A stage of a pipeline has None for what other stages have, and gets hidden states."""
        x = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Decoder(layers, dropout)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.model(tokens)
        return x if self.lm_head is None else self.lm_head(x)  # type: ignore[no-any-return]


def low_rank(
    layers: int = 2,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    is_tied: bool = False,
    has_head_norms: bool = False,
) -> Llama:
    """The same model for the same seed, made of pairs; its norms are not all ones."""
    torch.manual_seed(seed)
    model = Llama(layers, dropout)
    for layer in model.model.layers if has_head_norms else ():
        layer.self_attn.q_norm, layer.self_attn.k_norm = (  # type: ignore[union-attr]
            nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2)
        )
    lowrank.convert(model, rank=RANK)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.uniform_(0.5, 1.5)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.to(dtype)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return next_token_loss(model(tokens), tokens)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(seed: int = 0, batch: int = 2, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)
