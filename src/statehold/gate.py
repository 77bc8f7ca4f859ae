"""The gate: nothing updates the state while bytes of it are still being copied.

Parameters and optimizer state stay unchanged during forward and backward (DataStates-LLM,
HPDC'24, section 4); the update is where they change. So the gate stands before the update: a
pre-step hook on the torch optimizers waits until every save under way is staged. On all of them,
not only on those in the state: a fused optimizer that the state does not name changes parameters
without moving a version counter, so nothing else would notice. Loops whose update is not a torch
optimizer call Checkpointer.gate() themselves.

A failed save opens the gate: training goes on, and the error is raised by the checkpointer's next
call, not out of somebody's optimizer.

The gate remembers which optimizers have come through it. Memory that only those change can be
copied lazily, also where a state has their state_dict() and not themselves. It also sees whether
gradients wait for the next update, and warns once if a step is saved then.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from statehold.errors import WaitTimeout
from statehold.save import Save
from statehold.state.gradients import Gradients
from statehold.state.optimizers import before_every_step
from statehold.state.stepping import Stepping

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger("statehold")


class Pass(Protocol):
    """A way past the gate other than waiting on the host: a stream made to wait instead."""

    def __call__(self) -> bool:
        """Order later work after the copies; False when not all copies are enqueued yet."""


# Hooks of Checkpointers that were dropped. Taken off when the next gate stands up or is removed: an
# optimizer may be going through its hooks now.
_stale: list[Any] = []


class Gate:
    """Holds the updates back until the saves under way are staged."""

    def __init__(self) -> None:
        self._saves: list[tuple[Save, Pass | None]] = []
        self._hook: Any = None
        self._stepping = Stepping()
        self._gradients = Gradients()
        self._has_warned = False
        self.waited_s = 0.0  # in all

    def stand(self) -> None:
        """Stand before the step() of every torch optimizer from now on."""
        _remove_stale()
        if self._hook is None:
            self._hook = before_every_step(_waiting(weakref.ref(self)))

    def passed(self) -> list[Optimizer]:
        """The optimizers that have stepped since the last call, or since the gate stands."""
        return self._stepping.take()

    def check_gradients(self, step: int) -> None:
        """Log a warning, once, if `step` is saved between backward() and step()."""
        if self._has_warned or not self._gradients.are_waiting():
            return
        self._has_warned = True
        logger.warning(
            "step %d is saved while gradients wait for optimizer.step(), as in the middle of an "
            "accumulation. A step does not hold gradients: a restart from it makes the next update "
            "without these micro-batches. Save right after optimizer.step(). If a GradScaler has "
            "just skipped the update, nothing is missing",
            step,
        )

    def hold_for(self, save: Save, passing: Pass | None = None) -> None:
        """Hold updates until `save` is staged, or until `passing` lets them through."""
        self._forget_staged()
        self._saves.append((save, passing))
        self.stand()

    def wait(self, timeout: float | None = None) -> None:
        """Return once no save still has bytes to copy; `timeout` is in seconds."""
        for save, passing in list(self._saves):
            # A fork updates a copy, which nobody saves.
            if (
                not save._is_of_this_process
                or save.done("staged")
                or (passing is not None and passing())
            ):
                continue
            started = time.perf_counter()
            with save._stage("gate"):
                ended = save._wait_ended("staged", timeout)
            waited_s = time.perf_counter() - started
            self.waited_s += waited_s
            save._add_gate(waited_s)
            if not ended:
                raise WaitTimeout(
                    f"step {save.step} was not staged in time",
                    facts={"waited": f"{timeout} s", "so far": str(save.stats)},
                    hint="do not change the state yet: its bytes are still being copied",
                )
        self._forget_staged()

    def remove(self) -> None:
        """Take the hook off the optimizers. On the thread that trains."""
        _remove_stale()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def retire(self) -> None:
        """Have the hook taken off later. From any thread."""
        hook, self._hook = self._hook, None
        if hook is not None:
            _stale.append(hook)

    def _forget_staged(self) -> None:
        self._saves = [
            (save, passing)
            for save, passing in self._saves
            if not save.done("staged") and save.error is None
        ]


def _remove_stale() -> None:
    while _stale:
        _stale.pop().remove()


def _waiting(gate: weakref.ref[Gate]) -> Callable[[Optimizer], None]:
    # Weakly: a Checkpointer that was dropped without close() must not be kept alive by its hook.
    def wait_until_staged(optimizer: Optimizer) -> None:
        target = gate()
        if target is not None:
            target.wait()
            target._stepping.saw(optimizer)
            target._gradients.saw(optimizer)

    return wait_until_staged
