"""Weights for from_pretrained, written in the background from committed steps.

Owns: the thread that writes them, and that removes the folders which are too many. The newest step
is next. After each the thread rests nine times as long as it wrote, so that it takes a tenth of the
disk at most. finish() writes what is missing.
Invariants: weights are read from the committed step, never from the model that trains. An export
that fails is logged, and fails no training: the step has everything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from statehold.checkpoint.save.handle import Save
from statehold.errors import StateholdError
from statehold.integrations.transformers.folders import Folders

log = logging.getLogger("statehold")

REST = 9


class Exporter:
    """export(step): writes the weights of a committed step into its folder."""

    def __init__(self, folders: Folders, export: Callable[[int], None]) -> None:
        self._folders = folders
        self._export = export
        self._changed = threading.Condition()
        self._next: Save | None = None
        self._surplus: list[int] = []
        self._rested_at = 0.0
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def offer(self, save: Save, surplus: list[int]) -> None:
        """Export this step once it is committed, instead of one that was offered before; remove the
        folders of the steps in `surplus`."""
        with self._changed:
            self._next, self._surplus = save, surplus
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="statehold-weights", daemon=True)
            self._thread.start()

    def write(self, step: int, surplus: list[int]) -> None:
        """Export a committed step now."""
        self._remove(surplus)
        self._try(step, logging.WARNING)

    def finish(self, surplus: list[int]) -> None:
        """Export every other step whose folder has no weights. All saves have ended."""
        self.stop()
        self._remove(surplus)
        for step in reversed(self._folders.steps()):
            self._try(step, logging.WARNING)

    def stop(self) -> None:
        """End the thread after the step that it is writing."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_ending:
            save, surplus = self._taken()
            self._remove(surplus)
            if save is not None:
                begun = time.monotonic()
                with contextlib.suppress(StateholdError):  # the next save() raises it
                    save.wait("committed")
                    self._try(save.step, logging.DEBUG)  # finish() tries again
                self._rested_at = begun + (1 + REST) * (time.monotonic() - begun)

    def _taken(self) -> tuple[Save | None, list[int]]:
        """What is to be done, once there is something; a save only after the rest."""
        with self._changed:
            left = self._rested_at - time.monotonic()
            self._changed.wait_for(
                lambda: self._is_ending or self._surplus or (left <= 0 and self._next is not None),
                left if left > 0 else None,
            )
            surplus, self._surplus = self._surplus, []
            if self._is_ending or time.monotonic() < self._rested_at:
                return None, surplus
            save, self._next = self._next, None
            return save, surplus

    def _remove(self, surplus: list[int]) -> None:
        for step in surplus:
            self._folders.remove(step)

    def _try(self, step: int, level: int) -> None:
        if not self._folders.has(step) or self._folders.has_weights(step):
            return
        try:
            self._export(step)
        except Exception as error:  # the frameworks' own code runs here, and may raise anything
            if self._folders.has(step):  # otherwise the step was retired meanwhile
                log.log(level, "checkpoint-%d has no weights for from_pretrained: %s", step, error)
