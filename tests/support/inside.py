"""The two doors through which tests look inside a Checkpointer.

`inside(ckpt)` is its session, which opens now if it has not. A session's fields are the parts that
do the work: `pipeline`, `levels`, `peers`, `runtime`, `schedule`, `watch`. Most tests wait there
for work that a trainer never waits for. What a test may replace later is a public field of its
class: `Peers.timeout_s`, `Throttle.give_way`, `Store.fs`.

`borrowed(ckpt)` is what the session takes instead of its own when it opens: a file system, peers,
a clock.
"""

from __future__ import annotations

import statehold
from statehold.checkpoint.checkpointer import borrowed_by
from statehold.checkpoint.levels.promoting import Promoter
from statehold.checkpoint.opening import Borrowed
from statehold.checkpoint.save.gate import Trainer
from statehold.checkpoint.save.handle import Passage
from statehold.checkpoint.session import Session


def inside(ckpt: statehold.Checkpointer) -> Session:
    return ckpt._opened()


def borrowed(ckpt: statehold.Checkpointer) -> Borrowed:
    return borrowed_by(ckpt)


def end(ckpt: statehold.Checkpointer, *, flush: bool = True) -> None:
    """close() that raises no error of a save. Without `flush`, it also leaves steps uncopied, as
    the end of a process does."""
    ckpt._close(flush=flush)


def passage(save: statehold.Save) -> Passage:
    """What a save goes through while its handle waits for it."""
    return save._passage


def trainer(ckpt: statehold.Checkpointer) -> Trainer:
    """What outlasts a session: the gate, and the saves whose errors are still to be raised."""
    return ckpt._trainer


def promoter(ckpt: statehold.Checkpointer, level: str = "far") -> Promoter:
    """What copies steps to a level."""
    (found,) = (
        each for each in inside(ckpt).levels.promotions.promoters if each.place.name == level
    )
    return found
