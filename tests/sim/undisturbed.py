"""The run that replicas must repeat bit for bit, whatever happens to them: integers for tensors."""

from __future__ import annotations

from statehold.resilience.protocol.messages import Round

MODULUS = 2**61 - 1


def gradient(state: int, step: int, index: int) -> int:
    """Of a microbatch; it depends on the weights."""
    return hash((state, step, index)) % MODULUS


def updated(state: int, step: int, total: int) -> int:
    return hash((state, step, total)) % MODULUS


def overflows(seed: int, round: Round) -> bool:
    """Whether the gradients of this round are taken again: as all members decide it."""
    return hash((seed, round.step, round.attempt)) % 9 == 0 and round.attempt < 2
