"""One training run in memory: model, optimizer, schedule, data, and the step that moves them.

Owns the arithmetic. Invariants: every number is a function of the config, so a run that restored
`state` computes bit for bit what an uninterrupted one computes. Leaves saving to the caller,
and needs nothing from it: `state` is all there is to save.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import statehold
from config import RunConfig
from data import TextLoader, read_corpus
from memory import data_bytes
from model import Llama
from optimizers import adamw, recorded_step, state_of
from ranks import Ranks, whole
from statehold import offload

VALIDATION_BATCHES = 8


def make_deterministic(config: RunConfig) -> None:
    """Fix what torch may otherwise choose by itself: seeds, threads, kernels."""
    if config.device.startswith("cuda"):
        # cuBLAS reads it when it starts; without it torch refuses to promise determinism.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """The factor on the learning rate: linear to 1, then half a cosine down to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


class Trainer:
    """A run in memory. Call make_deterministic first: building it draws random numbers."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        if config.batch % ranks.shares:
            raise ValueError(f"a batch of {config.batch} cannot be divided by {ranks.shares}")
        self._config = config
        self._ranks = ranks
        corpus = read_corpus(config.data)
        self.loader = TextLoader(corpus, seq=config.seq, batch=config.batch, seed=config.seed)
        dtype = getattr(torch, config.dtype)
        model = Llama(config.model).to(config.device, dtype)
        if config.low_rank:
            model.make_low_rank(config.low_rank)
        self.model = ranks.shard(model)
        self.bytes_before_optimizer = data_bytes()
        self.optimizer = adamw(self.model, config)
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: warmup_cosine(step, config.warmup, config.steps)
        )
        self.last_update: dict[str, Any] = {}  # of an offloaded optimizer: recorded_step()
        self.tokens_per_step = config.batch * config.seq * config.accumulate

    @property
    def state(self) -> dict[str, Any]:
        """All of the run: what has to be saved, and what restore fills in place."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.loader,
            "rng": statehold.Rng(),
        }

    def step(self) -> float:
        """Train one step; the mean loss of its batches, before the update."""
        self.model.train()
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(self._config.accumulate):
            batch = self._ranks.share(next(self.loader))
            loss = self.loss(*batch) / self._config.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip)
        self._update()
        self.scheduler.step()
        return self._ranks.mean(total)

    def _update(self) -> None:
        if isinstance(self.optimizer, offload.AdamW):
            self.last_update = recorded_step(self.optimizer)
        else:
            self.optimizer.step()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on held-out text; changes nothing that a step depends on."""
        self.model.eval()
        batches = self.loader.validation(VALIDATION_BATCHES)
        return sum(self.loss(*batch).item() for batch in batches) / len(batches)

    @torch.no_grad()
    def checksum(self) -> str:
        """Of every tensor of the model and its optimizer, whole, and of the position in the data.

        It is the same on however many ranks.
        """
        found = hashlib.sha256()
        position = self.loader.state_dict()
        found.update(f"{position['epoch']} {position['position']}\n".encode())
        kept = state_of(self.optimizer)
        for name, parameter in self.model.named_parameters():
            of_optimizer = kept.get(parameter, {})
            for key, tensor in [("", parameter), *sorted(of_optimizer.items())]:
                found.update(f"{name} {key}\n".encode())
                found.update(_bytes(whole(tensor)))
        return found.hexdigest()

    def loss(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch, in nats per byte; the batch may be on another device."""
        device = self._config.device
        return self.model.loss(tokens_BL.to(device), targets_BL.to(device))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
