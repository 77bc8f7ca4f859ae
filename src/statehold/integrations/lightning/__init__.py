"""The Trainer of Lightning with checkpoints that are steps of statehold (docs/integrations.md).

    trainer = Trainer(callbacks=[StateholdCallback(), ModelCheckpoint("out", save_last=True)])
    trainer.fit(model, loader, ckpt_path="last")

StateholdCallback is what a script adds. It puts its layer over the strategy, opens the run when the
training begins, and saves once more if the process has to leave. Fabric needs nothing of this: pass
its model and optimizer to a Checkpointer.

Not here: what a step holds, and how it comes back (strategy).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.integrations.lightning.strategy import KEEP, StrategyLayer
from statehold.integrations.trained import leave_on_signals

__all__ = ["StateholdCallback"]


# -- the callback ----------------------------------------------------------------------------------


class StateholdCallback(Callback):
    """Makes the checkpoints of a Trainer steps of statehold. ModelCheckpoint works as ever.

        trainer = Trainer(callbacks=[StateholdCallback(), ModelCheckpoint("out", save_last=True)])

    Args:
        run: the directory for the newest steps. None: that of the first ModelCheckpoint.
        leave_within_s: after SIGTERM or SIGUSR1, all ranks save once more, as last.ckpt, and exit
            with code 75 within so many seconds; None leaves the signals to Lightning.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None = None, *, leave_within_s: float | None = 25.0
    ) -> None:
        self.run = run
        self.leave_within_s = leave_within_s
        self.layer: StrategyLayer | None = None
        self._seen = -1

    def checkpointer(self, run: str, keep: int) -> Checkpointer:
        """Open the run. Override it for more levels or other options.

        Args:
            run: the directory for the newest steps. The first level has to be Directory().
            keep: how many steps the run needs. Pass it on.
        """
        return Checkpointer(run, keep=keep)

    # -- what the Trainer calls ------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the layer over the strategy. All arguments are those of Lightning's Callback."""
        self.layer = StrategyLayer(trainer, self._opened)
        self.layer.install(FITTING if stage == "fit" else EVALUATING)
        wait_for_copies(trainer, self._gate)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run. All arguments are those of Lightning's Callback."""
        if self.layer is None or trainer.fast_dev_run:
            return
        self.layer.open(self._run(trainer))
        self._seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave, if it is time. All arguments are those of Lightning's Callback."""
        layer, step = self.layer, trainer.global_step
        if layer is None or layer.ckpt is None or step == self._seen:
            return  # no update: the batch accumulates
        self._seen = step
        if layer.ckpt.is_last(step):
            layer.leave()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what a kill after the last step has left: then Lightning resumes, and trains
        nothing. All arguments are those of Lightning's Callback."""
        if self.layer is not None and trainer.ckpt_path and not trainer.fast_dev_run:
            self.layer.finish_earlier(self._run(trainer))

    # -- the run ---------------------------------------------------------------------------

    def _run(self, trainer: Any) -> str:
        first = getattr(trainer.checkpoint_callback, "dirpath", None)
        run = self.run or first or os.path.join(trainer.default_root_dir, "checkpoints")
        return os.fspath(run)

    def _gate(self) -> None:
        if self.layer is not None and self.layer.ckpt is not None:
            self.layer.ckpt.gate()

    def _opened(self, run: str) -> Checkpointer:
        ckpt = self.checkpointer(run, KEEP)
        leave_on_signals(ckpt, self.leave_within_s)
        return ckpt


# -- callbacks that average weights ----------------------------------------------------------------
# Some callbacks of Lightning change the weights of the module by themselves. They write in hooks,
# and not by an optimizer, so no save would notice them: a step could have the weights of two
# moments. Here each of these changes waits for the copies of saves under way.

# What changes the weights of the module, by the name of the callback.
_CHANGES = {
    "StochasticWeightAveraging": ("transfer_weights",),
    "WeightAveraging": ("_swap_models", "_copy_average_to_current"),
}


def wait_for_copies(trainer: Any, gate: Callable[[], None]) -> None:
    """Have the callbacks of a Trainer call `gate` before they change weights."""
    for kind, names in _CHANGES.items():
        averaging = getattr(callbacks, kind, ())  # an older Lightning has fewer
        for each in trainer.callbacks:
            if isinstance(each, averaging):
                for name in names:
                    _guard(each, name, gate)


def _guard(callback: Any, name: str, gate: Callable[[], None]) -> None:
    vars(callback).pop(name, None)  # of an earlier Trainer
    setattr(callback, name, partial(_after, gate, getattr(callback, name)))


def _after(gate: Callable[[], None], change: Callable[..., None], *args: Any) -> None:
    gate()
    change(*args)


EVALUATING = ("teardown", "load_checkpoint")
FITTING = (
    *EVALUATING, "setup", "process_dataloader", "on_train_start",
    "load_optimizer_state_dict", "save_checkpoint", "remove_checkpoint",
    "lightning_module_state_dict", "optimizer_state",
)  # fmt: skip
