"""Promotion: committed steps go on from the first level to the others, in the background.

    decide   when a step is committed at the first level, rank 0 says which levels want it
    start    every rank, told of that: keep the step, and copy this rank's part on a thread
    meet     all parts are there, or one rank failed; rank 0 commits at the level, or gives up

Holds: at most one step is under way to a level; a level that is busy gets the next step that is
committed once it is free. Ranks meet under the number of the copy, so that one that was not told
of a copy fails that one and no other. A level that fails costs a warning: training goes on, the
step stays where it is, and the next one is tried again.
Not here: when a level wants a step (cadence), the bytes (copying), a level's commit (places).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from statehold.agreeing import led
from statehold.errors import ClosedError, PeerFailedError, StateholdError, WaitTimeout, named
from statehold.levels.cadence import Cadence, parse_every
from statehold.levels.copying import part_of
from statehold.levels.throttle import Throttle

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.background_log import BackgroundLog
    from statehold.levels.places import DirectoryPlace, Place
    from statehold.levels.specs import Level
    from statehold.ranks.peers import Peers

__all__ = ["LevelStatus", "Promoter", "Promotions"]


@dataclass(frozen=True, slots=True)
class LevelStatus:
    """How a level stands. newest: the newest step that got there since the run was opened, or was
    there before; copying, bytes_done, bytes_total: the step under way, and this rank's part of it;
    error: why the last copy failed, until one succeeds."""

    name: str
    newest: int | None = None
    copying: int | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    error: StateholdError | None = None


class Promoter:
    """Copies steps to one level, one after the other, on a thread of its own."""

    def __init__(
        self,
        spec: Level,
        place: Place,
        source: DirectoryPlace,
        fs: Fs,
        peers: Peers | None,
        give_way: Callable[[], None],
        log: BackgroundLog,
    ) -> None:
        self.place = place
        self._source = source
        self._fs = fs
        self._peers = peers
        self._log = log
        self._rank = peers.rank if peers else 0
        self._round = f"promote {place.name}"
        self._throttle = Throttle(spec.rate, give_way)
        newest = max(place.steps(), default=None) if self._rank == 0 else None
        self._cadence = Cadence(parse_every(spec.every), newest, time.monotonic())
        self._status = LevelStatus(place.name, newest)
        self._guard = threading.Lock()
        self._thread = ThreadPoolExecutor(1, f"statehold-{place.name}")
        self._under_way: Future[None] | None = None

    @property
    def status(self) -> LevelStatus:
        return self._status

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def wants(self, step: int) -> bool:
        """Whether the level should have this step now. For rank 0, which asks for all."""
        return not self.is_busy and self._cadence.is_due(step, time.monotonic())

    def lacks(self, step: int) -> bool:
        """Whether the level has no step as new as this one, nor will have."""
        with self._guard:
            known = [self._status.newest, self._status.copying]
        return all(other is None or other < step for other in known)

    def start(self, step: int, number: int) -> None:
        """Begin to copy a step, which stays at the first level until that has ended. `number` is
        that of the copy, the same on all ranks and above those of earlier ones."""
        kept = contextlib.ExitStack()
        kept.enter_context(self._source.protect(step))
        self._cadence.taken(step, time.monotonic())
        self._set(copying=step, bytes_done=0, bytes_total=0)
        self._under_way = self._thread.submit(self._run, step, number, kept)

    def wait(self, timeout_s: float | None) -> None:
        """Return once nothing is under way. Raises WaitTimeout."""
        if self._under_way is not None and not wait([self._under_way], timeout_s).done:
            raise WaitTimeout(
                f"step {self._status.copying} did not reach level {self.place.name} in time",
                facts={"waited": f"{timeout_s} s", "copied": f"{self._status.bytes_done} bytes"},
                hint="the copy goes on in the background",
            )

    def rewind(self, step: int) -> list[int]:
        """Give up what is newer than `step` at the level. For rank 0, with nothing under way."""
        self.place.prepare(self._peers.token if self._peers else None)
        given_up = self.place.rewind(step)
        if given_up:
            newest = max(self.place.steps(), default=None)
            self._set(newest=newest)
            self._cadence.given_up(newest)
        return given_up

    def close(self) -> None:
        """End what is under way, finished or not."""
        self._throttle.stop()
        self._thread.shutdown(wait=True)

    # -- on the thread ---------------------------------------------------------------------

    def _run(self, step: int, number: int, kept: contextlib.ExitStack) -> None:
        attempt = self._peers.attempt(number) if self._peers else None
        try:
            with kept:
                self._publish(step, number, attempt)
            if self._rank == 0:
                self._source.store.retain()  # it may have been the copy that held it
            self._set(newest=step, copying=None, error=None)
            self._log.info("step %d is committed at level %s", step, self.place.name)
        except Exception as error:
            self._failed(step, attempt, error)

    def _publish(self, step: int, number: int, attempt: str | None) -> None:
        """Copy this rank's part; when all have, rank 0 commits."""
        if self._peers is None:
            self.place.commit(step, attempt, self._copy(step, attempt))
            return
        failure: Exception | None = None
        manifest = b""
        try:
            manifest = self._copy(step, attempt)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error

        def commit(told: Sequence[bytes]) -> bytes:
            for rank, reason in enumerate(told):
                if reason:
                    raise PeerFailedError(rank, reason.decode())
            self.place.commit(step, attempt, manifest)
            return b""

        reason = "" if failure is None else str(named(failure, f"while copying step {step}"))
        try:
            self._peers.agree(self._round, reason.encode(), commit, number)
        finally:
            if failure is not None:
                raise failure

    def _copy(self, step: int, attempt: str | None) -> bytes:
        self.place.prepare(self._peers.token if self._peers else None)
        directory = self._source.store.path(step)
        part = part_of(self._fs, directory, self._rank)
        self._set(bytes_total=part.nbytes)
        self.place.take(part, self._fs, directory, step, attempt, self._before)
        return part.manifest

    def _before(self, nbytes: int) -> None:
        self._throttle(nbytes)
        self._set(bytes_done=self._status.bytes_done + nbytes)

    def _failed(self, step: int, attempt: str | None, error: Exception) -> None:
        if self._rank == 0:
            with contextlib.suppress(StateholdError):
                self.place.abandon(step, attempt)
        self._cadence.given_up(self._status.newest)
        self._set(copying=None, error=named(error, f"while copying step {step}"))
        if not isinstance(error, ClosedError):
            self._log.warning(
                "step %d did not reach level %s; it stays at level %s, the next is tried\n%s",
                step, self.place.name, self._source.name, error,
            )  # fmt: skip

    def _set(self, **changes: object) -> None:
        with self._guard:
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]


class Promotions:
    """All levels but the first."""

    def __init__(self, promoters: Sequence[Promoter], peers: Peers | None) -> None:
        self._promoters = {promoter.place.name: promoter for promoter in promoters}
        self._peers = peers
        self._last = 0  # number of a copy

    def decide(self, step: int) -> list[str]:
        """Rank 0: the levels that are to have a step that was just committed."""
        return [name for name, promoter in self._promoters.items() if promoter.wants(step)]

    def start(self, step: int, names: Iterable[str], save: int) -> None:
        """Every rank, with what rank 0 has decided about the save of this number."""
        self._start(step, names, 2 * save)

    def _start(self, step: int, names: Iterable[str], number: int) -> None:
        self._last = number
        for name in names:
            promoter = self._promoters[name]
            promoter.wait(None)  # only where another rank was faster
            promoter.start(step, number)

    def newest(self) -> int | None:
        """The newest step that a level has."""
        found = (promoter.status.newest for promoter in self._promoters.values())
        return max((step for step in found if step is not None), default=None)

    def status(self) -> list[LevelStatus]:
        return [promoter.status for promoter in self._promoters.values()]

    def catch_up(self, newest: Callable[[], int | None]) -> None:
        """All ranks together: begin to copy the newest step of the first level to where it is
        missing."""
        step, names, number = led(self._peers, lambda: self._lacking(newest()))
        self._start(step, names, number)

    def _lacking(self, newest: int | None) -> tuple[int, list[str], int]:
        """(step, levels, number of the copy): odd numbers, between those that follow a save."""
        lacking = [name for name, each in self._promoters.items() if each.lacks(newest or 0)]
        return newest or 0, lacking if newest is not None else [], self._last // 2 * 2 + 1

    def wait(self, timeout_s: float | None) -> None:
        """Return once nothing is under way. Raises WaitTimeout."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for promoter in self._promoters.values():
            promoter.wait(None if until is None else max(0.0, until - time.monotonic()))

    def rewind(self, step: int) -> set[int]:
        """Rank 0: give up what is newer than `step` at all levels."""
        return {given_up for each in self._promoters.values() for given_up in each.rewind(step)}

    def close(self) -> None:
        for promoter in self._promoters.values():
            promoter.close()
