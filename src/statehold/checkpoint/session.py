"""Session: the work of a Checkpointer while its ranks stay the same, and its end.

    parts      Saver         what a session has open, and one call of save() with it; the pipeline
                             commits in the background
    restore    RestoreCalls  one call of restore()
    rewind, flush, status    work of the levels, on all ranks together

Invariants: nothing on the storage changes before prepare_saving(), and only one job changes it.
After any error, everything is closed in the opposite order of opening. The runtime outlives a
session: another membership gets another session on the same staging memory.

Not here: how a session is opened (opening).
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial

from statehold.checkpoint.keeper import make_way, others_of
from statehold.checkpoint.levels.promoting import LevelStatus
from statehold.checkpoint.restore.call import RestoreCalls
from statehold.checkpoint.save.call import Saver
from statehold.checkpoint.save.handle import Work, forked
from statehold.checkpoint.save.pipeline import SAVES_IN_FLIGHT_MAX
from statehold.errors import StateholdError, failing, no_such_step
from statehold.process.warn import logger
from statehold.ranks.preemption import Preemption
from statehold.ranks.rounds import Round, called, everyone, led, together

# -- the session -----------------------------------------------------------------------------------


# How long a rank that ends with an error waits for the others to flush.
STRAGGLERS_S = 10.0

# The share of the time that is reserved for reporting a failed wait to the other ranks.
MEETING_SHARE = 0.2
MEETING_S_MAX = 10.0


class Countdown:
    """How many of so many seconds are left; None if there is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    def __call__(self, less_s: float = 0.0) -> float | None:
        if self._until is None:
            return None
        return max(0.0, self._until - less_s - time.monotonic())


class Session:
    """The open `parts` of one rank of a job. Not thread-safe.

    has_saved: whether a save, or another change of the run, was asked for.
    """

    def __init__(self, parts: Saver, owned: contextlib.ExitStack) -> None:
        """owned: closes the parts, in the opposite order; close() does, too."""
        self.runtime, self.levels = parts.runtime, parts.levels
        self.peers, self.rank = parts.peers, parts.rank
        self.watch, self.schedule, self.pipeline = parts.watch, parts.schedule, parts.pipeline
        self.parts = parts
        self._owned = owned
        self._pid = os.getpid()
        self._is_prepared = self.has_saved = False
        self._flushes = 0
        parts.prepare = self.prepare_saving
        self.restores = RestoreCalls(parts, self.claim)

    # -- saving ----------------------------------------------------------------------------

    def prepare_saving(self) -> None:
        """Create the run directory; the leading rank locks it and clears leftovers of a crash."""
        self.has_saved = True
        if not self._is_prepared:
            others = others_of(self.parts.run, self)
            self.levels.prepare(partial(make_way, others))
            # An agent could not end its work: continue it. On several ranks the others do not know
            # it, so the next step goes to every level instead.
            if self.levels.near[0].was_taken_over and self.peers is None:
                self.pipeline.ahead(self.levels.promotions.catch_up)
            elif self.levels.near[0].was_taken_over:
                self.levels.promotions.hurry()
            self._is_prepared = True
        if not self.levels.notes.stay:
            self.levels.notes.write()
        if self.parts.companion.agent is not None:
            self.parts.companion.keep(self.pipeline.ahead)

    # -- restoring -------------------------------------------------------------------------

    def claim(self, step: int) -> bool:
        """Make sure that nobody changes a step from now on.

        Lets this job's saves and copies end, and locks each directory that has the step. False if
        another job has a lock.
        """
        self.wait_idle(None)
        return self.levels.claim(step)

    # -- the run ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are committed at any level. All ranks call this if each host has its own
        level.

        A process that is alone looks whether their files are there. Of several ranks, each would
        read the records of all.
        """
        found = self.levels.nearest(self.pipeline.drain).steps()
        return found if self.peers else self.levels.whole(found)

    def rewind(self, step: int, *, is_elsewhere: bool = False) -> list[int]:
        """Discard the steps newer than `step` at every level. All ranks call this together.

        Raises StepNotFoundError if `step` is not there, because the run could be left without one.
        A level that cannot be reached fails the call before any level has lost a step.
        is_elsewhere: the state may have been loaded from a copy that does not belong to the run.
        """
        called(self.peers, f"rewind({step})", lambda: None)
        with self.levels.protected(step):  # from the saves and copies that are under way
            together(self.peers, partial(self._ready_to_rewind, step))
            if not is_elsewhere:
                self._check_whole(step)
            failed = failing(f"the rewind to step {step}; some steps may be discarded")
            found = everyone(self.peers, failed(partial(self.levels.rewind, step)))
        discarded = sorted({each for steps in found for each in steps})
        self.levels.forget(discarded)
        self.schedule.turns.last_step = step
        return discarded

    def _check_whole(self, step: int) -> None:
        """Raise StepNotFoundError on all ranks if no level has all files of the step."""
        steps = self.levels.nearest(self.pipeline.drain).steps()
        if not led(self.peers, lambda: self.levels.whole([step])):
            error = no_such_step(step, self.levels.run, steps)
            if step in steps:
                error.with_fact("found", "a part of it: files are missing, or cut")
            error.hint = "nothing was discarded: rewind to a step that is there"
            raise error

    def _ready_to_rewind(self, step: int) -> None:
        self.parts.trainer.raise_failures()
        self.check_process()
        with failing(f"the rewind to step {step}; nothing was discarded"):
            self.prepare_saving()
            self.wait_idle(None)
            self.levels.prepare_all()

    def status(self) -> list[LevelStatus]:
        """The status of all levels."""
        name = self.levels.near[0].name
        error, interval = self.parts.level_choice.first_error, self.schedule.interval(name)
        return self.levels.status(LevelStatus(name, error=error, interval=interval))

    def leave(self, last: Work, preemption: Preemption) -> None:
        """Have `preemption` end this process, once the `last` save has ended."""
        outcome = partial(self.levels.having, last.save.step, last.place)
        preemption.end(partial(last.save.wait, "committed"), self.wait_idle, outcome)

    def wait_idle(self, timeout_s: float | None) -> None:
        """Return once no save and no copy is under way. Raises WaitTimeout."""
        left = Countdown(timeout_s)
        self.pipeline.drain(left())
        self.levels.promotions.wait(left())

    def flush(self, timeout_s: float | None, meet_s: float | None = None) -> None:
        """Copy the newest step to all levels. All ranks call this together.

        After the saves and copies under way, ranks of several hosts look where files are. Then rank
        0 says in a round which levels lack the step. With a deadline no rank stays longer, even if
        others never come. These rounds have numbers of their own, so a rank that has missed a flush
        disturbs no later one.

        meet_s: how long to wait for ranks that may not come; None: as long as usual. A rank that
            leaves after the first round is missing in the next ones.
        """
        self._flushes += 1
        left, number, peers = Countdown(timeout_s), 3 * self._flushes, self.peers
        if meet_s is not None:
            self.wait_idle(left())  # ends on all ranks at about the same time
        kept_s = min(MEETING_SHARE * (timeout_s or 0.0), MEETING_S_MAX) if peers else 0.0
        first = Round("flush", number, meet_s or left())
        together(peers, lambda: self.wait_idle(left(kept_s)), first)
        self.levels.look(Round("flush", number + 1, meet_s or left()))
        self.levels.promotions.catch_up(Round("flush", number + 2, meet_s or left()))
        self.levels.promotions.wait(left())

    # -- the end ---------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raises ClosedError in a fork, which does not have the threads for the work."""
        if os.getpid() != self._pid:
            raise forked("this Checkpointer", self._pid)

    def stop_copies(self) -> None:
        """Let copies to other levels end unfinished. Returns at once."""
        self.levels.promotions.stop()

    def part(self, number: int, error: BaseException) -> None:
        """This rank ends because of `error`. Other ranks that come to the save `number`, or are at
        one more by now, need not wait for it."""
        if self.peers is not None and self.peers.token is not None:
            for missed in range(number, number + SAVES_IN_FLIGHT_MAX):
                self.pipeline.give_up(missed, error)

    def close(self, *, flush: bool, alike: bool = True) -> None:
        """End the session. flush: copy the newest step to all levels before.

        alike: all ranks call this. Otherwise this rank waits only a few seconds for the others.
        """
        # All of several ranks flush, even if one of them could not prepare to save.
        has_saved = self._is_prepared if self.peers is None else self.has_saved
        try:
            self.pipeline.finish_staging()
            if flush and has_saved and self.levels.promotions.promoters:
                self.flush(None, None if alike else STRAGGLERS_S)
        except StateholdError as error:  # at the end no caller is left to get the error
            logger.warning("could not copy the newest step to all levels\n%s", error)
        finally:
            self._owned.close()
