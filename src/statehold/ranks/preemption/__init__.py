"""Preemption: the warning of a scheduler becomes one last save, and an end before the deadline.

    deadline    signals, and the end of this process
    exchange    which step is the last, the same on all ranks, and how the ranks tell each other

Here both come together, as the Checkpointer uses them. A process that is alone takes the next save
as the last. Several ranks all take the same one. The last save goes to the first level, which is
the nearest and so the fastest, or to the next one that can take it. From there it goes to all
others at once, while there is time.

The warning itself changes nothing, because the state may be half updated. It makes one of the next
steps the last, and the save of that step ends the process. Exit codes: LEFT, the last save is
committed; LATE, it is not known to be committed, and earlier committed steps are safe. LEFT is
the EX_TEMPFAIL of sysexits.h: run it again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import NoReturn

from statehold.errors import StateholdError
from statehold.observe.background_log import BackgroundLog
from statehold.process.warn import logger
from statehold.ranks.peers import Peers
from statehold.ranks.preemption.deadline import LATE as LATE
from statehold.ranks.preemption.deadline import LEFT as LEFT
from statehold.ranks.preemption.deadline import Deadline
from statehold.ranks.preemption.exchange import Hearing, LastStep

Wait = Callable[[float], object]  # returns, or raises, within so many seconds


class Preemption:
    """From the warning to the end, on one rank. hearing: of other ranks; None where it is alone."""

    def __init__(self, within_s: float, peers: Peers | None) -> None:
        self._has_ended = self._was_logged = False
        self._log = BackgroundLog()  # no line may keep the process
        self._last = LastStep()
        self._deadline = Deadline(within_s, self._asked)
        self.hearing = Hearing(peers, self._deadline, self._last) if peers else None

    def install(self, *signals: signal.Signals) -> None:
        """Begin to watch. In the main thread only."""
        self._deadline.install(*signals)
        if self.hearing is not None:
            self.hearing.start()

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to leave, or has heard that another rank was."""
        return self._deadline.is_asked

    def ask(self, within_s: float | None) -> None:
        """Act as if a signal had come. From any thread."""
        self._deadline.ask(within_s)

    def is_last(self, step: int) -> bool:
        """Whether the save of `step` is the last. All of several ranks ask for the same steps."""
        if self.hearing is None or self.hearing.is_deaf:
            return self._deadline.is_asked
        return self._last.is_last(step)

    @property
    def has_ended(self) -> bool:
        """Whether the last save is over, and everything was done that there was time for."""
        return self._has_ended

    def begin_again(self) -> None:
        """The run is restored or rewound: smaller steps may follow."""
        self._last.begin_again()

    def end(self, committed: Wait, copied: Wait, outcome: Callable[[], str]) -> NoReturn:
        """Wait until the last save is committed, then until all levels have it; leave.

        outcome: says which levels have the step, for the log.
        """
        deadline, is_safe = self._deadline, False
        try:
            committed(deadline.remaining_s())
            deadline.safe()
            is_safe = True
            copied(deadline.remaining_s())
        except StateholdError as error:
            self._log.error("leaving before everything was done\n%s", error)
        try:
            if self.hearing is not None:
                self.hearing.part(time.monotonic() + deadline.remaining_s())
        except StateholdError:  # the store ended before us
            pass
        self._has_ended = True
        left = deadline.left()
        if is_safe:
            self._log.warning("%s; leaving with exit code %s", outcome(), left.code)
        raise left

    def failed(self, error: BaseException | None) -> None:
        """Training ended with `error`.

        While a job leaves, that is most often the end of another rank, in a collective, or that of
        a worker that got the warning, too. It is logged, and this rank ends as the others do.
        Nothing is saved: an update may have been under way.
        """
        if self.is_asked and isinstance(error, Exception):
            logger.error("an exception while leaving", exc_info=error)
            raise self._deadline.left() from error

    def part(self) -> None:
        """This rank has no more steps, so the others must not wait for it."""
        if self.hearing is not None:
            self.hearing.stop()

    def abandon(self) -> None:
        """Let another Checkpointer of this process watch: this one is gone. From any thread."""
        self._deadline.is_abandoned = True

    def remove(self) -> None:
        """Stop watching, unless this process was asked to leave; restore the signal handlers.

        In the main thread only.
        """
        self._deadline.remove()

    def _asked(self, why: str) -> None:
        """May run on any thread, and waits for nothing."""
        if not self._was_logged:
            self._was_logged = True
            self._log.warning(
                "asked to leave by %s: the next save is the last; this process ends in %.3g s", why,
                self._deadline.remaining_s(),
            )  # fmt: skip
        if self.hearing is not None:
            self.hearing.wake()
