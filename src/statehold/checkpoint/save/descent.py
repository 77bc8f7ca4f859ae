"""The step of another run that this run began from: each step of the run says so again.

A run keeps its newest steps only, so the first one cannot be the only one that knows.

Invariants: asked once, by the rank that commits, before its first commit. Levels that are not
directories are not asked, because a save would wait for them. A manifest that cannot be read is no
reason to fail a save: an older step knows the same.
Not here: how a run begins from a step (checkpoint/levels/forking, checkpoint/restore/call).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from statehold.errors import StateholdError
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME

if TYPE_CHECKING:
    from statehold.checkpoint.levels.places import DirectoryPlace
    from statehold.format.about import About, Origin


class Descent:
    """near: the levels of the run that are directories, the nearest first. restored: the step that
    a run without steps began from by restore(source=...), if any."""

    def __init__(
        self, near: Sequence[DirectoryPlace], restored: Callable[[], Origin | None]
    ) -> None:
        self._near = near
        self._restored = restored
        self._parent: Origin | None = None
        self._is_known = False

    @property
    def parent(self) -> Origin | None:
        """None if the run began with nothing."""
        if not self._is_known:
            said = next(self._said(), None)
            self._parent = self._restored() if said is None else said.parent
            self._is_known = True
        return self._parent

    def _said(self) -> Iterator[About]:
        """What the steps of the run say, the newest step of the nearest level first."""
        for place in self._near:
            with contextlib.suppress(StateholdError):
                for step in reversed(place.steps()):
                    with contextlib.suppress(StateholdError):
                        raw = place.read(step, MANIFEST_NAME, DOCUMENT_BYTES_MAX)
                        yield Manifest.decode(raw, f"{place.name}: step {step}").about
