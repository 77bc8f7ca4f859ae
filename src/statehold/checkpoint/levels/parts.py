"""What ranks tell each other of their parts of a copy, and what becomes of a copy that failed.

Invariants: a copy is committed only if all ranks have copied their parts of the same save: a step
that is saved again while it is copied has two manifests, and ranks may have come to read either.
What was copied of a step is kept for the next attempt, but not where the level is full, nor where
the source is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from statehold.errors import (
    ClosedError,
    NoSpaceError,
    PeerFailedError,
    PeerLostError,
    StorageError,
    named,
)

__all__ = ["check_parts", "is_resumable", "part_told"]


def part_told(manifest: bytes, failure: Exception | None, step: int) -> bytes:
    """A rank's part is there, as a part of the step with this manifest, or it has failed."""
    reason = "" if failure is None else str(named(failure, f"while copying step {step}"))
    told = {
        "reason": reason,
        "resumable": failure is not None and is_resumable(failure),
        "manifest": hashlib.sha256(manifest).hexdigest(),
    }
    return json.dumps(told).encode()


class PartFailedError(PeerFailedError):
    """As rank 0 sees it, who knows whether the copy `is_resumable` on all ranks."""

    def __init__(self, rank: int, reason: str, is_resumable: bool) -> None:
        super().__init__(rank, reason)
        self.is_resumable = is_resumable


def check_parts(told: Sequence[bytes], step: int) -> None:
    """Rank 0: raises PeerFailedError if the parts that were told of do not make up a step."""
    parts = [json.loads(each) for each in told]
    failed = [(rank, part) for rank, part in enumerate(parts) if part["reason"]]
    if failed:
        rank, first = failed[0]
        raise PartFailedError(rank, first["reason"], all(part["resumable"] for _, part in failed))
    for rank, part in enumerate(parts):
        if part["manifest"] != parts[0]["manifest"]:
            raise PeerFailedError(rank, f"step {step} was saved again while it was copied")


def is_resumable(error: Exception) -> bool:
    """Whether what was copied is worth keeping for when the same step is copied again."""
    if isinstance(error, PartFailedError):
        return error.is_resumable
    if isinstance(error, NoSpaceError):
        return False
    return isinstance(error, StorageError | ClosedError | PeerLostError)
