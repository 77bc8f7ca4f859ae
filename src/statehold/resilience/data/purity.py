"""Whether a microbatch is the same batch each time that it is drawn, on whichever replica.

A replica that takes over a microbatch draws it again. If it got another batch, the step would
silently differ from an undisturbed one. So each replica keeps the checksums of what it has drawn,
and gets those of a lost replica when it takes over.

Invariants: the first checksum of a microbatch stays until its step is forgotten. A difference
raises an error before anybody computes with the second draw.
Not here: how checksums get from replica to replica (protocol).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from statehold.errors import ImpureSamplesError
from statehold.resilience.data.course import Course

_HINT = (
    "a sample has to depend on its number and on the global generators of torch, numpy and random "
    "only; they are seeded for each microbatch. A generator that the data set has made, the clock, "
    "the number of a worker, or files that change make it impure"
)


class Purity:
    """The checksums of the microbatches that were drawn, by step and index."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._drawn: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def check(self, step: int, index: int, checksum: int) -> None:
        """Note a draw. Raises an ImpureSamplesError if an earlier one differs."""
        first = self._drawn[step].setdefault(index, checksum)
        if first != checksum:
            raise ImpureSamplesError(
                "a microbatch was drawn twice, and the draws differ",
                step=step,
                index=index,
                samples=self._course.samples(step, index),
                facts={"xxh3-64": f"first {first:016x}, now {checksum:016x}"},
                hint=_HINT,
            )

    def drawn(self, step: int) -> dict[int, int]:
        """The checksums of a step by index: what other replicas have to `learn`. Other threads may
        call it."""
        return dict(self._drawn.get(step, {}))

    def learn(self, step: int, drawn: Mapping[int, int]) -> None:
        """Compare with what another replica has drawn, now and in later draws of this replica."""
        for index, checksum in sorted(drawn.items()):
            self.check(step, index, checksum)

    def forget(self, before: int) -> None:
        """Forget the steps before `before`: nobody draws them again."""
        for step in [each for each in self._drawn if each < before]:
            del self._drawn[step]
