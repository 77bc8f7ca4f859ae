"""What happens to a checkpoint after save() has returned, in a thread of rank 0.

Owns: the thread. For each save, in order, it waits until the step is committed and gives it to its
paths. It removes a path only then, so that no older checkpoint goes before a newer one is there.
It also writes the files for load_from_checkpoint(). The newest is next, and after each the
thread rests nine times as long as it wrote, so that it takes a tenth of the disk at most.
Invariants: at most one save waits for its turn when another one begins, so the run still has every
step that is not held yet. After a save that failed nothing is removed any more.
A file that cannot be written is logged, and fails no training: the step has everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from statehold.checkpoint.save.handle import Save
from statehold.errors import StateholdError
from statehold.integrations.lightning.checkpoints import Checkpoint

log = logging.getLogger("statehold")

REST = 9
Job = tuple[Save | None, Checkpoint]


class Finisher:
    """write: fills the file of a checkpoint from its step."""

    def __init__(self, write: Callable[[Checkpoint], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._unwritten: dict[str, Checkpoint] = {}
        self._rested_at = 0.0
        self._has_failed = False
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def hold(self, save: Save, checkpoint: Checkpoint) -> None:
        """Give the path its step once it is committed."""
        self._add((save, checkpoint))

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove the path once all saves so far are committed."""
        self._add((None, checkpoint))

    def wait(self, left: int = 0) -> None:
        """Return once at most so many saves wait for their turn."""
        with self._changed:
            self._changed.wait_for(lambda: sum(save is not None for save, _ in self._jobs) <= left)

    def finish(self, *, write: bool) -> None:
        """Do everything, and write every file if `write`. All saves have ended."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if write:
            for checkpoint in reversed(self._unwritten.values()):
                self._try(checkpoint)

    def _add(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="statehold-ckpt", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, Checkpoint):
                begun = time.monotonic()
                self._try(job)
                self._rested_at = begun + (1 + REST) * (time.monotonic() - begun)
                continue
            try:
                self._do(*job)
            except OSError as error:
                self._has_failed = True
                log.warning("%s was not finished: %s", job[1].path, error)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _next(self) -> Job | Checkpoint | None:
        """The next job, or a file to write when there is none; None at the end."""
        with self._changed:
            while not self._jobs and not self._is_ending:
                rest = self._rested_at - time.monotonic()
                if self._unwritten and rest <= 0:
                    return self._unwritten.popitem()[1]
                self._changed.wait(rest if self._unwritten else None)
            return self._jobs[0] if self._jobs else None

    def _do(self, save: Save | None, checkpoint: Checkpoint) -> None:
        key = str(checkpoint.path)
        if save is None:
            if not self._has_failed and not self._is_saved_again(checkpoint):
                self._unwritten.pop(key, None)
                checkpoint.remove()
            return
        try:
            save.wait("committed")
        except StateholdError:  # the next save() raises it
            self._has_failed = True
            return
        checkpoint.hold(save.step)
        self._unwritten.pop(key, None)
        self._unwritten[key] = checkpoint

    def _is_saved_again(self, checkpoint: Checkpoint) -> bool:
        """Whether a later save has the path that Lightning had removed before."""
        with self._changed:
            later = list(self._jobs)[1:]
        return any(save and each.path == checkpoint.path for save, each in later)

    def _try(self, checkpoint: Checkpoint) -> None:
        try:
            self._write(checkpoint)
        except Exception as error:  # torch.save runs here, over values of any class
            if checkpoint.is_ours:  # otherwise it was removed meanwhile
                log.warning("%s has no weights for load_from_checkpoint(): %s",
                            checkpoint.path, error)  # fmt: skip
