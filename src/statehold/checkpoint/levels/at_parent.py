"""Where the parent of a run has its steps in object stores: as the parent itself has noted it.

Invariants: the note is read in the run directory that the manifest names, and only there. A parent
that has moved, or whose note cannot be read, has no URLs. A URL is no permission to ask anybody:
the caller asks its own store only (store/object_copies).
Not here: the note (remembered), what is taken from there (object_place).
"""

from __future__ import annotations

import contextlib

from statehold.checkpoint.levels.remembered import recall
from statehold.errors import StateholdError
from statehold.format.manifest import Manifest


def urls_at_parent(manifest: bytes, where: str) -> list[str]:
    """The object stores of the run that a step's run began from. where: the step, for messages."""
    with contextlib.suppress(StateholdError, OSError, ValueError):
        parent = Manifest.said(manifest, where).parent
        if parent is not None:
            return [each.where for each in recall(parent.run) if each.kind == "objects"]
    return []
