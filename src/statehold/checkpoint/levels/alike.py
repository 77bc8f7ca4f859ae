"""Whether the ranks of a job have the same levels, and the difference if not.

All ranks go through the levels together, by name and in order, and would wait in vain for a rank
with other levels. The place of a level, and its limit of bandwidth, may differ from host to host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from statehold.checkpoint.levels.specs import Level
from statehold.errors import UsageError

ROUND = "levels"
_OF_HOST = {"path", "url", "options", "bytes_per_s"}


def described(levels: Sequence[Level]) -> str:
    """The parts that must be equal on all ranks."""
    found = []
    for level in levels:
        fields = {name: each for name, each in asdict(level).items() if name not in _OF_HOST}
        found.append({"kind": type(level).__name__, **fields})
    return json.dumps(found, default=str)


def check_same(levels: Sequence[Level], of_rank_0: str) -> None:
    """Raises UsageError if these levels, of another rank, differ from those of rank 0."""
    found = _difference(json.loads(described(levels)), json.loads(of_rank_0))
    if found is not None:
        raise UsageError(
            "the levels of this rank differ from those of rank 0",
            facts={"difference": found},
            hint="give all ranks of a job the same levels",
        )


def _difference(mine: list[dict[str, object]], first: list[dict[str, object]]) -> str | None:
    if len(mine) != len(first):
        return f"{len(mine)} levels, and rank 0 has {len(first)}"
    for at, (each, expected) in enumerate(zip(mine, first, strict=True)):
        for field in {**expected, **each}:
            if each.get(field) != expected.get(field):
                values = f"{each.get(field)!r}, on rank 0 {expected.get(field)!r}"
                return f"level {at + 1} ({expected['name']}): {field} is {values}"
    return None
