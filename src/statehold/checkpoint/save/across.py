"""Saves into a level that each host has for itself: D3 to D7 by all ranks, in two rounds.

    Across     record -> D3 sealed -> D4 arrive -> rank 0: gather, judge, conclude with the manifest
               -> the first rank of each host: D5 to D7 in its host's store -> all meet: committed

Invariants: a step is committed when every host has published the same manifest. If a rank is lost
between the rounds, or a host cannot publish, the save fails on all ranks, and the error names the
rank. Some hosts may have published such a step. It does not count, and the next save removes it
(levels/hosts/place). Older steps are retired only after the second round. If the job turns out to
be on one host, this class does what Together does.
Not here: the second round (levels/commit_rounds), who is on which host (levels/hosts).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from statehold.checkpoint.cadence.schedule import Schedule
from statehold.checkpoint.levels.commit_rounds import CommitRounds
from statehold.checkpoint.levels.levels import Levels
from statehold.checkpoint.save.aftermath import after_commit
from statehold.checkpoint.save.descent import Descent
from statehold.checkpoint.save.publishing import Alone, Publisher, Together
from statehold.checkpoint.save.work import Work
from statehold.format.manifest import Commit, Encoded
from statehold.layout.claims import Claims
from statehold.observe.background_log import BackgroundLog
from statehold.ranks.peers import Peers


def publisher_of(
    peers: Peers | None, levels: Levels, claims: Claims, schedule: Schedule, log: BackgroundLog
) -> Publisher:
    """The publisher for the saves of this process."""
    descent = Descent(levels.near, lambda: levels.began_from)
    if peers is None:
        return Alone(descent, levels.promotions, schedule, log)
    kind = Across if levels.hosts.are_asked else Together
    return kind(peers, claims, descent, levels.promotions, schedule, log)


class Across(Together):
    """One of several ranks that save into a level that each host has for itself."""

    def announce(self, work: Work) -> None:
        if not work.place.is_apart:
            super().announce(work)

    def _land(self, work: Work, commit: Commit) -> None:
        if not work.place.is_apart:
            super()._land(work, commit)

    def _landed(self, work: Work, doing: str) -> contextlib.AbstractContextManager[None]:
        # At a level that each host has for itself, the second round commits.
        return contextlib.nullcontext() if work.place.is_apart else super()._landed(work, doing)

    def _keep_outcome(self, work: Work, commit: Commit, outcome: dict[str, Any]) -> None:
        super()._keep_outcome(work, commit, outcome)
        if work.place.is_apart:
            outcome["manifest"] = commit.encode().decode()
            self._peers.conclude(work.number, json.dumps(outcome).encode())

    def _confirm(self, work: Work, attempt: str) -> bool:
        return not work.place.is_apart and super()._confirm(work, attempt)

    def _settle(self, work: Work, outcome: Mapping[str, Any]) -> None:
        """The second round."""
        place, step = work.place, work.save.step
        if not place.is_apart:
            return
        manifest = Encoded(step, outcome["manifest"].encode())
        rounds = CommitRounds(self._peers, "save", work.number, f"while publishing step {step}")
        with work.save.stage("publish"):
            rounds.publish(place, lambda: place.store.commit(manifest, work.attempt))
        with after_commit(self._log, step, "note where its files are"):
            place.landed(step, manifest.raw, range(self._peers.world_size))
