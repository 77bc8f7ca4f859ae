"""Who writes what: each byte of a replicated tensor once, the work even over the ranks. Pure.

Owns: what this rank holds, and which part of it this rank writes.
Not here: where the bytes go in a file (plan), what torch holds (state).
"""

from __future__ import annotations

from dataclasses import dataclass

from statehold.layout import AnyLayout
from statehold.plan import TensorSpec

__all__ = ["Held", "Part", "Share"]


@dataclass(frozen=True, slots=True)
class Held:
    """What a record says of a tensor that its rank holds, written there or not.

    `shape` is global. `layout` is the one written (a large replicated tensor is split over its
    replicas), None for a tensor that is this rank's own. `writer` is the replica that writes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: AnyLayout | None
    writer: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank writes: `rows` (of dim 0; None: all) of the captured spec number `source`."""

    spec: TensorSpec
    source: int
    rows: tuple[int, int] | None


@dataclass(frozen=True)
class Share:
    """The part of one rank in a save."""

    parts: tuple[Part, ...]
    held: tuple[Held, ...]
