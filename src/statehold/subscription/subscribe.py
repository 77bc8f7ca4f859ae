"""subscribe(): each new step of a run, in another process, as tensors in place.

    look      the newest committed step of all levels, if it is another one than that in place
    match     which pieces of which tensors differ from the step in place (preparing)
    read      these pieces into spare memory, from the nearest level, and verify them (spare)
    apply     the consumer's call: copy them into the tensors

Invariants: nothing is changed on storage, and no lock is taken, so the job of the run need not
know. The tensors have one whole step at any time but during apply(): no live tensor changes before
it, and when it returns, all of them have the step. A step that is retired, saved again or damaged
meanwhile changes nothing in them. The newest step counts: steps that came in between are skipped.
If the run goes back, because it was rewound, so do the tensors.

Not here: which copy of a file is read (steps/nearest), who tells that something has changed
(levels).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from statehold.errors import ClosedError, CorruptionError, StorageError, UsageError
from statehold.format.saved import SavedStep
from statehold.options.paths import check_run
from statehold.process.warn import logger
from statehold.reading.places import file_system, tell_misnamed
from statehold.steps.nearest import Nearest, StepChanged
from statehold.subscription.levels import Places, Watching, levels_of
from statehold.subscription.preparing import Changes, Filled, Move, Prepared, check_state, match
from statehold.subscription.spare import Spare
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.pinning import Pinning
from statehold.tensors.kinds import finish
from statehold.tensors.storable import device_of, is_external, without_flags
from statehold.units import check_timeout

T = TypeVar("T")

# -- the subscription ------------------------------------------------------------------------------


# A writer that saves one step again and again must not keep a reader for ever.
LOOKS_MAX = 100
AGAIN_S = 1.0  # until storage that has failed is asked again


def subscribe(run: str | os.PathLike[str], state: Mapping[str, Any]) -> Subscription:
    """Follow a run from another process: each new step comes as an update of tensors in place.

        with statehold.subscribe("runs/llama", {"model": model}) as updates:
            for update in updates:
                update.apply()
                evaluate(model)

    Args:
        run: the run directory. It need not exist yet.
        state: modules and whole tensors, by the names that they have in the state that is saved.
            The step may have more names. As in Checkpointer.restore(), dicts may be empty.

    Raises:
        UsageError: an argument is not valid.
    """
    path = check_run(run)
    tell_misnamed(path)
    return Subscription(path, check_state(state))


@dataclass(frozen=True, slots=True)
class _InPlace:
    """The step that the tensors have. save: which one of that number. stamps: of the directories
    that have it."""

    step: int
    save: str
    stamps: Hashable
    filled: dict[str, Filled]


class Subscription:
    """The updates of one consumer, from subscribe(): a loop over them, or wait().

    Use it on one thread at a time. Any thread may call close().
    """

    def __init__(self, run: str, state: Mapping[str, Any]) -> None:
        """Called by subscribe()."""
        self._run = run
        self._state = state
        self._in_place: _InPlace | None = None
        self._pending: weakref.ref[Update] | None = None
        self._damaged: dict[int, Hashable] = {}  # step -> the stamps of the save that is damaged
        self._fails = False
        self._guard = threading.RLock()
        self._caller: object = None  # what is inside _alone(), if anything is
        self._is_closing = False
        self._pid = os.getpid()
        self._changes = Changes()
        with contextlib.ExitStack() as owned:
            self._fs = file_system()
            owned.callback(self._fs.close)
            self._spare = Spare()
            owned.callback(self._spare.close)
            self._watching = Watching()
            owned.callback(self._watching.close)
            owned.callback(self._changes.close)
            self._owned = owned.pop_all()

    def __repr__(self) -> str:
        return f"<Subscription to {self._run}: step {self.step} is in place>"

    @property
    def step(self) -> int | None:
        """The step in place; None before the first update was applied."""
        return self._in_place.step if self._in_place else None

    # -- for the consumer ------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Update | None:
        """The next update, as soon as a newer step is committed, read and verified.

        Args:
            timeout: seconds to wait for a step; None waits for ever. An update that is being read
                is finished. Returns None if there was none in time, or if close() was called.

        An update that nobody has, because a wait was interrupted, is offered again.

        Raises:
            StateMismatchError: a new step does not fit the tensors, which stay as they are.
            FormatVersionError: a new step needs a newer statehold.
            UsageError: the last update was neither applied nor skipped.
            ClosedError: the subscription was closed before.
        """
        timeout = check_timeout(timeout)
        until_s = None if timeout is None else time.monotonic() + timeout
        update = self._alone(partial(self._waited, until_s))
        # Now, and not before: no signal's handler comes between this line and the caller.
        self._pending = None if update is None else weakref.ref(update)
        return update

    def _waited(self, until_s: float | None) -> Update | None:
        self._check_no_update_waits()
        while not self._is_closing:
            levels = levels_of(self._run)
            self._watching.watch([self._run, *(each.where for each in levels)])
            update = self._look(Places(self._fs, levels))
            left_s = None if until_s is None else until_s - time.monotonic()
            if update is not None or (left_s is not None and left_s <= 0):
                return update
            if self._fails:
                left_s = AGAIN_S if left_s is None else min(left_s, AGAIN_S)
            self._watching.wait(left_s)
        return None

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Update:
        """The next update; ends after close()."""
        update = None
        try:
            update = self.wait()
        except ClosedError:  # another thread may call close() at any time
            if not self._is_closing:
                raise
        if update is None:
            raise StopIteration
        return update

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the wait under way, and the loop over updates. The tensors stay as they are.

        In a fork it does nothing: the subscription is the parent's.
        """
        if os.getpid() != self._pid:
            return  # a thread of the parent may have the guard
        with self._guard:
            self._is_closing = True
            if self._caller is not None:
                self._watching.wake()  # the busy thread releases everything
            else:
                self._owned.close()  # once

    def _alone(self, call: Callable[[], T]) -> T:
        """Make a call, during which close() releases nothing. Raises ClosedError after it, and in a
        fork.

        No context: an exception from a signal's handler may come inside its `__enter__`, or on the
        way into its `__exit__`, and the subscription would be in use for ever.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                "this subscription belongs to the process that was forked",
                facts={"run": self._run, "begun by": f"process {self._pid}"},
                hint="call subscribe() in this process, too; the parent's subscription continues",
            )
        caller = object()
        try:
            with self._guard:
                if self._is_closing:
                    raise ClosedError("this subscription is closed", facts={"run": self._run})
                if self._caller is not None:
                    raise UsageError("a thread uses this subscription already")
                self._caller = caller
            made = call()
        finally:
            if self._caller is caller:
                self._caller = None
            with self._guard:
                if self._is_closing and self._caller is None:
                    self._owned.close()
        return made

    def _check_no_update_waits(self) -> None:
        pending = None if self._pending is None else self._pending()
        if pending is not None and not pending.is_over:
            text = "the last update was neither applied nor skipped"
            hint = "call update.apply() when nobody uses the tensors, or update.skip()"
            raise UsageError(text, facts={"step": pending.step}, hint=hint)

    # -- looking ---------------------------------------------------------------------------

    def _look(self, places: Places) -> Update | None:
        """An update to the newest intact step; None if that is in place, or if there is none."""
        self._fails = False
        for _ in range(LOOKS_MAX):
            try:
                return self._newest(places)
            except StepChanged:
                continue
            except StorageError as error:
                self._fails = True
                logger.warning("cannot read steps of %s; trying again\n%s", self._run, error)
                return None
        return None

    def _newest(self, places: Places) -> Update | None:
        nearest = Nearest(places, self._run)
        found = nearest.steps()
        self._damaged = {step: self._damaged[step] for step in found if step in self._damaged}
        for step in self._candidates(found, places):
            stamps = places.stamps(step)
            if self._damaged.get(step) == stamps:
                continue
            if self._in_place and (step, stamps) == (self._in_place.step, self._in_place.stamps):
                return None
            try:
                prepare = partial(self._prepared, nearest, places, step, stamps)
                return nearest.from_any_copy(step, prepare)
            except CorruptionError as error:
                self._damaged[step] = stamps
                logger.warning(
                    "step %d of %s is damaged and is skipped\n%s", step, self._run, error
                )
        return None

    def _candidates(self, found: list[int], places: Places) -> list[int]:
        """The steps to try, the best first."""
        newest = [*reversed(found)]
        if self._in_place is None or not newest:
            return newest
        if newest[0] >= self._in_place.step:
            return [step for step in newest if step >= self._in_place.step]
        # It seems that the run went back. A level that was not seen may have the newer steps.
        return newest if places.were_listed else []

    # -- reading and applying --------------------------------------------------------------

    def _prepared(
        self, nearest: Nearest, places: Places, step: int, stamps: Hashable
    ) -> Update | None:
        """The update, read and verified; None if the save is in place."""
        begun_s = time.perf_counter()
        committed_s, before = places.committed_s(step), places.read_bytes
        saved = nearest.open(step)
        save = nearest.saves.opened(step)
        if self._in_place is not None and save == self._in_place.save:
            self._in_place = _InPlace(step, save, stamps, self._in_place.filled)
            return None
        matched = self._matched(saved)
        device = next(iter(devices_of(matched.moves)), None)
        at = self._spare.read(matched.moves, partial(nearest.find, step), device)
        read_bytes = matched.changed_bytes + places.read_bytes - before
        in_place = partial(_InPlace, step, save, stamps)
        put = partial(self._alone, partial(self._put, matched, at, in_place))
        read_s = time.perf_counter() - begun_s
        about = nearest.said(step)
        metrics = {} if about is None else dict(about.metrics)
        return Update(step, matched.changed_bytes, read_bytes, read_s, committed_s, metrics, put)

    def _matched(self, saved: SavedStep) -> Prepared:
        filled = self._in_place.filled if self._in_place else {}
        return torch.no_grad()(match)(self._state, saved, self._changes.without(filled))

    def _put(self, matched: Prepared, at: list[int], in_place: partial[_InPlace]) -> None:
        is_first, self._in_place = self._in_place is None, None  # unknown, if this fails
        self._changes.check(matched.relied)
        copy_all(matched.moves, at, self._spare.memory)
        filled: dict[str, Filled] = {}
        # Only what modules get from set_extra_state() runs code of others.
        draws = bool(matched.restoration.objects)
        finish(matched.restoration, draws=draws, written=lambda: filled.update(matched.filled()))
        self._changes.forget()  # they are overwritten
        self._in_place = in_place(filled)
        if is_first:  # it had everything, and most updates have less
            self._spare.drop()


# -- a newer step ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Update:
    """A newer step of a run, read and verified, that is not in place yet.

    Attributes:
        step: its number.
        changed_bytes: of the tensors, in whole pieces: how many bytes differ.
        read_bytes: how many bytes were read to get them, documents included.
        read_s: how many seconds it took to read and verify them.
        committed_s: when the step was committed, in seconds since 1970, by the clock of its file
            system.
        metrics: what the step says of itself, as save(metrics=) got it.
        apply_s: how many seconds apply() took; None before.
    """

    step: int
    changed_bytes: int
    read_bytes: int
    read_s: float
    committed_s: float
    metrics: Mapping[str, float]
    _put: Callable[[], None] = field(repr=False)
    apply_s: float | None = None
    _in_place_s: float | None = field(default=None, repr=False)
    _is_over: bool = field(default=False, repr=False)

    @property
    def lag_s(self) -> float:
        """Seconds from the commit of the step until it was in place, or until now."""
        until_s = time.time() if self._in_place_s is None else self._in_place_s
        return max(0.0, until_s - self.committed_s)

    @property
    def is_over(self) -> bool:
        """Whether apply() or skip() was called."""
        return self._is_over

    def apply(self) -> None:
        """Change the tensors, in place: before, they have one whole step, and after it this one.

        Call it on the thread that uses the tensors, or while nobody uses them. Only memory is
        copied. If copying raises, the tensors may be of both steps. The next update then reads
        everything.

        Raises:
            UsageError: this update was applied or skipped already, or a tensor was changed since
                wait() returned it. Then no tensor is updated, and the next update has everything.
            ClosedError: the subscription was closed.
        """
        self._end()
        begun_s = time.perf_counter()
        self._put()
        self.apply_s = time.perf_counter() - begun_s
        self._in_place_s = time.time()

    def skip(self) -> None:
        """Keep the tensors as they are. The next update has the changes of this one, too."""
        self._end()

    def _end(self) -> None:
        if self._is_over:
            raise UsageError(
                "this update was applied or skipped already", facts={"step": self.step}
            )
        self._is_over = True


# -- the tensors in place --------------------------------------------------------------------------
# What may fail for want of memory happens first: scratch memory on a device for tensors that a
# plain copy cannot fill. On return every copy is done. On a device the copies come after what its
# current stream has been given, and what it is given later comes after them.

Copy = tuple[Move, torch.Tensor]


@torch.inference_mode()  # without it, torch refuses to change inference tensors
def copy_all(moves: Sequence[Move], places: Sequence[int], memory: torch.Tensor) -> None:
    """Copy the piece at `places[i]` of the memory to where the move i says."""
    copies = [
        (move, memory.narrow(0, at, move.piece.end - move.piece.begin))
        for move, at in zip(moves, places, strict=True)
    ]
    there = [each for each in copies if is_external(each[0].place.target)]
    if there:
        _copy_to_devices(there)
    for move, source in copies:
        if not is_external(move.place.target):
            _put(move, source)


def devices_of(moves: Sequence[Move]) -> list[torch.device]:
    """The devices that have targets."""
    targets = [move.place.target for move in moves if is_external(move.place.target)]
    return list(dict.fromkeys(map(device_of, targets)))


def _copy_to_devices(copies: Sequence[Copy]) -> None:
    devices = devices_of([move for move, _ in copies])
    backend = backend_for(devices[0])
    mover = Mover(backend, {}, Pinning(backend, devices[0]), devices)
    with mover.using(), mover.finishing():
        on_device = [(device, _on(mover, device, copies)) for device in devices]
        for device, ready in on_device:
            with mover.on(device):
                for move, source in ready:
                    _put(move, source)
        mover.wait()
        mover.make_current_wait()


def _on(mover: Mover, device: torch.device, copies: Sequence[Copy]) -> list[Copy]:
    """The copies to a device. What has to be taken apart there is there already."""
    with mover.on(device):
        return [
            (move, source if move.place.is_plain else _beside(move.place.target, source))
            for move, source in copies
            if device_of(move.place.target) == device
        ]


def _beside(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    scratch = without_flags(target).new_empty(source.numel(), dtype=torch.uint8)
    return scratch.copy_(source, non_blocking=True)


def _put(move: Move, source: torch.Tensor) -> None:
    target = move.place.target
    if move.place.is_plain and not is_external(target):
        # copy_() waits for the threads of torch, which may not get a processor for long.
        ctypes.memmove(target.data_ptr() + move.low, source.data_ptr(), source.numel())
    elif move.place.is_plain:
        move.place.bytes_at(move.low, source.numel()).copy_(source, non_blocking=True)
    else:
        move.place.take(source, move.low)
