"""The deadline: after a signal or a call, the process ends within so many seconds.

    Deadline(within_s) -> install(SIGTERM, ...) -> [signal, ask() or end_in()] -> is_asked
        -> left() -> SystemExit(LEFT)
        -> the deadline: the process ends, LATE

Invariants: the process ends in time after the signal, whatever its threads are doing, even if the
main thread does not come to run Python. Never half a step: the next job clears a step that is not
committed by then. A fork of the process takes no part: SIGTERM ends it, because a parent ends its
workers so. Other signals that are watched do nothing there, because they may be sent to the whole
group, and training to the last save needs the workers. Nothing here logs, because a log that blocks
must not keep the process. `on_asked` is called once the end is set, and must not block
either.
Not here: which save is the last, the messages of the ranks (exchange).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from statehold.errors import UsageError, refused, shown
from statehold.process.worker import Thread
from statehold.units import WAIT_S_MAX

LEFT, LATE = 75, 76

# A process does not end at once: its threads need a processor, and its memory is freed first.
MARGIN = 0.25  # of the time there is
MARGIN_S_MAX = 2.0
_POLL_S_MAX = 2_000_000.0  # poll() takes its milliseconds as a C int

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

_active: Deadline | None = None


class Deadline:
    """Watches for signals that ask this process to leave within `within_s` seconds.

    clock, end: tests give others. The clock is looked at on the watcher's thread, which calls `end`
        with the exit code.
    """

    def __init__(
        self,
        within_s: float,
        on_asked: Callable[[str], None] = lambda why: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._within_s = _checked(within_s)
        self._on_asked = on_asked
        self._clock = clock
        self._end = end
        self._pid = os.getpid()
        self._end_s: float | None = None
        self._guard = threading.RLock()  # a signal's handler may run in the middle of ask()
        self._code = LATE
        self.watched: dict[signal.Signals, Handler] = {}  # and the handlers before
        self._is_removed = self.is_abandoned = False
        self._wake_read = self._wake_write = -1
        self._watcher = Thread(self._watch, "statehold-leave")

    def install(self, *signals: signal.Signals) -> None:
        """Begin to watch. Only in the main thread, as Python requires."""
        global _active
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("leave_on() must be called in the main thread")
        _check_signals(signals)
        if _active is not None and _active.is_abandoned:
            _active.remove()
        if _active is not None and _active._pid == os.getpid():
            raise UsageError(
                "a Checkpointer of this process already watches for signals",
                hint="call leave_on() once, on one Checkpointer of a process; its close() ends it",
            )
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _active = self
        for each in dict.fromkeys(signals):
            self.watched[each] = signal.signal(each, self._handle)
        # Written by the signal itself, while the main thread may be inside a long native call.
        before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        if before != -1:  # another library's: then the handlers must suffice
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        self._watcher.start()

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to leave."""
        return self._end_s is not None

    def ask(self, within_s: float | None = None, why: str = "leave()") -> None:
        """The effect of a signal: end in `within_s` seconds, or as long as a signal gives."""
        within_s = self._within_s if within_s is None else _checked(within_s)
        self.end_in(within_s - min(MARGIN * within_s, MARGIN_S_MAX), why)

    def end_in(self, seconds: float, why: str = "another rank") -> None:
        """End this process in so many seconds, or sooner if an earlier warning says so. why: the
        origin."""
        if os.getpid() != self._pid or self._is_removed:
            return
        with self._guard:
            end_s = self._clock() + max(0.0, seconds)
            self._end_s = end_s if self._end_s is None else min(self._end_s, end_s)
        self._wake()
        self._on_asked(why)

    def remaining_s(self) -> float:
        """The time that is left, once asked, before this process ends itself."""
        assert self._end_s is not None
        return max(0.0, self._end_s - self._clock())

    def safe(self) -> None:
        """The last save is committed. From now on the exit code says so."""
        self._code = LEFT

    def left(self) -> SystemExit:
        """The exception to raise when nothing is left to do.

        The deadline still holds, because others' exit handlers may take their time.
        """
        return SystemExit(self._code)

    def remove(self) -> None:
        """Stop watching, unless this process was asked to leave; restore the signal handlers.

        In the main thread only.
        """
        global _active
        if self.is_asked or os.getpid() != self._pid or _active is not self:
            return
        _active = None
        for each, handler in self.watched.items():
            signal.signal(each, handler)
        self.stop_waking()
        self._is_removed = True
        self._wake()
        self._watcher.join()
        with self._guard:  # no other thread writes into what has this number next
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1

    def _wake(self, number: int = 0) -> None:
        with self._guard, contextlib.suppress(OSError):  # full: then it still wakes; or removed
            os.write(self._wake_write, bytes([number]))

    # -- from signals ----------------------------------------------------------------------

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._wake(number)
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop_waking(self) -> None:
        """Have signals write nothing into the pipe any more."""
        wakes = signal.set_wakeup_fd(-1)
        if wakes != self._wake_write:
            signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    # -- on the thread ---------------------------------------------------------------------

    def _watch(self) -> None:
        watched = bytes(int(each) for each in self.watched)
        waiting = select.poll()
        waiting.register(self._wake_read, select.POLLIN)
        while not self._is_removed:
            left_s = self.remaining_s() if self.is_asked else None
            if left_s == 0.0:
                self._end(self._code)
                return  # only in a test
            waiting.poll(None if left_s is None else min(left_s, _POLL_S_MAX) * 1000)
            with contextlib.suppress(BlockingIOError):
                numbers = os.read(self._wake_read, 64)
                asking = [number for number in numbers if number in watched]
                if asking and not self.is_asked:
                    self.ask(why=signal.Signals(asking[0]).name)


# -- forks -----------------------------------------------------------------------------------------
# A signal for a fork waits until the fork has stopped waking its parent. So it is not lost when
# Python there forgets the signals of the parent.


_forking = threading.local()


def _hold() -> None:
    """Before a fork."""
    watched = {} if _active is None else _active.watched
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _let_go_in_fork() -> None:
    if _active is not None:
        _active.stop_waking()
    _let_go()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go_in_fork)


# -- what a caller gives ---------------------------------------------------------------------------


def _check_signals(given: Sequence[object]) -> None:
    known = [each for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP)]
    if not all(each in known for each in given):
        raise UsageError(
            "leave_on() cannot watch for this signal, so nothing has changed",
            facts={"expected": "such as signal.SIGTERM, signal.SIGUSR1", "got": shown(given)},
        )


def _checked(within_s: float) -> float:
    is_number = isinstance(within_s, int | float) and not isinstance(within_s, bool)
    if not is_number or not within_s > 0:
        expected = "a number above 0, such as 25"
        raise refused("the time to leave must be a number of seconds", expected, shown(within_s))
    return min(within_s, WAIT_S_MAX)
