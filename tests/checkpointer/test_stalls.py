"""A storage that hangs: it is said which, and saves go on when it answers."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside


class Heard(logging.Handler):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.lines: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.lines.append(record.getMessage())
            self.event.set()


def test_a_save_that_waits_for_long_says_for_what() -> None:
    heard = Heard("is not written")
    logging.getLogger("statehold").addHandler(heard)
    state: dict[str, Any] = {"w": torch.ones(1000)}
    try:
        with checkpointer_on(SimFs(seed=1), "/runs/x", **SMALL) as ckpt:
            ckpt.steps()  # opens it
            inside(ckpt).pipeline.stalls.after_s = 0.01
            holdup = Holdup(ckpt)
            save = ckpt.save(2, state)
            must(holdup.waiting.wait(DEADLINE_S))
            must(heard.event.wait(DEADLINE_S))
            assert not save.done("written")
            holdup.release()
            save.wait("committed", DEADLINE_S)
            assert ckpt.steps() == [2]
    finally:
        logging.getLogger("statehold").removeHandler(heard)
    assert heard.lines[0].startswith(
        "step 2 is not written at level directory after 0.01 s: /runs/x"
    )
    assert len(heard.lines) == 1
