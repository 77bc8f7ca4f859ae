"""The random numbers of a microbatch: each one begins with seeds of its own.

Dropout and augmentations are then a function of the microbatch, and do not depend on the replica
that computes it or on what this replica has computed before.

Invariants: the seeds of a microbatch never change (derivation). Drawing its samples and computing
with them have different seeds, so that an augmentation and a dropout mask are independent.
Not here: generators that the user has made himself. The user seeds them, from numbers that the
process' generators give, or does not use them.
"""

from __future__ import annotations

import random
import sys

import torch

from statehold.resilience.data.derivation import words

COMPUTING = "computing"
DRAWING = "drawing"


def seed_microbatch(seed: int, step: int, index: int, purpose: str = COMPUTING) -> None:
    """Seed torch on the CPU and on devices that are in use, `random`, and numpy if it is imported.

    A device that is initialised later keeps its own state until the next microbatch is seeded.
    """
    for_torch, for_python, *for_numpy = words(purpose, seed, step, index, count=6)
    torch.default_generator.manual_seed(for_torch)
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            device.manual_seed_all(for_torch)
    random.seed(for_python)
    if (numpy := sys.modules.get("numpy")) is not None:
        halves = [half for word in for_numpy for half in (word & 0xFFFFFFFF, word >> 32)]
        numpy.random.seed(halves)
