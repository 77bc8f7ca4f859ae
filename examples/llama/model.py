"""A small Llama-style decoder in plain PyTorch: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Owns the network and its initial values. Invariants: the same config and the same torch seed give
the same initial parameters. Leaves the data, the optimizer and every checkpoint to others.

Tensor names end in their shape, one letter a dimension:
    B batch    L length (tokens)    D model dim    F feed-forward dim    V vocabulary
    H query heads    K key/value heads    E dim of one head    R = E/2 rotated pairs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from statehold import lowrank

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model. The feed-forward dim follows Llama: 8/3 of dim, a multiple of 64."""

    dim: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    seq: int = 256
    tie: bool = True
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "seq", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim ({self.dim}) must be a multiple of 2 * heads ({self.heads}): "
                "RoPE rotates the dimensions of a head in pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        """E, the dimension of one head."""
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """F, the feed-forward dimension."""
        return -(-self.dim * 8 // (3 * 64)) * 64


class RMSNorm(nn.RMSNorm):
    """Scale to unit root mean square, in float32 whatever the input."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)

    def forward(self, x_BLD: Tensor) -> Tensor:
        norm_BLD = functional.rms_norm(x_BLD.float(), (x_BLD.shape[-1],), None, self.eps)
        return norm_BLD.to(x_BLD.dtype) * self.weight


def rope_tables(seq: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's rotation angles, each of shape LR."""
    frequency_R = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_LR = torch.outer(torch.arange(seq, dtype=torch.float32), frequency_R)
    return angle_LR.cos(), angle_LR.sin()


def rotate(x_BLHE: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + E/2]) of a head by its position's angle."""
    cos_L1R, sin_L1R = cos_LR.unsqueeze(1), sin_LR.unsqueeze(1)
    a_BLHR, b_BLHR = x_BLHE.chunk(2, dim=-1)
    return torch.cat(
        (a_BLHR * cos_L1R - b_BLHR * sin_L1R, b_BLHR * cos_L1R + a_BLHR * sin_L1R), dim=-1
    )


class Attention(nn.Module):
    """Causal attention; each key/value head serves heads / kv_heads query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.group, self.head_dim = config.heads // config.kv_heads, config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        # -1: with tensor parallel, H and K are the heads of this rank only.
        q_BLHE = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLKE = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLKE = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLHE = rotate(q_BLHE, cos_LR, sin_LR)
        k_BLKE = rotate(k_BLKE, cos_LR, sin_LR)
        # Repeating the key/value heads here, not inside the kernel, keeps one code path on every
        # device: not all attention kernels of PyTorch know grouped queries.
        out_BHLE = functional.scaled_dot_product_attention(
            q_BLHE.transpose(1, 2),
            k_BLKE.repeat_interleave(self.group, dim=2).transpose(1, 2),
            v_BLKE.repeat_interleave(self.group, dim=2).transpose(1, 2),
            is_causal=True,
        )
        out_BLD: Tensor = self.wo(out_BHLE.transpose(1, 2).flatten(2))
        return out_BLD


class FeedForward(nn.Module):
    """SwiGLU: silu(gate) * up, projected back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BLF = functional.silu(self.gate(x_BLD)) * self.up(x_BLD)
        out_BLD: Tensor = self.down(hidden_BLF)
        return out_BLD


class Block(nn.Module):
    """One decoder layer: normed attention and normed feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BLD: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LR, sin_LR)
        out_BLD: Tensor = x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))
        return out_BLD


class Llama(nn.Module):
    """Tokens in, logits out. With `config.tie`, input and output embeddings are one parameter."""

    cos_LR: Tensor
    sin_LR: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        cos_LR, sin_LR = rope_tables(config.seq, config.head_dim)
        self.register_buffer("cos_LR", cos_LR, persistent=False)
        self.register_buffer("sin_LR", sin_LR, persistent=False)
        self._initialise()
        if config.tie:
            self.output.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Normal(0, 0.02); what is added to the residual stream is scaled down with the depth."""
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attention.wo.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        length = tokens_BL.shape[1]
        if length > self.config.seq:
            raise ValueError(f"{length} tokens are longer than the model's seq {self.config.seq}")
        x_BLD = self.embedding(tokens_BL)
        for block in self.layers:
            x_BLD = block(x_BLD, self.cos_LR[:length], self.sin_LR[:length])
        logits_BLV: Tensor = self.output(self.norm(x_BLD))
        return logits_BLV

    def make_low_rank(self, rank: int) -> None:
        """Pairs of factors in place of the linear layers of decoders, which keep what is narrow."""
        lowrank.convert(self, rank=rank, where=("layers.*.attention.w?", "layers.*.feed_forward.*"))
        lowrank.keep_bottlenecks(self)

    def loss(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross-entropy per byte, in nats."""
        logits_BLV = self(tokens_BL)
        return functional.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())

    def num_parameters(self) -> int:
        """Distinct parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
