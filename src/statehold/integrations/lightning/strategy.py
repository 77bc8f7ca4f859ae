"""The strategy of a Trainer, while it fits: its checkpoints are steps of statehold.

Lightning has three seams, and none is enough alone. A CheckpointIO is called on rank 0 only, with
state dicts; and ModelParallelStrategy, which gathers or copies all weights first, has none. A
subclass of a strategy would be needed for each of them. A callback sees neither the path
of a save nor that of a restore. So a callback puts this layer over the public methods of the
strategy that the Trainer has, and takes it away at the end.

Invariants: ModelCheckpoint decides when, where and for how long there is a checkpoint. What
the layer does not know is left to the strategy: checkpoints that Lightning has written, and every
method without a run that is open.
Not here: what comes back from a step (restoring), what happens after a save (finishing).
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils._pytree import tree_leaves

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import UsageError
from statehold.integrations.lightning.checkpoints import Checkpoint, settle
from statehold.integrations.lightning.finishing import Finisher
from statehold.integrations.lightning.positions import doubts
from statehold.integrations.lightning.restoring import Restoring
from statehold.integrations.lightning.state import LiveOptimizers, taken
from statehold.reading.load import load

log = logging.getLogger("statehold")

# A step is given to its paths at the latest when the save after next begins.
KEEP = 3
SUPPORTED = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class _Saved(NamedTuple):
    """The last save: its step, its path, how far the loops had come, and its handle."""

    step: int
    path: str
    progress: Any
    handle: Save


class StrategyLayer:
    """Over the strategy of `trainer` from install() until the strategy's teardown().

    opener: makes the Checkpointer of a run directory.
    """

    def __init__(self, trainer: Any, opener: Callable[[str], Checkpointer]) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._opener = opener
        self._finisher = Finisher(_export)
        self._run = ""
        self._saved: _Saved | None = None
        self._given: list[Any] = []
        self._is_leaving = False
        self._stock: dict[str, Callable[..., Any]] = {}
        self._restoring = Restoring(trainer, self._stock)
        self.ckpt: Checkpointer | None = None

    # -- over the strategy -----------------------------------------------------------------

    def install(self, names: Sequence[str]) -> None:
        """Put the methods of this layer, or of Restoring, over those of the strategy."""
        if not isinstance(self._strategy, SUPPORTED):
            raise UsageError(
                "statehold does not save for this strategy of Lightning",
                facts={"strategy": type(self._strategy).__name__},
                hint="one device, DDPStrategy and ModelParallelStrategy (FSDP2) are supported",
            )
        for name in names:
            self._stock[name] = getattr(self._strategy, name)
            owner = self if hasattr(self, name) else self._restoring
            setattr(self._strategy, name, getattr(owner, name))

    def setup(self, trainer: Any) -> None:
        # At the end of a batch, the callback acts after ModelCheckpoint.
        trainer.callbacks.sort(key=lambda each: getattr(each, "layer", None) is self)
        self._stock["setup"](trainer)

    def teardown(self) -> None:
        """End all saves, before the Trainer puts the handlers of signals back."""
        try:
            if self.ckpt is not None:
                self.ckpt.close()
        finally:
            self.ckpt = None
            self._finisher.finish(write=not self._is_leaving)
            for name in self._stock:
                vars(self._strategy).pop(name, None)
            self._stock["teardown"]()

    # -- the run ---------------------------------------------------------------------------

    def open(self, run: str) -> None:
        """Open the run directory for saves; all ranks call this, when the training begins."""
        self._run, step = _local(run), self._trainer.global_step
        if self._trainer.is_global_zero:
            self._warn()
            settle(run)
        self.ckpt = self._opener(run)
        newer = [each for each in self.ckpt.steps() if each > step]
        if newer and not self._trainer.ckpt_path:
            raise UsageError(
                "the directory of the checkpoints has steps already",
                facts={"run": run, "newest step": newer[-1]},
                hint='fit(..., ckpt_path="last"), or choose another dirpath for ModelCheckpoint',
            )
        if newer:
            log.warning("step %d is resumed, and %d newer steps are discarded", step, len(newer))
            self.ckpt._go_on_from(step)

    def _warn(self) -> None:
        for each in tree_leaves(self._trainer.train_dataloader):
            if (doubt := doubts(each)) is not None:
                log.warning("%s: %s", type(each).__name__, doubt)

    def leave(self) -> None:
        """Save the step that is the last, as the last checkpoint; raises SystemExit."""
        for each in self._callbacks():
            each.last_model_path = _last_path(each)
            self._trainer.save_checkpoint(each.last_model_path)
        self._trainer.save_checkpoint(os.path.join(self._run, "last.ckpt"))

    def _callbacks(self) -> list[ModelCheckpoint]:
        return [each for each in self._trainer.checkpoint_callbacks
                if isinstance(each, ModelCheckpoint)]  # fmt: skip

    # -- saving ----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> Any:
        if self.ckpt is None:
            return self._stock["lightning_module_state_dict"]()
        self._given = []
        return self._strategy.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        if self.ckpt is None:
            return self._stock["optimizer_state"](optimizer)
        self._given.append(getattr(optimizer, "_optimizer", optimizer).state_dict())
        return self._given[-1]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self.ckpt is None:
            self._stock["save_checkpoint"](checkpoint, filepath, storage_options=storage_options)
            return
        path = _local(str(self._strategy.broadcast(filepath)), storage_options)
        if self._is_leaving:
            return
        step, key = checkpoint["global_step"], self._copy_of(path, checkpoint)
        if key is not None and self._saved is not None:
            self._give(path, step, self._saved.handle, key)
            return
        # The run has one step of a number. An earlier one of this number gets its paths first.
        self._finisher.wait(0 if self._saved and self._saved.step == step else 1)
        self._save(path, step, checkpoint)

    def _save(self, path: str, step: int, checkpoint: dict[str, Any]) -> None:
        assert self.ckpt is not None
        progress = _progress(checkpoint)
        states = checkpoint.get("optimizer_states", ())
        if states and all(map(operator.is_, states, self._given)):
            checkpoint["optimizer_states"] = LiveOptimizers()
        state = taken(self._trainer, checkpoint)
        if self._trainer.is_global_zero:
            Checkpoint(path).announce(self._run, step)
        try:
            handle = self.ckpt.save(step, state, force=True)
        except SystemExit:
            self._left(path, step)
            raise
        self._saved = _Saved(step, path, progress, handle)
        self._give(path, step, handle)

    def _give(self, path: str, step: int, handle: Save, key: str | None = None) -> None:
        if self._trainer.is_global_zero:
            checkpoint = Checkpoint(path)
            if key is not None:
                checkpoint.announce(self._run, step, key)
            self._finisher.hold(handle, checkpoint)

    def _copy_of(self, path: str, checkpoint: dict[str, Any]) -> str | None:
        """The ModelCheckpoint that has just saved this state and saves it once more, as its last.

        The path gets the same step, because Lightning defines it as a copy.
        """
        saved = self._saved
        if saved is None or saved.step != checkpoint["global_step"]:
            return None
        for each in self._callbacks():
            is_its_own = saved.path in (each.best_model_path, *each.best_k_models)
            if each.last_model_path == path != saved.path and is_its_own:
                return each.state_key if saved.progress == _progress(checkpoint) else None
        return None

    def _left(self, path: str, step: int) -> None:
        """The step is committed, and the process has to end: its paths get it now."""
        self._is_leaving = True
        if self._trainer.is_global_zero:
            self._finisher.wait()
            Checkpoint(path).hold(step)
            for each in self._callbacks():
                last = Checkpoint(_last_path(each))
                if last.path != Checkpoint(path).path:
                    last.announce(self._run, step, each.state_key)
                    last.hold(step)

    def remove_checkpoint(self, filepath: Any) -> None:
        checkpoint = Checkpoint(filepath)
        if self.ckpt is None or checkpoint.path.is_symlink() or not checkpoint.is_ours:
            self._stock["remove_checkpoint"](filepath)
        elif self._trainer.is_global_zero:
            self._finisher.remove(checkpoint)


def _progress(checkpoint: dict[str, Any]) -> Any:
    """How far the loops have come, without the loaders."""
    return {key: each for key, each in checkpoint["loops"]["fit_loop"].items()
            if key != "state_dict"}  # fmt: skip


def _last_path(callback: ModelCheckpoint) -> str:
    name = callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION
    return callback.last_model_path or os.path.join(str(callback.dirpath), name)


def _local(path: str, storage_options: Any = None) -> str:
    if "://" in path or storage_options is not None:
        raise UsageError(
            "statehold saves into a local or shared file system",
            facts={"path": path, "storage_options": str(storage_options)},
            hint="override StateholdCallback.checkpointer() and pass levels=[Directory(), "
            "ObjectStore(...)] to the Checkpointer",
        )
    return path


def _export(checkpoint: Checkpoint) -> None:
    """Write weights and values of a checkpoint into its file, for load_from_checkpoint()."""
    found = checkpoint.found()
    if found is not None and not checkpoint.has_weights():
        saved = load(found.run, "lightning", step=found.step, rank=0)["checkpoint"]
        checkpoint.write({**saved, "state_dict": load(found.run, "model", step=found.step)})
