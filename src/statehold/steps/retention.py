"""Which steps of one level stay, from what their manifests say.

Invariants: the decision follows from what is on storage, so a restart changes nothing. A manifest
is read at most once, and only if a rule asks for metrics or tags. A step whose manifest cannot be
read stays. Not synchronised: the caller holds the store's guard.
Not here: the rules (options/keep), who retires a step and how (store, objects).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from statehold.errors import InvariantError, StateholdError
from statehold.format.entries import DOCUMENT_BYTES_MAX, About
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.options.keep import Keep, kept_of


class Retention:
    """keep: as the user says it. read: reads a document of a step; raises StateholdError."""

    def __init__(self, keep: int | Keep | None, read: Callable[[int, str, int], bytes]) -> None:
        self.keep = kept_of(keep)
        self.read = read
        self._known: dict[int, About] = {}

    @property
    def most(self) -> int | None:
        """The most steps that can stay; None: any number."""
        return None if self.keep is None else self.keep.most

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Those of `steps`, oldest first, that stay."""
        if self.keep is None:
            return set(steps)
        kept = self.keep.of(steps, self._said)
        self._known = {step: about for step, about in self._known.items() if step in kept}
        return kept

    def going(
        self, steps: Callable[[], Sequence[int]], among: Collection[int] | None = None
    ) -> list[int]:
        """Those of the steps here that do not stay, oldest first.

        steps: lists them. among: the only steps that count, as all hosts know them; None: all.
        """
        if self.keep is None:
            return []
        here = steps()
        counting = sorted(here if among is None else among)
        found = sorted(set(counting).intersection(here) - self.kept(counting))
        if found and found[-1] == here[-1]:
            raise InvariantError("retention chose the newest committed step")
        return found

    def forget(self, step: int) -> None:
        """The step is another save by now, or gone."""
        self._known.pop(step, None)

    def _said(self, step: int) -> About | None:
        if step not in self._known:
            with contextlib.suppress(StateholdError):
                raw = self.read(step, MANIFEST_NAME, DOCUMENT_BYTES_MAX)
                self._known[step] = Manifest.said(raw, f"step {step}")
        return self._known.get(step)
