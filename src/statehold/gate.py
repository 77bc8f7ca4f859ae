"""The gate: nothing updates the state while bytes of it are still being copied.

Parameters and optimizer state stay unchanged during forward and backward (DataStates-LLM,
HPDC'24, section 4); the update is where they change. So the gate stands before the update: a
pre-step hook on every optimizer in the state waits until every save under way is staged. Loops
whose update is not such an optimizer call Checkpointer.gate() themselves.

A failed save opens the gate: training goes on, and the error is raised by the checkpointer's next
call, not out of somebody's optimizer.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from statehold.errors import WaitTimeout
from statehold.save import Save

if TYPE_CHECKING:
    import torch


class Pass(Protocol):
    """A way past the gate other than waiting on the host: a stream made to wait instead."""

    def __call__(self) -> bool:
        """Order later work after the copies; False when not all copies are enqueued yet."""


class Gate:
    """Holds the updates back until the saves under way are staged."""

    def __init__(self) -> None:
        self._saves: list[tuple[Save, Pass | None]] = []
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[Any] = []

    def hold_for(
        self, save: Save, optimizers: Iterable[torch.optim.Optimizer], passing: Pass | None = None
    ) -> None:
        """Hold updates until `save` is staged, or until `passing` lets them through."""
        self._forget_staged()
        self._saves.append((save, passing))
        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooked.add(optimizer)
                self._handles.append(optimizer.register_step_pre_hook(_hook(weakref.ref(self))))

    def wait(self, timeout: float | None = None) -> None:
        """Return once no save still has bytes to copy; `timeout` is in seconds."""
        for save, passing in list(self._saves):
            if save.done("staged") or (passing is not None and passing()):
                continue
            started = time.perf_counter()
            ended = save._wait_ended("staged", timeout)
            save._add_gate(time.perf_counter() - started)
            if not ended:
                raise WaitTimeout(
                    f"step {save.step} was not staged in time",
                    facts={"waited": f"{timeout} s", "so far": str(save.stats)},
                    hint="do not change the state yet: its bytes are still being copied",
                )
        self._forget_staged()

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def _forget_staged(self) -> None:
        self._saves = [
            (save, passing)
            for save, passing in self._saves
            if not save.done("staged") and save.error is None
        ]


def _hook(gate: weakref.ref[Gate]) -> Callable[..., None]:
    def wait_until_staged(*_: object) -> None:
        target = gate()
        if target is not None:
            target.wait()

    return wait_until_staged
