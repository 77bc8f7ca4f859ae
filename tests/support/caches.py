"""Small models of random weights, their sequences, and what a DynamicCache makes of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from statehold.kv import PageStore
from statehold.units import MiB

WORDS = 200
LAYERS = 6
TOKEN_BYTES = 2 * 2 * 16 * 4  # of a layer: keys and values, heads, dims, bytes of a float


def config(**options: Any) -> LlamaConfig:
    options = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0, **options,
    }  # fmt: skip
    return LlamaConfig(**options)


def model(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    made = LlamaForCausalLM(config(initializer_range=0.2, **options)).eval()
    made.requires_grad_(False)
    return made


def sequence(tokens: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(1, WORDS, (batch, tokens), generator=dice)


def generated(of: Any, ids: torch.Tensor, cache: Any = None, tokens: int = 24) -> torch.Tensor:
    """The sequence with the tokens that follow; each is the likeliest one."""
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        found: torch.Tensor = of.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=tokens, do_sample=False
        )
    return found


def step(of: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    """The logits of a call."""
    with torch.inference_mode():
        found: torch.Tensor = of(ids, past_key_values=cache, use_cache=True, **options).logits
    return found


def filled(of: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    step(of, ids, cache)
    return cache


def small_store(path: Path, *, page_bytes: int = 16 * TOKEN_BYTES, **options: Any) -> PageStore:
    options = {"capacity": 16 * MiB, "memory": 4 * MiB, **options}
    return PageStore(path, page_bytes=page_bytes, **options)


def digest(of: Any) -> bytes:
    """Weights by content, as 16 bytes."""
    found = hashlib.sha256()
    for each in of.state_dict().values():
        found.update(each.contiguous().view(torch.uint8).flatten().numpy().tobytes())
    return found.digest()[:16]
