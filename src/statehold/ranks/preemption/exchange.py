"""How ranks tell each other that they leave, if the warning has reached only some.

    a rank that is asked   posts `asked`, with the seconds that are left
    every rank             looks for it; then stops at its step (LastStep) and posts that step
    rank 0                 reads them all, posts the newest of them, and the least time of all
    every rank             reads that, and its training continues to the last step: the first one
                           after all steps that some rank has passed

Invariants: no collective, and nothing that training waits for: this is a thread, so no wait lasts
for ever. If all ranks ask for the same steps in the same order, they all get the same answers.

Not here: when the time of a rank is over (deadline).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from statehold.errors import StateholdError, StorageError
from statehold.process.worker import Thread
from statehold.ranks.peers import Peers
from statehold.ranks.preemption.deadline import Deadline

# -- the messages ----------------------------------------------------------------------------------
# A rank that waits for the decision (in is_last) waits only for threads of this kind. Each posts
# without its training thread. So a decision comes as soon as all ranks live and their stores
# answer, even while their training threads wait for each other in a collective. The ranks wait for
# a dead or silent rank until the deadline, which ends the process. No last save could be committed
# without that rank.
#
# While no rank leaves, this looks for one key, `INTERVAL_S` apart. On large jobs it looks so rarely
# that all ranks together ask at most QUESTIONS_PER_S. A blocking wait would be cheaper still, but
# could not be ended when the process ends.
#
# A rank that closes posts its step, so that the others do not wait for it. If the store is gone,
# and with it rank 0, each rank leaves by itself.


T = TypeVar("T")

INTERVAL_S = 0.25
QUESTIONS_PER_S = 2000
# Once a rank leaves, answers are looked for more often.
HURRY = 10

ASKED, DECIDED = "leave/asked", "leave/decided"


class _Over(Exception):
    """This thread is no longer needed."""


class Hearing:
    """The messages of one rank to its `peers` and from them, on a `thread` of its own."""

    def __init__(self, peers: Peers, deadline: Deadline, last: LastStep) -> None:
        self.peers = peers
        self._deadline = deadline
        self._last = last
        self._interval_s = max(INTERVAL_S, peers.world_size / QUESTIONS_PER_S)
        self._woken: SimpleQueue[None] = SimpleQueue()  # a handler may wake it inside wake()
        self._is_over = False
        self._has_answered = self._has_decided = False
        self.is_deaf = False
        # Not a daemon: a thread inside a call of the store must not exist when the process ends.
        self.thread = Thread(self._run, "statehold-hear", daemon=False)

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        """Look at once: this process was asked to leave, or ends."""
        self._woken.put(None)

    def stop(self) -> None:
        """Post the step of this rank, and end."""
        self._is_over = True
        self.wake()
        self.thread.join()

    def part(self, until_s: float) -> None:
        """All is done here. Rank 0 stays until all ranks are done, because its end may be the end
        of the store."""
        self.peers.post(f"leave/done-{self.peers.rank}", b"")
        others = range(1, self.peers.world_size) if self.peers.rank == 0 else ()
        for rank in others:
            while self.peers.peek(f"leave/done-{rank}") is None and time.monotonic() < until_s:
                time.sleep(self._interval_s / HURRY)

    # -- on the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._await_asked()
            self._agree()
        except _Over:
            with contextlib.suppress(StateholdError):
                self._say_goodbye()
        except StateholdError:  # the save that fails for the same reason reports it
            self.is_deaf = True
            if self._deadline.is_asked:
                self._last.decide(self._last.freeze())

    def _await_asked(self) -> None:
        while self.peers.token is None and not self._last.has_begun:
            self._pause(self._interval_s)  # no rank waits for one that has only just been opened
        self._talk(self.peers.open)
        looked_s = time.monotonic()
        while not self._deadline.is_asked:
            note, now_s = self._talk(lambda: self.peers.peek(ASKED)), time.monotonic()
            if note is not None:
                return self._deadline.end_in(_left_s(note, now_s - looked_s))
            looked_s = now_s
            self._pause(self._interval_s)
        note = json.dumps([self._deadline.remaining_s(), time.time()]).encode()
        return self._talk(lambda: self.peers.post(ASKED, note))

    def _agree(self) -> None:
        self._tell_seen()
        if self.peers.rank == 0:
            messages = [self._await(f"leave/{rank}") for rank in range(self.peers.world_size)]
            self._decide([json.loads(each) for each in messages])
        passed, left_s = json.loads(self._await(DECIDED))
        if left_s is not None:
            self._deadline.end_in(left_s)
        self._last.decide(tuple(passed))

    def _tell_seen(self) -> None:
        left_s = self._deadline.remaining_s() if self._deadline.is_asked else None
        message = json.dumps([self._last.freeze(), left_s]).encode()
        self._talk(lambda: self.peers.post(f"leave/{self.peers.rank}", message))
        self._has_answered = True

    def _decide(self, answers: list[tuple[list[int], float | None]]) -> None:
        times = [left_s for _, left_s in answers if left_s is not None]
        decision = [max(seen for seen, _ in answers), min(times, default=None)]
        self._talk(lambda: self.peers.post(DECIDED, json.dumps(decision).encode()))
        self._has_decided = True

    def _say_goodbye(self) -> None:
        """The others may still be asked to leave, or are about to read where this rank is."""
        if self.peers.token is None:
            return
        seen = self._last.freeze()
        here = json.dumps([seen, None]).encode()
        if not self._has_answered:
            self.peers.post(f"leave/{self.peers.rank}", here)
        if self.peers.rank == 0 and not self._has_decided:
            self.peers.post(DECIDED, here)
        self._last.decide(seen)

    # -- talking ---------------------------------------------------------------------------

    def _await(self, name: str) -> bytes:
        while True:
            note = self._talk(lambda: self.peers.peek(name))
            if note is not None:
                return note
            self._pause(self._interval_s / HURRY)

    def _talk(self, action: Callable[[], T]) -> T:
        """Call the board, again for as long as a shared directory does not answer."""
        while True:
            try:
                return action()
            except StorageError:
                self._pause(self._interval_s)

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(Empty):
            self._woken.get(timeout=seconds)
            while True:
                self._woken.get_nowait()
        if self._is_over or not threading.main_thread().is_alive():
            raise _Over


def _left_s(note: bytes, unseen_s: float) -> float:
    """The rest of the time that another rank has posted, no longer than `unseen_s` ago.

    Within that span its clock, which may be another host's, is trusted.
    """
    left_s, at_s = json.loads(note)
    return float(left_s - min(max(0.0, time.time() - at_s), unseen_s))


# -- which step is the last ------------------------------------------------------------------------
# A rank has answered no for the steps that it had seen, which are at most the maximum. A newer step
# waits for the maximum. So nothing is answered before it is decided, and on all ranks the answer is
# no for all steps up to the maximum. Restoring and rewinding go back in steps, so places are
# counted again after them.


# How often the run was restored or rewound, and the step.
Position = tuple[int, int]


class LastStep:
    """The knowledge of one rank about the last step. Thread-safe.

        at each step                  is_last(step)     no, at once; noted as seen
        once a rank is asked to leave freeze()          the newest step it has seen; from now on a
                                                        newer one waits
        then, max over ranks          decide(newest)    newer steps than that are the last

    An exception may come between any two instructions of the trainer, as after Ctrl-C. So its locks
    are written in C: those of a Condition would stay taken, and the thread of Hearing would hang.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a signal's handler may save inside
        self._decided = threading.Lock()  # free once that is decided
        self._decided.acquire()
        self._era = 0
        self._seen: Position = (0, -1)
        self._is_frozen = False
        self._passed: Position | None = None

    @property
    def has_begun(self) -> bool:
        """Whether is_last() was called."""
        return self._seen[1] >= 0

    def begin_again(self) -> None:
        """The run is restored or rewound, on all ranks."""
        with self._guard:
            self._era += 1

    def is_last(self, step: int) -> bool:
        """Whether the save of `step` is the last one; waits while that is being decided."""
        with self._guard:
            here = self._era, step
            if not self._is_frozen:
                self._seen = max(self._seen, here)
                return False
            if here <= self._seen:
                return False
        with self._decided:
            pass
        return self._passed is not None and here > self._passed

    def freeze(self) -> Position:
        """The newest step that was asked for here; newer ones wait from now on."""
        with self._guard:
            self._is_frozen = True
            return self._seen

    def decide(self, passed: Position) -> None:
        """The newest step that was asked for on any rank; the first decision counts."""
        if self._passed is None:
            self._passed = passed
            self._decided.release()
