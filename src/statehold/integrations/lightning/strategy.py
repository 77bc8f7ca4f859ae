"""The strategy of a Trainer, while it fits: its checkpoints are steps of statehold.

    model, optimizer, optimizer_1, ...   the objects themselves, so that they are copied lazily
    lightning                            everything else of the checkpoint, by rank 0
    logged                               what was logged in the epoch, by each rank
    data                                 positions of the loaders, and the rest of each rank
    rng                                  the generators of each rank

Invariants: ModelCheckpoint decides when, where and for how long there is a checkpoint. What the
layer does not know is left to the strategy: checkpoints that Lightning has written, and every
method without a run that is open. The names are those of a state written by hand, so a step
restores without Lightning.

Not here: the moment of a save in its batch (moments).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import SequentialSampler

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import StepNotFoundError, UsageError
from statehold.integrations.lightning import moments
from statehold.integrations.lightning.checkpoints import Checkpoint, FoundStep, settle
from statehold.integrations.lightning.moments import (
    finish_epoch,
    give_back,
    go_on,
    put_back_reloaded,
    results_of,
    shown,
)
from statehold.integrations.trained import Finisher, discard_newer, persistent_buffers
from statehold.process.warn import logger
from statehold.reading.load import load
from statehold.tensors.kinds import loaders
from statehold.tensors.kinds.rng import Rng
from statehold.tensors.marks import Volatile

# -- the strategy ----------------------------------------------------------------------------------
# Lightning has three seams, and none is enough alone. A CheckpointIO is called on rank 0 only, with
# state dicts; and ModelParallelStrategy, which gathers or copies all weights first, has none. A
# subclass of a strategy would be needed for each of them. A callback sees neither the path of a
# save nor that of a restore. So a callback puts this layer over the public methods of the strategy
# that the Trainer has, and takes it away at the end.


# A step is given to its paths before the third save after it begins, so the run has it until then.
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
        self._finisher = Finisher(_export, "load_from_checkpoint()")
        self._run = ""
        self._begins_at: int | None = None  # before the first save
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
        self._begins_at = step
        self.ckpt = self._opener(run)
        newer = [each for each in self.ckpt.steps() if each > step]
        if newer and not self._trainer.ckpt_path:
            raise UsageError(
                "the directory of the checkpoints has steps already",
                facts={"run": run, "newest step": newer[-1]},
                hint='fit(..., ckpt_path="last"), or choose another dirpath for ModelCheckpoint',
            )
        if self._trainer.is_global_zero:
            self._warn()
        self._settle(run)

    def finish_earlier(self, run: str) -> None:
        """Do what an earlier job has left undone, after a fit() that has found nothing to train."""
        if not self._run:  # it was not opened
            self._settle(run)
            self._finisher.finish(write=True)

    def _settle(self, run: str) -> None:
        if self._trainer.is_global_zero:
            for folder in {run, *(str(each.dirpath) for each in self._callbacks())}:
                self._finisher.owe(settle(folder, self._trainer.global_step))

    def _warn(self) -> None:
        for each in tree_leaves(self._trainer.train_dataloader):
            if (doubt := doubts(each)) is not None:
                logger.warning("%s: %s", type(each).__name__, doubt)

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
        self._finisher.wait(0 if self._saved and self._saved.step == step else KEEP - 1)
        self._save(path, step, checkpoint)

    def _save(self, path: str, step: int, checkpoint: dict[str, Any]) -> None:
        assert self.ckpt is not None
        discard_newer(self.ckpt, self._begins_at)
        self._begins_at = None
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
            checkpoint.removed_after(self._saved.step if self._saved else 0)
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


# -- what a step holds -----------------------------------------------------------------------------
# A step is made from the checkpoint that Lightning has dumped. So the hooks on_save_checkpoint
# decide what is saved, as ever. Weights or optimizer states that a hook has replaced are saved as
# it left them.


class LiveOptimizers(list[Any]):
    """Stands for optimizer states in a checkpoint, where the optimizers themselves are meant."""


def live(module: nn.Module, wrapped: nn.Module, weights: Any) -> Any:
    """The module, if `weights` is its state dict; else the weights, which a hook has replaced."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)),
               **persistent_buffers(module)}  # fmt: skip
    is_whole = weights.keys() == tensors.keys()
    if is_whole and all(_place(weights[name]) == _place(each) for name, each in tensors.items()):
        return wrapped
    return Volatile(dict(weights))


def _place(value: Any) -> Any:
    """Equal for two tensors only if they are the same memory in the same form."""
    if not isinstance(value, torch.Tensor):
        return value
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def optimizers_of(trainer: Any) -> dict[str, Any]:
    return {f"optimizer_{i}" if i else "optimizer": each
            for i, each in enumerate(trainer.optimizers)}  # fmt: skip


def taken(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The state to save for a checkpoint; all ranks call this."""
    rest = dict(checkpoint)
    weights = rest.pop("state_dict")
    model = live(trainer.lightning_module, trainer.strategy.model, weights)
    state = {"model": model}
    if isinstance(rest.get("optimizer_states"), LiveOptimizers):
        del rest["optimizer_states"]
        state.update(optimizers_of(trainer))
    # Each rank saves the positions of its own loaders.
    rest["loops"] = loops = dict(rest["loops"])
    fit = loops["fit_loop"] = dict(loops["fit_loop"])
    fit["state_dict"] = {k: v for k, v in fit["state_dict"].items() if k != "combined_loader"}
    all_loaders = tree_leaves(trainer.train_dataloader)
    data = [each for each in all_loaders if hasattr(each, "load_state_dict")]
    own = {
        "checkpoint": rest,
        "world": trainer.world_size,
        "optimizers": len(trainer.optimizers) if "optimizer" in state else 0,
        "is_module": not isinstance(model, Volatile),
        "reloaded": moments.reloaded(trainer),
    }
    # Any number of ranks may resume, so what is the same for all is saved by one.
    state["lightning"] = own if trainer.is_global_zero else {}
    logged = {"shown": shown(trainer), "results": results_of(trainer)}
    return {**state, "logged": logged, "data": data, "rng": Rng()}


def values(run: str, step: int, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint of a step without weights and optimizer states, and what is known of it.

    The latter has "world", "optimizers", "is_module", "epoch", "moment" and what was "shown". If as
    many ranks saved the step, it also has "results", "data" and "rng" of this rank.
    """
    known = load(run, "lightning", step=step, rank=0)
    checkpoint = known.pop("checkpoint")
    fit = checkpoint["loops"]["fit_loop"]
    known["epoch"] = max(fit["epoch_progress"]["current"]["ready"] - 1, 0)
    known["moment"] = moments.moment_of(fit)
    moments.adjust(fit, known["moment"])
    is_same_world = known["world"] == world
    logged = load(run, "logged", step=step, rank=rank if is_same_world else 0)
    known["shown"] = logged["shown"]
    if is_same_world:
        known["results"] = logged["results"]
        known["data"] = load(run, "data", step=step, rank=rank)
        known["rng"] = load(run, "rng", step=step, rank=rank)
    return checkpoint, known


# -- what comes back from a step -------------------------------------------------------------------
# Everything comes back before the first batch. Lightning asks for the checkpoint, then for the
# optimizers, and makes the iterators of the loaders last. So the generators of random numbers are
# put back after each of them. When the training begins, the loops go on from the moment of the
# save.
#
# All ranks take the step that rank 0 has found. With another number of ranks, a warning names what
# is not restored.


COMMITTED = "step-*/manifest.json"
_OTHER_RANKS = (
    "step %d was saved on %d ranks and is resumed on %d. Not restored: the random generators of "
    "each rank, its position in the data, and its means over the epoch. An epoch that had begun "
    "begins once more"
)


class Restoring:
    """Methods over those of the strategy of `trainer`. stock: the strategy's own, by name."""

    def __init__(self, trainer: Any, stock: Mapping[str, Callable[..., Any]]) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._stock = stock
        self._resumed: FoundStep | None = None
        self._known: dict[str, Any] = {}

    # -- the checkpoint --------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        decided: Any = None
        if self._trainer.is_global_zero:  # alone, because it may give the path its step
            try:
                decided = self._decided(checkpoint_path)
            except Exception as error:  # the others wait for an answer
                decided = error
        decided = self._strategy.broadcast(decided)
        if isinstance(decided, Exception):
            raise decided
        is_ours, found = decided
        if not is_ours:
            return dict(self._stock["load_checkpoint"](checkpoint_path, weights_only=weights_only))
        if found is None:
            return self._nothing(checkpoint_path)
        self._resumed = found = FoundStep(*found)
        ranks = self._trainer.global_rank, self._trainer.world_size
        checkpoint, self._known = values(found.run, found.step, *ranks)
        saved, now = self._known["world"], self._trainer.world_size
        if self._trainer.training and self._trainer.is_global_zero and saved != now:
            logger.warning(_OTHER_RANKS, found.step, saved, now)
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

    def _decided(self, path: Any) -> tuple[bool, FoundStep | None]:
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
        logger.warning("there is no committed step to resume for %s: beginning", path)
        weights = self._strategy.lightning_module.state_dict()
        return {"pytorch-lightning_version": lightning.__version__, "epoch": 0, "global_step": 0,
                "state_dict": weights, "optimizer_states": LiveOptimizers(),
                "lr_schedulers": []}  # fmt: skip

    def _restore_sharded(self, found: FoundStep) -> None:
        module = self._strategy.lightning_module
        is_module = self._known["is_module"]
        state = {"model": module if is_module else Volatile(dict(module.state_dict()))}
        if self._known["optimizers"]:
            state.update(optimizers_of(self._trainer))  # none, unless it fits
        self._restore(found, state, state, strict=module.strict_loading)
        self._put_back_generators()

    def _restore(
        self,
        found: FoundStep,
        state: Mapping[str, Any],
        only: Iterable[str],
        *,
        strict: bool = True,
    ) -> None:
        with Checkpointer(found.run) as ckpt:
            # cast: the Trainer may have another precision now, and Lightning converts, too
            ckpt.restore(state, found.step, only=list(only), strict=strict, cast=True)

    def _put_back_generators(self) -> None:
        if "rng" in self._known:
            Rng().load_state_dict(self._known["rng"])

    # -- the loaders -----------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loaders of the training get their positions before their iterators are made."""
        if self._trainer.training and hasattr(dataloader, "load_state_dict"):
            shuffle_once(dataloader)
            if positions := self._known.get("data", []):
                goes_on(dataloader, positions.pop(0), self._known["epoch"])
        return self._stock["process_dataloader"](dataloader)

    # -- the loops -------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """All iterators are made now. What Lightning was about to do at the save follows."""
        self._stock["on_train_start"]()
        known, trainer = self._known, self._trainer
        if known:
            give_back(trainer, known["shown"], known.get("results"))
            put_back_reloaded(trainer, known["reloaded"])
            self._put_back_generators()
            go_on(trainer, known["moment"], lambda: finish_epoch(trainer))
        self._known = {}


# -- where a loader goes on ------------------------------------------------------------------------
# A step has the iterator of its epoch behind it: `loaders.load` makes one that draws nothing. After
# the last batch of an epoch, this iterator is used up, and Lightning makes that of the next epoch
# in its turn (moments), with the generators of the step.


_IS_USED_UP = "_iterator_finished"


def goes_on(loader: Any, position: Any, epoch: int) -> None:
    """Give a loader its position in an epoch."""
    _set_epoch(loader, epoch)
    if isinstance(position, dict) and position.get(_IS_USED_UP):
        # torchdata would make the iterator of the next epoch at once, too.
        position = {**position, _IS_USED_UP: False}
    loaders.load(loader, position)


def doubts(loader: Any) -> str | None:
    """Why a training does not go on with the same batches after all, and what to do; or None."""
    if not hasattr(loader, "load_state_dict"):
        return _FORGETS
    if not hasattr(loader, "__len__") or sized_len(loader) is None:
        return _AHEAD
    generator = getattr(loader, "generator", None)
    is_own = generator is not None and generator is not torch.default_generator
    if is_own or getattr(loader, "persistent_workers", False):
        return _NEXT_EPOCH
    return None


_FORGETS = (
    "it does not know its position, so a checkpoint inside an epoch resumes with other batches. "
    "Pass StatefulDataLoader of torchdata, or save at the end of epochs"
)
_AHEAD = (
    "it has no length, so Lightning fetches a batch ahead, and a checkpoint inside an epoch loses "
    "that batch. Give the dataset a __len__"
)
_NEXT_EPOCH = (
    "it has a generator of its own or persistent workers, so the epochs after a resume may have "
    "another order. Leave out generator= and persistent_workers=; seed_everything() is enough"
)


def shuffle_once(loader: Any) -> None:
    """Let the order of an epoch depend on the seed and the epoch alone, on several ranks.

    Lightning puts a shuffling DistributedSampler around the sampler of a StatefulDataLoader. That
    one shuffles, too, and its generator is then in no state, and may differ between ranks.
    """
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    inner = sampler.dataset if isinstance(sampler, DistributedSamplerWrapper) else None
    # torchdata's, which need not be installed
    if inner and sampler.shuffle and type(own := inner._sampler).__name__ == "RandomSampler":
        inner._sampler = SequentialSampler(own)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Lightning does this only after it has made the iterator."""
    batches: Any = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
