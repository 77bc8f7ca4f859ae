"""The run that replicas must repeat bit for bit, whatever happens to them: integers for tensors."""

from __future__ import annotations

MODULUS = 2**61 - 1


def gradient(state: int, step: int, index: int) -> int:
    """Of a microbatch; it depends on the weights."""
    return hash((state, step, index)) % MODULUS


def updated(state: int, step: int, total: int) -> int:
    return hash((state, step, total)) % MODULUS
