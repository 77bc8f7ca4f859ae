"""The strategy of a Trainer, while it fits: its checkpoints are steps of statehold.

Lightning has three seams, and none is enough alone. A CheckpointIO is called on rank 0 only, with
state dicts; and ModelParallelStrategy, which gathers or copies all weights first, has none. A
subclass of a strategy would be needed for each of them. A callback sees neither the path
of a save nor that of a restore. So a callback puts this layer over the public methods of the
strategy that the Trainer has, and takes it away at the end.

Invariants: ModelCheckpoint decides when, where and for how long there is a checkpoint. What
the layer does not know is left to the strategy: checkpoints that Lightning has written, and every
method without a run that is open.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils._pytree import tree_leaves

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import StepNotFoundError, UsageError
from statehold.integrations.lightning.checkpoints import Checkpoint, Found, settle
from statehold.integrations.lightning.finishing import Finisher
from statehold.integrations.lightning.positions import (
    NextEpoch,
    Place,
    doubts,
    goes_on,
    shuffle_once,
)
from statehold.integrations.lightning.state import (
    LiveOptimizers,
    optimizers_of,
    taken,
    values,
)
from statehold.reading.load import load
from statehold.tensors.marks import Volatile
from statehold.tensors.rng import Rng

__all__ = ["KEEP", "Layer"]

log = logging.getLogger("statehold")

# A step is given to its paths at the latest when the save after next begins.
KEEP = 3
COMMITTED = "step-*/manifest.json"
SUPPORTED = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class _Saved(NamedTuple):
    """The last save: its step, its path, how far the loops had come, and its handle."""

    step: int
    path: str
    progress: Any
    handle: Save


class Layer:
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
        self._resumed: Found | None = None
        self._known: dict[str, Any] = {}
        self._next_epochs: list[NextEpoch] = []
        self._is_leaving = False
        self._stock: dict[str, Any] = {}
        self.ckpt: Checkpointer | None = None

    # -- over the strategy -----------------------------------------------------------------

    def install(self, names: Sequence[str]) -> None:
        """Put the methods of this layer with these names over those of the strategy."""
        if not isinstance(self._strategy, SUPPORTED):
            raise UsageError(
                "statehold does not save for this strategy of Lightning",
                facts={"strategy": type(self._strategy).__name__},
                hint="one device, DDPStrategy and ModelParallelStrategy (FSDP2) are supported",
            )
        for name in names:
            self._stock[name] = getattr(self._strategy, name)
            setattr(self._strategy, name, getattr(self, name))

    def setup(self, trainer: Any) -> None:
        # At the end of a batch, the callback acts after ModelCheckpoint.
        trainer.callbacks.sort(key=lambda each: getattr(each, "layer", None) is self)
        self._stock["setup"](trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loaders of the training get their positions before their iterators are made."""
        if self._trainer.training and hasattr(dataloader, "load_state_dict"):
            shuffle_once(dataloader)
            self._place_loader(dataloader)
        return self._stock["process_dataloader"](dataloader)

    def _place_loader(self, loader: Any) -> None:
        known, positions = self._known, self._known.get("data", [])
        if positions:
            place = Place(known["epoch"], known["is_epoch_over"], self._put_back_generators)
            next_epoch = goes_on(loader, positions.pop(0), place)
            self._next_epochs += [next_epoch] if next_epoch is not None else []

    def on_train_start(self) -> None:
        """Inside an epoch, all iterators are made now. The next batch follows."""
        if not self._known.get("is_epoch_over", True):
            self._put_back_generators()
        self._stock["on_train_start"]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for each in self._next_epochs:
            each.end()
        self._next_epochs, self._known = [], {}
        self._stock["on_train_batch_start"](batch, batch_idx)

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
            self.ckpt.rewind(step)

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

    # -- restoring -------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        is_ours, found = self._strategy.broadcast(self._decided(checkpoint_path))
        if not is_ours:
            stock: dict[str, Any] = self._stock["load_checkpoint"](
                checkpoint_path, weights_only=weights_only
            )
            return stock
        if found is None:
            return self._nothing(checkpoint_path)
        self._resumed = found = Found(*found)
        ranks = self._trainer.global_rank, self._trainer.world_size
        checkpoint, self._known = values(found.run, found.step, *ranks)
        if found.last_of in checkpoint.get("callbacks", {}):
            checkpoint["callbacks"][found.last_of]["last_model_path"] = str(checkpoint_path)
        if self._known["optimizers"]:
            checkpoint["optimizer_states"] = LiveOptimizers()
        if isinstance(self._strategy, ModelParallelStrategy):
            self._restore_sharded(found)
        else:
            checkpoint["state_dict"] = load(found.run, "model", step=found.step, mapped=True)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The last of what is restored, so the generators follow here for the first time."""
        if not isinstance(checkpoint["optimizer_states"], LiveOptimizers):
            self._stock["load_optimizer_state_dict"](checkpoint)
        elif self._resumed is not None:
            model = {"model": self._strategy.model} if self._known["is_module"] else {}
            optimizers = optimizers_of(self._trainer)
            self._restore(self._resumed, {**model, **optimizers}, optimizers)
        self._put_back_generators()

    def _decided(self, path: Any) -> tuple[bool, Found | None]:
        """Whether a path is one of a step, and the step; None if nothing was ever committed."""
        checkpoint = Checkpoint(path).target()
        if "://" in str(path) or not checkpoint.is_ours:
            return False, None
        found = checkpoint.found()
        steps = sorted(each.parent.name for each in checkpoint.path.parent.glob(COMMITTED))
        if found is None and (steps or not self._trainer.training):
            raise StepNotFoundError(
                "this checkpoint has no committed step",
                facts={"checkpoint": str(path), "committed": ", ".join(steps) or "none"},
                hint='ckpt_path="last" takes the newest, with ModelCheckpoint(save_last=True)',
            )
        return True, found

    def _nothing(self, path: Any) -> dict[str, Any]:
        """A checkpoint of the state as it is: the only save was killed before it was committed."""
        log.warning("there is no committed step to resume for %s: beginning", path)
        weights = self._strategy.lightning_module.state_dict()
        return {"pytorch-lightning_version": lightning.__version__, "epoch": 0, "global_step": 0,
                "state_dict": weights, "optimizer_states": LiveOptimizers(),
                "lr_schedulers": []}  # fmt: skip

    def _restore_sharded(self, found: Found) -> None:
        module = self._strategy.lightning_module
        is_module = self._known["is_module"]
        state = {"model": module if is_module else Volatile(dict(module.state_dict()))}
        if self._known["optimizers"]:
            state.update(optimizers_of(self._trainer))  # none, unless it fits
        self._restore(found, state, state, strict=module.strict_loading)
        self._put_back_generators()

    def _restore(
        self, found: Found, state: Mapping[str, Any], only: Iterable[str], *, strict: bool = True
    ) -> None:
        with Checkpointer(found.run) as ckpt:
            ckpt.restore(state, found.step, only=list(only), strict=strict)

    def _put_back_generators(self) -> None:
        if "rng" in self._known:
            Rng().load_state_dict(self._known["rng"])


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
