"""The callbacks of on_commit: called after a step is committed, on a thread of their own.

Invariants: no save and no step of the trainer waits for a callback, and none fails because of one.
Callbacks come in the order of commits, one at a time. What a callback raises is logged. If one
hangs, later commits wait for it in a queue of QUEUED_MAX; beyond that they are left out, and a
warning says so. The end of a session waits CLOSE_S for callbacks, and the end of the program not
at all.
Not here: when a step is committed (pipeline).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statehold.checkpoint.save.handle import Save
    from statehold.observe.background_log import BackgroundLog

QUEUED_MAX = 100
CLOSE_S = 10.0


class Callbacks:
    """Calls `callbacks` with each committed save. Without callbacks there is no thread."""

    def __init__(self, callbacks: Sequence[Callable[[Save], object]], log: BackgroundLog) -> None:
        self._callbacks = tuple(callbacks)
        self._log = log
        self._committed: queue.Queue[Save | None] = queue.Queue(QUEUED_MAX)
        self._at: int | None = None  # the step whose callbacks run
        self._thread = threading.Thread(target=self._serve, name="statehold-callbacks", daemon=True)
        if self._callbacks:
            self._thread.start()

    def committed(self, save: Save) -> None:
        """A step is committed. Returns at once."""
        if not self._callbacks:
            return
        try:
            self._committed.put_nowait(save)
        except queue.Full:
            self._log.warning(
                "a callback of on_commit has not returned since step %s was committed; step %d is "
                "committed, and no callback is called for it", self._at, save.step,
            )  # fmt: skip

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for the callbacks of what is committed, but no longer than that."""
        if not self._callbacks:
            return
        if self._committed.full():  # it hangs; if it ever returns, the thread ends
            timeout_s = 0.0
            with contextlib.suppress(queue.Empty):
                while True:
                    self._committed.get_nowait()
        self._committed.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._log.warning(
                "a callback of on_commit has not returned since step %s was committed; the "
                "Checkpointer closes without it", self._at,
            )  # fmt: skip

    def _serve(self) -> None:
        while (save := self._committed.get()) is not None:
            self._at = save.step
            for callback in self._callbacks:
                try:
                    callback(save)
                except BaseException as error:
                    text = "".join(traceback.format_exception(error)).rstrip()
                    self._log.error(
                        "step %d is committed and safe; a callback of on_commit raised\n%s",
                        save.step, text,
                    )  # fmt: skip
            del save
