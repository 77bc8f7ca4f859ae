"""Random numbers that follow from a name: the same on every machine and in every release.

Invariants: what `words` returns never changes. A checkpoint says which samples are consumed only
by the number of steps, so another derivation would silently repeat some samples and skip others.
Not here: what the words are for (course, seeding).
"""

from __future__ import annotations

import hashlib
import struct

# The seeds that a user may give, so that a seed is one word.
SEED_MAX = 2**64 - 1


def words(purpose: str, *numbers: int, count: int) -> tuple[int, ...]:
    """`count` words of 64 bits that follow from `purpose` and `numbers`, and nothing else."""
    name = " ".join(["statehold", purpose, *map(str, numbers)])
    return struct.unpack(f"<{count}Q", hashlib.shake_256(name.encode()).digest(8 * count))
