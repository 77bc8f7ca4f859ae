"""Keys: what tells a part of a state from the others of its rank, from save to save. Pure.

Invariants: two parts of one rank have different keys. A part keeps its key while its tensor keeps
its name, dtype and shape, and the rank its place in it.
"""

from __future__ import annotations

from typing import TypeAlias

from statehold.layout.plan import TensorSpec
from statehold.layout.share import RankPlan

# The name, the dtype, the shape, and where the part begins in the whole tensor.
Key: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def key_of(spec: TensorSpec) -> Key:
    return spec.name, spec.dtype, spec.shape, spec.offsets or (0,) * len(spec.shape)


def keys_of(plan: RankPlan) -> tuple[Key, ...]:
    """The keys of the parts of a file, in file order."""
    return tuple([key_of(spec) for spec in plan.save.specs])
