"""Keeps the session of a Checkpointer until it has ended, even if the Checkpointer is gone.

    close()                    ends it: on the keeper's thread, while the caller waits
    the last reference goes    the same in the background: accepted saves are committed, and the
                               run's lock, threads and memory are released
    the program ends           waits for it (ending)

Invariants: an accepted save is finished although its Checkpointer is gone. The gate stays before
the updates until the save is staged. Ctrl-C while close() waits ends the copies to other levels,
and everything else is still released. Dropping a Checkpointer takes no lock and starts no thread,
because that can happen inside any allocation, on any thread. A later Checkpointer of the run in
this process waits for a dropped one. It also gets the run from one that only a reference cycle, or
the traceback of an old error, keeps alive.

Not here: what is released, and in which order (opening).
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, ModuleType, TracebackType
from typing import Any, Generic, Protocol, TypeVar

from statehold.checkpoint.save.gate import Gate
from statehold.observe.background_log import BackgroundLog
from statehold.process.ending import forget, remember
from statehold.process.worker import Thread
from statehold.ranks.preemption import Preemption

# -- the keeper ------------------------------------------------------------------------------------


class Kept(Protocol):
    """The session that a keeper keeps."""

    @property
    def has_saved(self) -> bool:
        """Whether a save, or another change of the run, was asked for."""

    def stop_copies(self) -> None:
        """Let copies to other levels end unfinished. Returns at once."""

    def close(self, *, flush: bool, alike: bool = True) -> None:
        """End it, and release everything."""


K = TypeVar("K", bound=Kept)

# Those of this process that have not ended. One operation at a time is atomic.
keepers: list[Keeper[Any]] = []


class Keeper(Generic[K]):
    """Ends `opened` once. `owner`: the Checkpointer that has it, as long as it is alive.

    `is_dropped`: it ends although nobody has called close(). A Checkpointer that finds this true is
    alive, so another one has taken the run over.
    """

    def __init__(self, run: str, opened: K, gate: Gate, owner: weakref.ref[Any]) -> None:
        self.run = os.path.realpath(run)
        self.preemption: Preemption | None = None
        self.is_dropped = False
        self._opened: K | None = opened
        self._gate: Gate | None = gate  # None once it has ended
        self._owner = owner
        self._log = BackgroundLog()
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._asked: SimpleQueue[Callable[[K], None]] = SimpleQueue()
        self._thread = Thread(self._serve, "statehold-keeper")
        keepers.append(self)
        try:
            self._thread.start()
        except BaseException:
            keepers.remove(self)
            raise
        remember(self)

    @property
    def is_ours(self) -> bool:
        """False in a fork, which has neither the threads nor the lock."""
        return os.getpid() == self._pid

    def close(self, end: Callable[[K], None]) -> None:
        """Run `end`, and wait; raises what it raises. Only the first call counts."""
        self._asked.put(end)
        try:
            self._thread.join()
        except BaseException:  # Ctrl-C: no patience for copies; a second one does not wait
            opened = self._opened
            if opened is not None:
                opened.stop_copies()
            self._thread.join()
            raise
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def drop(self) -> None:
        """End it in the background. Called by a finalizer, on any thread."""
        if not self.is_ours:
            return
        self.is_dropped = True
        if self.preemption is not None:
            self.preemption.abandon()
        self._asked.put(_end_dropped)

    def wait(self) -> None:
        """Return once it has ended."""
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        return self._opened is None

    def has(self, opened: Kept) -> bool:
        """Whether it keeps this."""
        return self._opened is opened

    def is_left_behind(self) -> bool:
        """Whether its Checkpointer is still alive, but nobody can use it any more."""
        return is_only_in_tracebacks(self._owner)

    def take(self) -> None:
        """End it, although its Checkpointer is alive, which raises ClosedError from now on."""
        self.drop()
        owner = self._owner()
        if owner is not None:
            forget(owner)

    def _end(self) -> None:
        """The program ends. A Checkpointer that is alive closes itself."""
        if self.is_dropped and self.is_ours:
            self._thread.join()

    def _serve(self) -> None:
        end = self._asked.get()
        opened = self._opened
        assert opened is not None
        try:
            if self.is_dropped:
                self._prepare_to_end(opened)
            end(opened)
        except BaseException as error:
            self._error = error
            if self.is_dropped:
                self._log.error("%s: cannot end a dropped Checkpointer\n%s", self.run, error)
        finally:
            if self.is_dropped and self._gate is not None:
                self._gate.retire()
            # The finalizer holds this object as long as the Checkpointer lives. The gate refers to
            # saves, and the error of a save to functions that have the Checkpointer.
            self._gate = self._opened = None
            del opened, end
            keepers.remove(self)
            forget(self)

    def _prepare_to_end(self, opened: K) -> None:
        if opened.has_saved:
            self._log.info(
                "%s: a Checkpointer was dropped without close(); statehold finishes its saves in "
                "the background", self.run,
            )  # fmt: skip
        if self.preemption is not None:
            self.preemption.part()


def _end_dropped(opened: Kept) -> None:
    opened.close(flush=True, alike=False)


def wait_for_dropped(run: str) -> None:
    """Wait for Checkpointers of the run that were dropped."""
    for each in _of_run(run):
        if each.is_dropped:
            each.wait()


def others_of(run: str, taker: Kept) -> list[Keeper[Any]]:
    """Other users of the run in this process, open or still ending."""
    return [each for each in _of_run(run) if not each.has(taker)]


def make_way(others: list[Keeper[Any]]) -> bool:
    """End the users that nobody can reach any more, and wait for them; whether any has ended.

    A user may end by itself at any time, so ask for `others` before the run is found to be busy.
    """
    if not others:
        return False
    gc.collect()
    ending = [each for each in others if each.is_dropped or each.has_ended]
    for each in others:
        if each not in ending and each.is_left_behind():
            each.take()
            ending.append(each)
    for each in ending:
        each.wait()
    return bool(ending)


def _of_run(run: str) -> list[Keeper[Any]]:
    path = os.path.realpath(run)
    return [each for each in list(keepers) if each.is_ours and each.run == path]


def _forget_all() -> None:
    """In a fork."""
    keepers.clear()


os.register_at_fork(after_in_child=_forget_all)


# -- what only old errors hold ---------------------------------------------------------------------
# After a failed cell, a notebook keeps the error. Its traceback keeps the variables of every
# function that the error has left. An object that nothing else holds is not in use.
#
# This counts references as the cyclic collector does. An object, and everything that leads to it,
# is unused if its references come only from each other and from tracebacks. An object that a
# running function, a module or native code holds is in use. If the question cannot be decided soon,
# the object counts as in use.


HOLDERS_MAX = 300
# The references to an item of a list while it is counted: the list's, and the argument's.
_OWN_REFERENCES = 2


def is_only_in_tracebacks(target: weakref.ref[Any]) -> bool:
    """Whether only tracebacks of errors keep the object alive. True if it is gone."""
    value = target()
    if value is None:
        return True
    found, tracebacks = [value], list[TracebackType]()
    del value
    begin = 0
    while begin < len(found):
        end = len(found)
        more = _holders(found, begin, tracebacks)
        if more is None or len(found) + len(more) > HOLDERS_MAX:
            return False
        found += more
        del more
        begin = end
    return not _are_held_elsewhere(found, tracebacks)


def _holders(found: list[Any], begin: int, tracebacks: list[TracebackType]) -> list[Any] | None:
    """The referrers of the objects from `begin` on, without tracebacks; None: one of them is in
    use."""
    asked = tuple(found[begin:])  # from Python 3.13 on, the arguments of the call are found, too
    ours = {id(found), id(tracebacks), id(asked), *map(id, found), *map(id, tracebacks)}
    running = _running_functions()
    more: list[Any] = []
    for holder in gc.get_referrers(*asked):
        if id(holder) in ours or _is_own_frame(holder):
            continue
        if isinstance(holder, TracebackType):
            tracebacks.append(holder)
        elif id(holder) in running or _is_lasting(holder):
            return None
        else:
            more.append(holder)
    return more


def _is_own_frame(holder: object) -> bool:
    return isinstance(holder, FrameType) and holder.f_globals is globals()


def _running_functions() -> set[int]:
    """Their frames, if the collector sees frames as holders of their variables. From Python 3.11 on
    it does not see the variables of a running function, which then count as held elsewhere."""
    ids: set[int] = set()
    if sys.version_info >= (3, 11):
        return ids
    newest: FrameType | None
    frame: FrameType | None
    for newest in sys._current_frames().values():
        frame = newest
        while frame is not None:
            ids.add(id(frame))
            frame = frame.f_back
    newest = frame = None  # one of them is this function's own
    return ids


def _is_lasting(holder: object) -> bool:
    """Whether it lives as long as the program: a module, its variables, a class."""
    is_namespace = type(holder) is dict and "__builtins__" in holder
    return is_namespace or isinstance(holder, ModuleType | type)


def _are_held_elsewhere(found: list[Any], tracebacks: list[TracebackType]) -> bool:
    """Whether an object has more references than those from the others and from tracebacks."""
    known = {id(each) for each in found}
    holders: tuple[Any, ...] = (*found, *tracebacks)
    inside = Counter(
        id(held) for holder in holders for held in gc.get_referents(holder) if id(held) in known
    )
    del holders
    return any(
        sys.getrefcount(found[index]) - _OWN_REFERENCES > inside[id(found[index])]
        for index in range(len(found))
    )
