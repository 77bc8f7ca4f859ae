"""Copies of a state for dcp.async_save, in host memory that is reused.

torch's default makes a new copy for every save, whose pages have to be faulted in each time. Here a
copy goes back to a pool once torch has dropped its state dict. A save that begins earlier gets
memory of its own. So memory is never written while a save still reads it, and nothing depends on
the order in which saves end, or on whether they fail.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Staged(dict[str, Any]):
    """A state dict in staging memory; a subclass, because a dict cannot be watched."""

    __slots__ = ("__weakref__",)

    # for the process checkpointer, which needs only a dict
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class StagingPool:
    """Stagers of torch, each with the memory of one copy."""

    def __init__(self) -> None:
        self._idle: list[DefaultStager] = []
        self._guard = threading.Lock()

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy that no later change of `state` reaches; complete when this returns."""
        with self._guard:
            stager = self._idle.pop() if self._idle else _new_stager()
        copied = stager.stage(state)
        assert isinstance(copied, dict)  # a Future only if it were asynchronous
        staged = Staged(copied)
        weakref.finalize(staged, self._give_back, stager).atexit = False
        return staged

    def _give_back(self, stager: DefaultStager) -> None:
        with self._guard:
            self._idle.append(stager)

    def close(self) -> None:
        """Free the memory of unused copies."""
        with self._guard:
            idle, self._idle = self._idle, []
        for stager in idle:
            stager.close()


def _new_stager() -> DefaultStager:
    """Each copy waits for its own device. After non-blocking copies torch waits only for the
    current device, and tensors of another one might not be complete."""
    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
