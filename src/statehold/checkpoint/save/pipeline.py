"""The background half of a save: two threads that take each save, in order, to its three events.

    stage thread    every byte copied -> nothing changed meanwhile? -> "staged"
    commit thread   D1 open the file, attach -> writes done, D2 -> "written"
                    -> D3..D7 -> "committed" -> retention

The commit thread opens a save's file once the save before it has ended. So the staging of a save
overlaps the writes of the earlier one, at most one step more than `keep` occupies the disk, and
there is a retired file to overwrite. Steps are committed in the order of the calls.

A failure on either thread first stops the native job, after which no thread touches the state. Then
it fails the handle. A committed step stays committed: later errors are only logged. The
interpreter joins the threads at exit (process/worker), so saves under way are committed even if a
script ends without close(). Neither thread writes its log lines itself, because a log that blocks
must not delay a commit (observe/background_log).

A device may hang: behind a collective, say, whose other ranks are gone. While the program trains,
its saves wait with it. At the end the stage thread is left alone with such a device. It holds the
memory that the device may write into, until the process ends or the device is done. The saves that
wait for the device fail, and those of host memory are staged without that thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from statehold._core import Mismatch
from statehold.checkpoint.levels.commit_rounds import HALF_PUBLISHED
from statehold.checkpoint.save.handle import Passage
from statehold.checkpoint.save.publishing import after_commit
from statehold.checkpoint.save.writes import give_back
from statehold.errors import (
    PUBLISHED,
    ChecksumError,
    DeviceError,
    InvariantError,
    StateholdError,
    TornSnapshot,
    WaitTimeout,
    named,
    storage_error,
)
from statehold.format.entries import record_file
from statehold.format.trees import tensors_of
from statehold.layout.plan import BLOCK_BYTES
from statehold.layout.stored import StoredFile, StoredPart, check, held_in
from statehold.process.warn import let_go
from statehold.process.worker import Flag, Thread, Worker
from statehold.steps.copying import DataFile, data_files

if TYPE_CHECKING:
    from statehold.checkpoint.levels.promoting import Promotions
    from statehold.checkpoint.save.handle import Callbacks, Work
    from statehold.checkpoint.save.level_choice import LevelChoice
    from statehold.checkpoint.save.publishing import Publisher
    from statehold.observe.background_log import BackgroundLog
    from statehold.tensors.captured import Capture

# One save is written while one is staged. More would hold more captured state, and end no sooner.
SAVES_IN_FLIGHT_MAX = 2

STALL_S = 60.0


class Stalls:
    """Logs one warning for a save that is not written after `after_s`: which storage it waits for.

    A call that hangs in the kernel, because a server is gone, cannot be cancelled, and it may still
    use its memory. So a save stays with the level that has taken it, and later saves wait. The
    warning comes from a thread that waits for nobody. It does not blame the storage for a device.
    """

    def __init__(self, log: BackgroundLog, after_s: float = STALL_S) -> None:
        self._log = log
        self.after_s = after_s
        self._under_way: tuple[Work, float] | None = None  # and since when
        self._thread: Thread | None = None  # that looks
        self._ended = Flag()

    def watch(self, work: Work | None) -> None:
        """From now on, until None. One thread looks from time to time as long as there are saves:
        to start one for each would take a tenth of the time of a small one."""
        self._under_way = None if work is None else (work, time.monotonic())
        if work is not None and self._thread is None:
            with contextlib.suppress(RuntimeError):  # the interpreter ends, or there are no threads
                thread = Thread(self._look, "statehold-stalls")
                thread.start()
                self._thread = thread

    def close(self) -> None:
        self._ended.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _look(self) -> None:
        pause_s = self.after_s
        while not self._ended.wait(pause_s):
            thread, self._thread = self._thread, None  # before the look, which misses no save so
            if (under_way := self._under_way) is None:
                return
            self._thread = thread
            pause_s = max(0.0, under_way[1] + self.after_s - time.monotonic())
            if not pause_s:
                self.watch(None)
                self.warn(under_way[0])
            del under_way  # it keeps the state alive

    def warn(self, work: Work) -> None:
        since = work.copies.waits_since if work.copies else None
        blamed = f"{work.place.store.root} is slow or does not answer, here or on a rank that this "
        blamed += "one waits for"
        if since is not None and time.monotonic() - since > self.after_s / 2:
            blamed = "a device is busy, or hangs"
        self._log.warning(
            "step %d is not written at level %s after %g s: %s. Later saves wait, too",
            work.save.step, work.place.name, self.after_s, blamed,
        )  # fmt: skip


class Pipeline:
    """Takes saves from captured to committed, in order. publisher: does D3 to D7.

    device_s: how long finish_staging() waits for a device that does nothing.
    """

    def __init__(
        self,
        level_choice: LevelChoice,
        publisher: Publisher,
        promotions: Promotions,
        log: BackgroundLog,
        callbacks: Callbacks,
        device_s: float,
    ) -> None:
        self._callbacks = callbacks
        self.device_s = device_s
        self._level_choice = level_choice
        self.stalls = Stalls(log)
        self._promotions = promotions
        self._log = log
        self.publisher = publisher
        try:  # the names are those of the lanes of a trace
            self._stager = Worker("statehold-stage")
            self._committer = Worker("statehold-commit")
        except RuntimeError as error:
            raise storage_error("start a thread", errno.EAGAIN, "") from error
        self._saves: list[tuple[int, Passage]] = []
        self.to_stage: dict[int, Work] = {}  # by number, in order; the stage thread has the first
        self._guard = threading.Lock()
        self._unsettled: list[int] = []  # steps whose directory in the making may be in use
        self._newest = -1  # the newest save that the commit thread has taken, or given up

    def ahead(self, action: Callable[[], None]) -> None:
        """Run `action` before later saves are committed. It must not raise."""
        self._committer.submit(action)

    def submit(self, work: Work) -> None:
        """Take a save; returns at once. If this raises, the caller calls take_back()."""
        self._unsettled.append(work.save.step)
        self._saves.append((work.number, work.save))
        self._committer.submit(partial(self._guarded, self._write_and_commit, work))
        self.to_stage[work.number] = work
        self._stager.submit(partial(self._guarded, self._stage, work))

    def take_back(self, work: Work, error: BaseException) -> None:
        """End a save that could not be handed over, or only in part."""
        self.to_stage.pop(work.number, None)
        self._fail(work, error)
        work.save.is_raised = True  # the caller raises it
        assert work.error is not None
        self._committer.submit(partial(self._given_up, work.number, work.error, work))

    def wait_eager(self, work: Work, captured: Capture) -> None:
        """Return once everything that may change before the next update is copied, or once the
        current streams of devices wait for those copies. Raises if it did change."""
        if not captured.tensors.structure.eager:
            return
        try:
            if work.copies is not None:
                work.copies.wait_eager()
            if work.shared is not None:
                work.shared.wait_eager()
            work.job.wait_eager(None)
            _check_unmoved(captured.settle(eager=True))
        except StateholdError as error:
            self._fail(work, error)
            work.save.wait("staged")  # raises the first cause, with what is still safe
            work.save.is_raised = True  # everything was staged before this error was known
            raise work.error or error from None
        except BaseException as error:  # Ctrl-C: the state changes from now on
            self._fail(work, error)
            work.save.is_raised = True  # this call raises it
            raise

    def wait_for_room(self, settled: int) -> None:
        """Back-pressure: return once another save may begin, and all saves up to the number
        `settled` have ended."""
        self._saves = [
            (number, save) for number, save in self._saves if not save.has_ended("committed")
        ]
        full = len(self._saves) - SAVES_IN_FLIGHT_MAX + 1
        for index, (number, save) in enumerate(self._saves):
            if index < full or number <= settled:
                save.wait_ended("committed")

    def give_up(self, number: int, error: BaseException) -> None:
        """A save was called and never began. Other ranks need not wait for it."""
        cause = named(error, "before it began")
        self._committer.submit(partial(self._given_up, number, cause, None))

    def newest_step(self) -> int | None:
        """The newest step among the saves that are under way; None without one."""
        return max(
            (save.step for _, save in self._saves if not save.has_ended("committed")), default=None
        )

    def uses(self, step: int) -> bool:
        """Whether a save of this step is under way, or its files are not cleared yet."""
        return step in self._unsettled

    def has(self, save: Passage) -> bool:
        """Whether this save was handed over, wholly or in part."""
        return any(each is save for _, each in self._saves)

    def wait_staged(self) -> None:
        """Return once no save copies from the state any longer."""
        for _, save in list(self._saves):
            save.wait_ended("staged")

    def drain(self, timeout_s: float | None = None) -> None:
        """Return once every save has ended, well or not, and its leftovers are cleared.

        Raises WaitTimeout.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if not (self._stager.passed(until) and self._committer.passed(until)):
            raise WaitTimeout("saves did not end in time", facts={"waited": f"{timeout_s} s"})
        self._log.flush()

    def finish_staging(self) -> None:
        """Return once no save waits for the stage thread. The Checkpointer ends: a save whose
        device does nothing for `device_s` from now on is given up."""
        begin, since = time.monotonic(), None
        while not self._stager.passed(self.device_s + max(begin, since or time.monotonic())):
            before, since = since, self._waits_since()
            if since is not None and since == before:
                self._leave_device()

    def close(self) -> None:
        """Finish the saves under way, and end the threads."""
        self.finish_staging()
        self._stager.close()
        self._committer.close()
        self.stalls.close()
        self._log.flush()

    def _waits_since(self) -> float | None:
        """Since when the stage thread waits for a device that does nothing. None: it does not."""
        works = list(self.to_stage.values())
        return works[0].copies.waits_since if works and works[0].copies else None

    def _leave_device(self) -> None:
        """Give up the saves that wait for a device, and stage the others on this thread."""
        self._stager.leave()
        works = list(self.to_stage.values())
        self.to_stage.clear()
        for work in works:
            if not work.save.has_ended("staged"):
                self._guarded(self._stage_without_device, work)

    def _stage_without_device(self, work: Work) -> None:
        """The device keeps its staging memory. What needs more than is left is given up, too."""
        needs_more = work.copies is not None or work.stored or work.shared
        if needs_more or not work.job.wait_copied(self.device_s):
            raise DeviceError(
                "a device does not finish its work, so a save behind that work was given up",
                facts={"waited": f"{self.device_s:g} s for the next copy"},
                hint="a collective whose other ranks are gone hangs like this. The memory of the "
                "copies stays until the device is done, or the process ends: start the process "
                "again and restore",
            )
        self._stage(work, is_left=True)

    # -- the two threads -------------------------------------------------------------------

    def _guarded(self, action: Callable[[Work], None], work: Work) -> None:
        try:
            action(work)
        except BaseException as error:
            self._fail(work, error)
            let_go(error)
        finally:
            del work  # the handle keeps the error, which keeps the variables of this function

    def _stage(self, work: Work, *, is_left: bool = False) -> None:
        """is_left: the stage thread hangs. It finds the save in to_stage no more."""
        if not is_left and work.number not in self.to_stage:
            return
        try:
            assert work.capture is not None
            with work.save.stage("stage"):
                if work.copies is not None:
                    work.copies.run()
                if work.shared is not None:
                    work.shared.prove()
                work.job.wait_copied(None)
                if work.shared is not None:
                    work.shared.wait_copied()
                work.fingerprints = {name: read() for name, read in work.fingerprinting.items()}
                if work.copies is not None:
                    work.fingerprints |= work.copies.fingerprints
                _check_unmoved(work.capture.settle(eager=True))  # save() may not have asked yet
                _check_unmoved(work.capture.settle())
                work.let_go()
            work.save.reach("staged")
        finally:
            self.to_stage.pop(work.number, None)

    def _write_and_commit(self, work: Work) -> None:
        self._newest = work.number
        try:
            if work.error is not None:
                raise work.error
            self._publish(work)
        except BaseException as error:
            # No thread may write into files that are removed next.
            self._stop(work, self.publisher.cause(work, error))
            assert work.error is not None
            self._give_up_for_all(work.number, work.error)
            self.publisher.clean_up(work)
            raise
        else:
            self._follow_up(work)
        finally:
            self.stalls.watch(None)
            self._unsettled.remove(work.save.step)
            work.release()

    def _given_up(self, number: int, error: StateholdError, work: Work | None) -> None:
        """Give up a save that did not begin, unless it has come to this thread after all."""
        if number <= self._newest:
            return
        self._newest = number
        self._give_up_for_all(number, error)
        if work is not None:
            self.publisher.clean_up(work)
            work.release()
            with contextlib.suppress(ValueError):  # it failed before submit() noted it
                self._unsettled.remove(work.save.step)

    def _follow_up(self, work: Work) -> None:
        """The step is committed. If one of these actions fails, the others are still tried."""
        step, place, plan = work.save.step, work.place, work.plan.save
        with after_commit(self._log, step, "begin to copy it to other levels"):
            self._promotions.start(step, work.promote, place)  # before the step may be retired
        if place.leads:
            with after_commit(self._log, step, "remove old steps"), work.save.stage("retain"):
                if warning := place.retain():
                    self._log.warning("%s", warning)
        with after_commit(self._log, step, "announce it to the other ranks"):
            self.publisher.announce(work)
        with after_commit(self._log, step, "learn what has not changed"):
            work.register.committed(work.plan, work.job.checksums())
        with after_commit(self._log, step, "make a file for the next save"):
            place.store.make_ready(plan.file_name, plan.file_bytes)
        self._callbacks.committed(work.handle)

    def _publish(self, work: Work) -> None:
        save = work.save
        self.stalls.watch(work)
        self._write(work)
        if work.shared:
            self._take_in(work)
        self.stalls.watch(None)
        save.watch.save_moved(save.step, save.moving_from, work.job.stats)
        save.wait_ended("staged")
        if work.error is not None:
            raise work.error
        save.reach("written")
        self._level_choice.check_levels(work.number, late=True)
        with save.stage("commit"):
            self.publisher.publish(work, work.job.checksums())  # D3 to D7
        work.place.store.committed(save.step)
        save.reach("committed")

    def _write(self, work: Work) -> None:
        if work.is_attached:
            self._level_choice.took(work)
            if work.shared is not None:
                work.shared.open(work.place.store, work.attempt)  # for links that are not proven
            self._write_out(work)
            return
        with work.save.stage("open"):
            file, reused = self._level_choice.open(work)
        try:
            work.save.record(reused=reused)
            work.job.attach(file)
            if work.shared is not None:
                work.shared.attach()
            self._write_out(work)
        except BaseException as error:
            self._stop(work, self.publisher.cause(work, error))
            give_back(file)
            raise

    def _take_in(self, work: Work) -> None:
        """D1 and D2 of other files than the one that the rank writes."""
        with work.save.stage("take in"):
            take_in(work, self._log)

    def _write_out(self, work: Work) -> None:
        work.save.record(files=1)
        if work.stored and not work.shared:  # the engine writes meanwhile
            self._take_in(work)
        with work.save.stage("write"):
            if work.shared is not None:
                work.shared.finish_first()
            work.job.wait_written(None)
            work.job.finish()  # D2
            if work.shared is not None:
                work.shared.finish()

    def _give_up_for_all(self, number: int, error: StateholdError) -> None:
        """Announce that a save has failed here, so that no other rank waits for it."""
        self.publisher.give_up(number, error)
        self._level_choice.give_up(number, error)

    def _stop(self, work: Work, error: BaseException) -> None:
        """Stop the native job. The other thread then fails, too; the first error counts."""
        with self._guard:
            work.error = work.error or _named(error, work.save.step)
        work.cancel()
        work.let_go()

    def _fail(self, work: Work, error: BaseException) -> None:
        self._stop(work, error)
        with self._guard:
            cause = work.error
            if cause is None or work.save.has_ended("committed"):
                return
            cause.with_fact("failed", self._what_failed(work, cause))
            cause.with_fact("still safe", self._still_safe(work, cause))
            work.save.fail(cause)
        self._log.error("%s", cause)

    def _what_failed(self, work: Work, cause: StateholdError) -> str:
        rank = self.publisher.rank
        where = "" if rank is None else f" on rank {rank}"
        if PUBLISHED in cause.facts:
            outcome = "its last sync failed"
        elif HALF_PUBLISHED in cause.facts:
            outcome = "not all hosts have published it, so it does not count as a step"
        elif self.publisher.is_unsure(work, cause):
            outcome = "published only if rank 0 was lost after it committed"
        else:
            outcome = "nothing was published"
        return f"the save of step {work.save.step}{where}; {outcome}"

    def _still_safe(self, work: Work, cause: StateholdError) -> str:
        try:
            steps = work.place.steps()
        except StateholdError:
            return "unknown: the run directory cannot be listed"
        if PUBLISHED in cause.facts:
            steps = [step for step in steps if step != work.save.step]
        return f"step {steps[-1]} and older" if steps else "no step yet"


def _named(error: BaseException, step: int) -> StateholdError:
    if not isinstance(error, Mismatch):
        return named(error, f"while saving step {step}")
    damaged = ChecksumError(
        "a file that earlier steps share is damaged: it has bytes that this step shares with them, "
        "and they do not match their checksum",
        facts={
            "file": error.path,
            "bytes": f"[{error.begin}, {error.end})",
            "xxh3-64": f"expected {error.expected:016x}, got {error.got:016x}",
        },
        hint="the next save writes the whole state. statehold verify --all names the steps that "
        "hold the file",
    )
    damaged.__cause__ = error
    return damaged


def _check_unmoved(moved: str | None) -> None:
    if moved is not None:
        raise TornSnapshot(
            "a tensor changed while it was being copied",
            facts={"tensor": moved},
            hint="change the state only through an optimizer that is part of it, or after "
            "gate(). Wrap tensors that change at other times in statehold.Volatile",
        )


# -- files that have other names -------------------------------------------------------------------
# D1 and D2 of these files. The engine writes the file of a rank from memory. State that lies in
# files already, and files that steps share, are not read for that: each gets a second name in the
# partial directory, as a further file of the rank. Where the file system gives it none (another
# file system, too many names), it is copied and verified.
#
# The engine writes meanwhile, if no file is to be compared first: the links of an optimizer took a
# quarter of a commit after the write. When take_in() returns, the bytes of all these files are
# durable, and D3 makes their names so. A copy has the bytes that the checksums of the record or the
# manifest say, or it fails.
# layout/stored says what such a file must be, and tensors/stored who has them.


def take_in(work: Work, log: BackgroundLog) -> None:
    """Have shared files, and those of stored parts of a state, in its step, durably.

    Sets `work.taken`.
    """
    plan = work.plan.save
    files = [file for stored in work.stored for file in stored.files()]
    shared = work.shared.files() if work.shared else []
    names = {spec.name for spec in work.plan.share.specs}
    elsewhere = [held for stored in work.stored for held in stored.elsewhere]
    check(files, plan.rank, names)
    _check_named(work, names.union(held.name for held in [*held_in(files), *elsewhere]))
    given = list[tuple[DataFile, str]]()
    for part, file in enumerate((*shared, *files), 1):
        entry, tensors = record_file(file.placed(plan, part), file.sums)
        chunks = {name: each.chunks for name, each in tensors.items()}
        (source,) = data_files([entry], chunks, BLOCK_BYTES)
        given.append((source, file.path))
    copied = set(work.place.take_in(work.save.step, work.attempt, given, len(shared)))
    work.taken = StoredPart([*shared, *files], [*held_in(files), *elsewhere])
    _account(work, [*shared, *files], copied)
    of_pool = copied.intersection(file.path for file in shared)
    if of_pool:
        work.register.refused(of_pool)
    for folder in sorted({os.path.dirname(path) for path in copied - of_pool}):
        log.warn_once(
            "saves copy the files of an optimizer in %s, because the file system of level %s does "
            "not link them: put this Path on the file system of the run, and saves write far less",
            folder, work.place.name,
        )  # fmt: skip


def _check_named(work: Work, names: set[str]) -> None:
    """A tensor that the tree names has to be somewhere, or no reader could open the step."""
    missing = [name for name in tensors_of(work.tree) if name not in names]
    if missing:
        facts = {"tensor": missing[0], "missing": str(len(missing))}
        raise InvariantError("files on storage do not hold a tensor of the state", facts=facts)


def _account(work: Work, files: Sequence[StoredFile], copied: set[str]) -> None:
    written = {file.path for file in work.shared.written} if work.shared else set()
    nbytes = {file.path: file.file_bytes for file in files}
    # A new file that could not be linked was written twice.
    twice = [*map(nbytes.__getitem__, written), *map(nbytes.__getitem__, copied)]
    work.save.record(
        files=1 + len(files),
        linked_bytes=sum(nbytes[path] for path in nbytes.keys() - written - copied),
        written_bytes=work.plan.save.file_bytes + sum(twice),
    )
