"""Preemption: the warning of a scheduler becomes one last save, and an end before the deadline.

    deadline    signals, and the end of this process
    exchange    which step is the last, the same on all ranks, and how the ranks tell each other
    preemption  both together, as the Checkpointer uses them

The warning itself changes nothing, because the state may be half updated. It makes one of the next
steps the last, and the save of that step ends the process. Exit codes: LEFT, the last save is
committed; LATE, it is not known to be committed, and earlier committed steps are safe. LEFT is
the EX_TEMPFAIL of sysexits.h: run it again.
"""

from __future__ import annotations

from statehold.ranks.preemption.deadline import LATE, LEFT
from statehold.ranks.preemption.preemption import Preemption

__all__ = ["LATE", "LEFT", "Preemption"]
