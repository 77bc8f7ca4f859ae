"""The messages of ranks about their parts of a copy, and the end of a failed copy.

Invariants: a copy is committed only if all ranks have copied their parts of the same save. A step
that is saved again meanwhile has two manifests, and ranks may have read either. Copied files are
kept for the next attempt, unless the level is full or the source damaged.
"""

from __future__ import annotations

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
from statehold.format.entries import sha256


def part_message(manifest: bytes, failure: Exception | None, step: int, landed: str) -> bytes:
    """The message of a rank: its part of the step with this manifest is there, or it has failed.

    landed: sha256 of the manifest of the last copy that is complete, as this rank knows it; or "".
    """
    reason = "" if failure is None else str(named(failure, f"while copying step {step}"))
    message = {
        "reason": reason,
        "resumable": failure is not None and is_resumable(failure),
        "manifest": sha256(manifest),
        "landed": landed,
    }
    return json.dumps(message).encode()


class PartFailedError(PeerFailedError):
    """The same for rank 0, which knows whether the copy `is_resumable` on all ranks."""

    def __init__(self, rank: int, reason: str, is_resumable: bool) -> None:
        super().__init__(rank, reason)
        self.is_resumable = is_resumable


def check_parts(messages: Sequence[bytes], step: int) -> bytes:
    """Rank 0: raises PeerFailedError if the parts do not make a step.

    Returns which copies are complete, as any rank knows it, for landed_copies().
    """
    parts = [json.loads(each) for each in messages]
    failed = [(rank, part) for rank, part in enumerate(parts) if part["reason"]]
    if failed:
        rank, first = failed[0]
        raise PartFailedError(rank, first["reason"], all(part["resumable"] for _, part in failed))
    for rank, part in enumerate(parts):
        if part["manifest"] != parts[0]["manifest"]:
            raise PeerFailedError(rank, f"step {step} was saved again while it was copied")
    return json.dumps(sorted({part["landed"] for part in parts} - {""})).encode()


def landed_copies(told: bytes) -> list[str]:
    """sha256 of the manifests of complete copies, from the answer of check_parts()."""
    found: list[str] = json.loads(told or b"[]")
    return found


def is_resumable(error: Exception) -> bool:
    """Whether the copied files are worth keeping for another copy of the same step."""
    if isinstance(error, PartFailedError):
        return error.is_resumable
    if isinstance(error, NoSpaceError):
        return False
    return isinstance(error, StorageError | ClosedError | PeerLostError)
