"""The gate: nothing updates the state while bytes of it are still being copied.

    Gate       stands before every update that torch makes (tensors/updates), and waits until every
               save under way is staged
    Trainer    the thread that trains, as save() sees it: its gate, its tensors, errors to be raised

Invariants: a failed save opens the gate, and training continues. The checkpointer's next call
raises the error. No optimizer raises it.

Not here: how an update is seen before it runs (tensors/updates), copies from devices, which a
stream waits for (tensors/devices/copying).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from statehold.checkpoint.save.handle import Passage
from statehold.errors import PeerFailedError, WaitTimeout
from statehold.observe.background_log import log_once
from statehold.process.reentry import enter
from statehold.process.warn import logger
from statehold.tensors import updates
from statehold.tensors.captured import Capture
from statehold.tensors.columns import Tensors
from statehold.tensors.devices.graphs import UpdateStreams
from statehold.tensors.devices.relay import named_failures
from statehold.tensors.found import Seen
from statehold.tensors.kinds import capture
from statehold.tensors.stepping import Gradients, Stepping
from statehold.tensors.storable import impl_of

if TYPE_CHECKING:
    from torch import UntypedStorage
    from torch.optim import Optimizer


# -- the gate --------------------------------------------------------------------------------------
# Parameters and optimizer state stay unchanged during forward and backward (DataStates-LLM,
# HPDC'24, section 4). Only the update changes them. So the gate stands before all torch optimizers,
# not only those in the state. A fused optimizer that the state does not name changes parameters
# without moving a version counter, so nothing else would notice. Loops whose update is not a torch
# optimizer call Checkpointer.gate() themselves.
#
# A step() that was compiled in one graph runs past the gate, and the replay of a CUDA graph of
# another library than torch does too. Once there is such an update, save() returns only after its
# copies are made, and logs what to do about it.
#
# Nothing takes the memory away either, from which a save still copies: a storage that is resized or
# shared waits, too.
#
# The gate remembers which optimizers have passed it. Memory that only those change can be copied
# lazily, even if a state has their state_dict() instead of themselves. The gate also sees whether
# gradients wait for the next update, and logs one warning if a step is saved then.


class Pass(Protocol):
    """A way past the gate other than waiting on the host: a stream made to wait instead."""

    def __call__(self, timeout: float | None = 0) -> bool:
        """Order later work after the copies. False if that cannot be done, or if not all copies
        are enqueued in time."""


@dataclass(eq=False)
class HeldSave:
    """What updates wait for. tensors: from which the save copies; gone once it has."""

    save: Passage
    tensors: Callable[[], Tensors | None]
    passing: Pass | None = None

    @property
    def is_staged(self) -> bool:
        # A fork updates a copy, which nobody saves.
        return not self.save.is_of_this_process or self.save.done("staged")

    def copies_from(self, storages: Sequence[int]) -> bool:
        """storages: by impl_of(). No other one has that number as long as the save keeps it."""
        return not self._numbers.isdisjoint(storages)

    @cached_property
    def _numbers(self) -> frozenset[int]:
        tensors = self.tensors()
        return frozenset(map(impl_of, tensors.live.storages if tensors else ()))


class Gate:
    """Holds the updates back until the saves under way are staged.

    held: what updates wait for, by save; saves that were staged since the last update are in it.
    stepping: the optimizers that have passed.
    """

    def __init__(self) -> None:
        # By save. Only single calls of dict change it: threads that train other models pass the
        # gate, too, and a lock could be taken twice by a signal handler that saves.
        self.held: dict[Passage, HeldSave] = {}
        self.stepping = Stepping()
        self.streams = UpdateStreams()
        self._gradients = Gradients()
        self._has_warned = False
        self.waited_s = 0.0  # in all

    def stand(self) -> None:
        """Stand before every update of torch from now on."""
        updates.watch(self)

    def before_update(self, optimizers: Iterable[Optimizer]) -> None:
        """These optimizers are about to step."""
        enter("the step of an optimizer")
        self.wait()
        self.streams.saw()
        for optimizer in optimizers:
            self.stepping.saw(optimizer)
            self._gradients.saw(optimizer)

    def check_gradients(self, step: int) -> None:
        """Log a warning, once, if `step` is saved between backward() and step()."""
        if self._has_warned or not self._gradients.are_waiting():
            return
        self._has_warned = True
        logger.warning(
            "step %d is saved while gradients wait for optimizer.step(), as in the middle of an "
            "accumulation. A step does not hold gradients: a restart from it makes the next update "
            "without these micro-batches. Save right after optimizer.step(). If a GradScaler has "
            "just skipped the update, nothing is missing",
            step,
        )

    def hold_for(self, save: Passage, tensors: Tensors | None = None) -> HeldSave:
        """Hold updates until `save` is staged, or until its `passing`, once it is set, lets them
        through. tensors: those from which it copies, whose storages keep their memory as long."""
        self._forget_staged()
        held = HeldSave(save, (lambda: None) if tensors is None else weakref.ref(tensors))
        self.held[save] = held
        return held

    def wait(self, timeout: float | None = None) -> None:
        """Return once no save still has bytes to copy; `timeout` is in seconds."""
        for held in list(self.held.values()):
            if not (held.is_staged or (held.passing is not None and held.passing())):
                self._wait_staged(held.save, timeout, held.passing)
        self._forget_staged()

    def before_capture(self) -> None:
        """Return once every save is staged. The host waits, and no stream.

        The capture of an update moves version counters. A save that is under way would take that
        for a change.
        """
        for held in list(self.held.values()):
            if not held.is_staged:
                self._wait_staged(held.save)

    def let_go(self, save: Passage) -> None:
        """Hold nothing any more for a save that has not begun."""
        self.held.pop(save, None)

    def before_memory_goes(self, storage: UntypedStorage) -> None:
        """Return once no save copies from there any more."""
        for held in list(self.held.values()):
            if not held.is_staged and held.copies_from([impl_of(storage)]):
                held.save.wait_ended("staged")

    def _wait_staged(
        self, save: Passage, timeout: float | None = None, passing: Pass | None = None
    ) -> None:
        """Wait on the host; with `passing` only until a stream can wait instead."""
        started = time.perf_counter()
        with save.stage("gate"):
            ended = passing is not None and passing(timeout)
            if not ended:
                used = time.perf_counter() - started
                left = None if timeout is None else max(0.0, timeout - used)
                ended = save.wait_ended("staged", left)
        waited_s = time.perf_counter() - started
        self.waited_s += waited_s
        save.add_gate(waited_s)
        if not ended:
            raise WaitTimeout(
                f"step {save.step} was not staged in time",
                facts={"waited": f"{timeout} s", "so far": str(save.stats)},
                hint="do not change the state yet: its bytes are still being copied",
            )

    def wait_or_note(self, timeout: float | None = None) -> None:
        """Before an update by hand: wait. If a CUDA graph is captured, note that it holds the
        update."""
        if not updates.capture([]):
            self.streams.saw()
            self.wait(timeout)

    def wait_if_unseen(self, save: Passage) -> None:
        """If an update may come that the gate does not see: return once `save` is staged or has
        failed."""
        reasons = updates.why_unseen()
        for why in reasons:
            log_once(why)
        if reasons:
            save.wait_ended("staged")

    def remove(self) -> None:
        """Stand no longer. On the thread that trains."""
        updates.unwatch(self)

    def retire(self) -> None:
        """Stand no longer. From any thread."""
        updates.unwatch_later(self)

    def _forget_staged(self) -> None:
        for save in list(self.held):
            if save.has_ended("staged"):
                self.held.pop(save, None)


# -- the thread that trains ------------------------------------------------------------------------


@dataclass(eq=False)
class Trainer:
    """The thread that trains.

    gate: stands before its updates. seen: recognises its tensors. watched: the saves whose errors
        may have to be raised. calls: how often save() was called.

    It lasts as long as its Checkpointer, over all sessions. So the next call raises the error of a
    save even if the session was closed meanwhile. The number of a call is the same on all ranks.
    """

    gate: Gate = field(default_factory=Gate)
    seen: Seen = field(default_factory=Seen)
    watched: list[Passage] = field(default_factory=list)
    calls: int = 0

    def capture(
        self, save: Passage, state: Mapping[str, Any], rank: int | None, world: int
    ) -> Capture:
        """The parts of `state` to save, as one of `world` ranks. rank: None for a process that is
        alone."""
        self.gate.streams.join()
        with save.stage("capture"), named_failures(memory=False):
            captured = capture(state, rank, self.gate.stepping.take(), self.seen, world=world)
        log_once(captured.note, logging.INFO)
        for doubt in captured.doubts:
            log_once(doubt)
        self.gate.check_gradients(save.step)
        return captured

    def raise_failures(self, *, is_last: bool = False) -> None:
        """Raise the error of a save that failed since the last call.

        is_last: log it, because the process ends with the save that is being made.
        """
        for save in self.watched:
            error = save.unraised_error()
            if error is not None and not is_last:
                raise error
            if error is not None:
                logger.warning("step %d was not saved\n%s", save.step, error)
        self.watched = [
            save for save in self.watched if not save.done("committed") and not save.error
        ]

    def message(self, error: BaseException, rank: int) -> BaseException:
        """The error for the other ranks of a save that did not begin because of `error`."""
        if any(save.error is error for save in self.watched):
            return PeerFailedError(rank, str(error), follows=True)
        return error
