"""The thread that trains, as save() sees it: its updates, its tensors, and errors to be raised.

Invariants: a Trainer lasts as long as its Checkpointer, over all sessions. So the next call raises
the error of a save even if the session was closed meanwhile. The number of a call is the same on
all ranks.
Not here: one call of save() (call).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statehold.checkpoint.save.gate import Gate
from statehold.checkpoint.save.handle import Passage
from statehold.errors import PeerFailedError
from statehold.observe.background_log import log_once
from statehold.tensors.capture import capture
from statehold.tensors.captured import Capture
from statehold.tensors.devices.relay import named_failures
from statehold.tensors.recognition import Seen


@dataclass(eq=False)
class Trainer:
    """The thread that trains.

    gate: stands before its updates. seen: recognises its tensors. watched: the saves whose errors
        may have to be raised. calls: how often save() was called.
    """

    gate: Gate = field(default_factory=Gate)
    seen: Seen = field(default_factory=Seen)
    watched: list[Passage] = field(default_factory=list)
    calls: int = 0

    def next_call(self) -> int:
        """The number of a call of save()."""
        self.calls += 1
        return self.calls - 1

    def capture(
        self, save: Passage, state: Mapping[str, Any], rank: int | None, world: int
    ) -> Capture:
        """The parts of `state` to save, as one of `world` ranks. rank: None for a process that is
        alone."""
        self.gate.join_streams()
        with save.stage("capture"), named_failures(memory=False):
            captured = capture(state, rank, self.gate.passed(), self.seen, world=world)
        log_once(captured.note, logging.INFO)
        for doubt in captured.doubts:
            log_once(doubt)
        self.gate.check_gradients(save.step)
        return captured

    def raise_failures(self) -> None:
        """Raise the error of a save that failed since the last call."""
        for save in self.watched:
            error = save.unraised_error()
            if error is not None:
                raise error
        self.watched = [
            save for save in self.watched if not save.done("committed") and not save.error
        ]

    def message(self, error: BaseException, rank: int) -> BaseException:
        """The error for the other ranks of a save that did not begin because of `error`."""
        if any(save.error is error for save in self.watched):
            return PeerFailedError(rank, str(error), follows=True)
        return error
