"""The notes of a run in its directory: its levels, and its id.

Invariants: only rank 0 writes, and only if the run is on a real file system. No save and no restore
depends on a note, and none fails because of one.
Not here: the two files (remembered, owners).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from statehold.checkpoint.levels.hosts.place import HostPlace
from statehold.checkpoint.levels.owners import Identity
from statehold.checkpoint.levels.places import Place
from statehold.checkpoint.levels.remembered import remember
from statehold.checkpoint.levels.specs import Level
from statehold.errors import CorruptionError, StateholdError, StorageError
from statehold.observe.background_log import logger


class RunNotes:
    """The notes of a run.

    is_alone: no level can be on several hosts. writes: whether this rank writes the notes.
    """

    def __init__(
        self,
        run: str,
        specs: Sequence[Level],
        places: Sequence[Place],
        identity: Identity,
        *,
        is_alone: bool,
        writes: bool,
    ) -> None:
        self._run, self._specs, self._places, self._identity = run, specs, places, identity
        self._is_alone = is_alone
        self._writes = writes
        self._noted: list[str] | None = None

    @property
    def has_id(self) -> bool:
        return self._identity.own is not None

    def write(self) -> None:
        """Note the levels; again if somebody has removed the notes with the run directory.

        Until the ranks have met, each of them may be on a host of its own. The next save notes what
        is known then.
        """
        apart = [
            at.name
            for at in self._places
            if not self._is_alone and isinstance(at, HostPlace) and len(at.hosts) != 1
        ]
        if not self._writes or (apart == self._noted and self._identity.is_noted):
            return
        self._noted = apart
        try:
            if any(place.owned is not None for place in self._places):
                self._identity.establish()
            remember(self._specs, self._run, apart)
        except (OSError, StateholdError) as error:
            logger.debug(
                "cannot write the id and the levels of the run into its directory: %s", error
            )

    def restored(self, step: int, served: Collection[str]) -> None:
        """`step` was restored from the levels named in `served`: find out which run owns it."""
        if not self._writes:
            return
        with contextlib.suppress(StorageError, CorruptionError):  # the next copy asks again
            for place in self._places:
                if place.owned is not None and place.name in served:
                    has_steps = any(each.steps() for each in self._places if _is_ours(each))
                    place.owned.restored(step, has_steps=has_steps)


def _is_ours(place: Place) -> bool:
    """Whether a level is of this run, as long as the run has no id: no other one is named there."""
    return place.owned is None or place.owned.owner() is None
