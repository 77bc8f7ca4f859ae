"""The Trainer of transformers, and trainers built on it, with steps of statehold.

    trainer = StateholdTrainer(model=model, args=args, train_dataset=data)  # for Trainer
    trainer.train(resume_from_checkpoint=True)

    class MyTrainer(SFTTrainer, StateholdTrainer): ...    # for a trainer of your own, or of TRL

Owns: what of a Trainer is in a step, and when it comes out (docs/integrations.md).
Invariants: save_total_limit, the best model and the rotation are decided by the Trainer's own rules
over the folders checkpoint-N. Without a run that is open, each method is the Trainer's.
Not here: the folders, and models beside the one that trains (folders).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import RandomSampler
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import StepNotFoundError, UsageError, some
from statehold.format.entries import NAMES_MAX, is_name
from statehold.integrations.trained import (
    Finisher,
    discard_newer,
    leave_on_signals,
    trained_part,
)
from statehold.integrations.transformers.folders import Beside, Folder, Folders, step_named
from statehold.options.paths import step_name
from statehold.reading.copying import copy_step
from statehold.reading.load import load
from statehold.tensors.kinds.rng import Rng

__all__ = ["StateholdTrainer"]

log = logging.getLogger("statehold")

# -- the trainer -----------------------------------------------------------------------------------
# A step holds the model, the optimizer, the scheduler, the scaler, the random generators, the loss
# that is not logged yet, and the TrainerState with the callbacks. The Trainer itself finds the
# position in the data, from the TrainerState, before it makes the loader. So this comes out of the
# step first, the rest after `prepare`, and the generators after the first batches, where the
# Trainer restores them.


# The best step is given second names at the save after next, when it is certainly committed.
KEEP_FOR_BEST = 3


class _Damaged(Exception):
    """The step that was chosen is damaged, and an older one was restored."""


class _Resumed(NamedTuple):
    """What is resumed: a step, of the run `source` unless it is this one; or a folder that the
    Trainer itself has saved; or nothing."""

    step: int | None = None
    source: str | None = None
    stock: str | None = None


@dataclass
class _OpenRun:
    """What is open while train() runs.

    wanted: resume_from_checkpoint. stack: what ends with it. step, source: what is resumed, as in
    _Resumed; kept: the names of its extra entries. is_asked: it is that step or none; otherwise a
    damaged one is set aside, and the one before it is restored. has_saved: since the Trainer has
    begun its loop. late: names that the model part has even where they are frozen: those of the
    step that is resumed, and of what began to train since. told: the callbacks that a warning has
    named.
    """

    run: str
    ckpt: Checkpointer
    folders: Folders
    finisher: Finisher[Folder]
    wanted: str | bool | None
    stack: contextlib.ExitStack
    step: int | None = None
    source: str | None = None
    is_asked: bool = False
    kept: frozenset[str] = frozenset()
    has_saved: bool = False
    late: frozenset[str] = frozenset()
    beside: Beside | None = None
    is_same_world: bool = True
    rng: Rng = field(default_factory=Rng)
    model: Any = None
    loss: dict[str, Any] | None = None
    saves: list[Save] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def unfinished(self) -> set[int]:
        """The steps whose saves are under way."""
        self.saves = [save for save in self.saves if not save.done("committed")]
        return {save.step for save in self.saves}

    def settle(self) -> None:
        """Wait until every save is committed."""
        for save in self.saves:
            save.wait("committed")

    def restore(self, state: dict[str, Any], **options: Any) -> int | None:
        """Restore from the run that has the step."""
        return self.ckpt.restore(state, source=self.source, **options)

    def restore_chosen(self, state: dict[str, Any], **options: Any) -> None:
        """Restore the step. Raises _Damaged if an older one was restored instead."""
        asked = self.step if self.is_asked else None
        if self.restore(state, step=asked, **options) != self.step:
            raise _Damaged


class StateholdTrainer(Trainer):
    """A Trainer that saves into steps of statehold in `output_dir`.

    All arguments are those of transformers.Trainer.

    Attributes:
        leave_within_s: after SIGTERM or SIGUSR1, all ranks save one more step and exit with code 75
            within so many seconds; None leaves the signals alone.
        weights_before_on_save: each save waits until its step is committed and `checkpoint-N` has
            the weights for from_pretrained, before callbacks get `on_save`.
    """

    leave_within_s: float | None = 25.0
    weights_before_on_save = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_run: _OpenRun | None = None
        self.add_callback(_Steps(self))

    def checkpointer(self, run: str, keep: int | None) -> Checkpointer:
        """Open the run. Override it for levels or other options.

        Args:
            run: the output directory.
            keep: how many steps to keep, by the options of the Trainer. Pass it on.
        """
        return Checkpointer(run, keep=keep)

    def extra_state(self) -> dict[str, Any]:
        """What else a step holds, by name: whatever Checkpointer.save() takes. Override it for an
        optimizer or a table of your own. Modules that are attributes of the trainer or of a
        callback need no mention: a step holds them once they have changed."""
        return {}

    # -- training --------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train as Trainer.train() does. The other arguments are those of Trainer.train().

        Args:
            resume_from_checkpoint: True resumes the newest intact step, and begins at step 0 if
                there is none. The path of a `checkpoint-N` resumes that step, also of another run.
        """
        self._check_supported()
        run = self._get_output_dir(trial)
        with contextlib.ExitStack() as stack:
            ckpt = stack.enter_context(self.checkpointer(run, self._keep()))
            folders = Folders(run)
            finisher = Finisher(self._export, "from_pretrained()")
            opened = _OpenRun(run, ckpt, folders, finisher, resume_from_checkpoint, stack)
            self._open_run = opened
            stack.callback(self._close_run)
            if self.args.save_strategy != SaveStrategy.NO:
                self._warn_of_readers(opened)
                leave_on_signals(ckpt, self.leave_within_s)
            while True:
                try:
                    result = super().train(self._found(opened), trial, *args, **kwargs)
                    break
                except _Damaged:  # on all ranks; the step does not count any more
                    opened.wanted = True
            opened.settle()
            opened.ckpt.flush()  # weights are read from the run directory
            if self.args.should_save:
                self._finish(opened)
            return result

    def _check_supported(self) -> None:
        if self.is_deepspeed_enabled:
            raise UsageError("this Trainer does not save engines of DeepSpeed")
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            log.warning("only the end of the training is pushed to the Hub, not every save")
        persist = self.args.dataloader_num_workers > 0 and self.args.dataloader_persistent_workers
        if persist and self.args.save_strategy != SaveStrategy.NO:
            log.warning(_PERSISTENT)

    def _warn_of_readers(self, opened: _OpenRun) -> None:
        """Of folders without weights; a callback may come at any time."""
        own = {
            type(each).__name__
            for each in self.callback_handler.callbacks
            if getattr(each.on_save, "__func__", None) is not TrainerCallback.on_save
        }
        new = ", ".join(sorted(own - opened.told))
        if new and not self.weights_before_on_save:
            log.warning(_FOLDERS.format(new))
        opened.told |= own

    def _warn_of_resume(self) -> None:
        if self.args.save_only_model:
            log.warning(_MODEL_ONLY)
        callbacks = self.callback_handler.callbacks
        names = [type(each).__name__ for each in callbacks if isinstance(each, ExportableState)]
        if names and not self.args.restore_callback_states_from_checkpoint:
            log.warning(_FORGETFUL.format(", ".join(names)))

    def _keep(self) -> int | None:
        """How many steps the run keeps: those that have a folder are among them."""
        limit: int | None = self.args.save_total_limit
        if limit is None or limit <= 0:
            return None
        return max(limit, KEEP_FOR_BEST) if self.args.metric_for_best_model else limit

    def _close_run(self) -> None:
        opened, self._open_run = self._open_run, None
        if opened is not None:
            opened.finisher.finish(write=False)

    # -- which step is resumed -------------------------------------------------------------

    def _found(self, opened: _OpenRun) -> str | None:
        """The folder to resume from; with a step of it, if that is not a stock checkpoint."""
        newest = max(opened.ckpt.steps(), default=None)
        decided = [(*self._decided(opened), newest)]  # by rank 0, for all
        if self.args.world_size > 1:
            broadcast_object_list(decided)
        step, source, stock, newest = decided[0]
        # Once more the same step: it is damaged, and was not set aside.
        opened.is_asked = source is not None or step != newest or step == opened.step
        opened.step, opened.source = step, source
        if step is None:
            if stock is None and not opened.ckpt.steps() and self.args.should_save:
                opened.folders.discard_unfinished()
            return stock
        self._warn_of_resume()
        trainer = {"state": "", "world": 0, "extra": "", "late": ""}
        opened.restore_chosen({"trainer": trainer}, only=["trainer"], strict=False)
        opened.is_same_world = trainer["world"] == self.args.world_size
        opened.kept = frozenset(str(trainer["extra"]).splitlines())
        opened.late = frozenset(str(trainer["late"]).splitlines())
        folders = opened.folders
        if opened.source not in (None, os.path.realpath(folders.path(step))):
            # A folder here would look like a checkpoint of this run.
            folders = Folders(opened.stack.enter_context(tempfile.TemporaryDirectory()))
        folders.make(step, str(trainer["state"]))
        return folders.path(step)

    def _decided(self, opened: _OpenRun) -> _Resumed:
        folders, steps, wanted = opened.folders, opened.ckpt.steps(), opened.wanted
        if wanted is True:
            return self._newest(opened, steps)
        if not wanted:
            if steps and self.args.save_strategy != SaveStrategy.NO:
                raise UsageError(
                    "the output directory has steps already",
                    facts={"run": str(self.args.output_dir), "newest step": steps[-1]},
                    hint="train(resume_from_checkpoint=True), or choose another output_dir",
                )
            return _Resumed()
        path = str(wanted)
        if folders.is_stock(path):
            return _Resumed(stock=path)
        step = folders.step_of(path)
        if step in steps:
            return _Resumed(step)
        if found := step_named(path):
            run, number = found
            return _Resumed(number, None if folders.is_here(run) else run)
        if step is not None and folders.is_unfinished(step) and step > max(steps, default=0):
            log.warning("checkpoint-%d is of a save that was never committed", step)
            return self._newest(opened, steps)
        if self.args.save_only_model and os.path.isdir(path):
            return _Resumed(stock=path)
        raise _no_step(path, steps)

    def _newest(self, opened: _OpenRun, steps: list[int]) -> _Resumed:
        kept = [step for step in steps if opened.folders.has(step)] or steps
        if kept:
            return _Resumed(kept[-1])
        out = self.args.output_dir
        # Rank 0 makes the directory, perhaps after this rank has come here.
        stock = get_last_checkpoint(out) if os.path.isdir(out) else None
        if stock and opened.folders.is_stock(stock):
            return _Resumed(stock=stock)
        number = opened.folders.step_of(stock)
        if number is not None and not opened.folders.is_unfinished(number):
            raise _no_step(str(stock), steps)  # it was copied here, perhaps
        log.warning("there is no step to resume in %s: beginning", out)
        return _Resumed()

    def _discard_newer(self, opened: _OpenRun) -> None:
        step = -1 if opened.step is None else opened.step
        is_older = -1 < step < max(opened.ckpt.steps(), default=-1)
        if is_older and opened.source and self.args.process_index == 0:
            # never a run without steps
            copy_step(os.path.join(opened.source, step_name(step)), opened.run)
        discard_newer(opened.ckpt, opened.step)
        if opened.step is not None and self.args.should_save:
            opened.folders.discard_after(step)

    # -- what the Trainer calls ------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """With auto_find_batch_size, the Trainer calls it again with each smaller batch."""
        opened = self._open_run
        if opened is not None:
            opened.model = opened.loss = None  # they are wrapped again, and restored
            if opened.has_saved:
                log.warning("a batch found no memory: a smaller one goes on from the newest step")
                opened.settle()
                opened.wanted, opened.has_saved = True, False
                kwargs["resume_from_checkpoint"] = self._found(opened)
        return super()._inner_training_loop(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """A warned job may leave with its last step. The Trainer alone would take one more."""
        if self._resumed() is None or self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        saves = self._open_run is not None and self.args.save_strategy != SaveStrategy.NO
        # accelerate replaces a RandomSampler by one that knows the epoch
        is_seeded = self.args.accelerator_config.use_seedable_sampler
        is_replaced = isinstance(sampler, RandomSampler) and is_seeded
        if saves and hasattr(sampler, "generator") and not is_replaced:
            log.warning(_OTHER_ORDER.format(type(sampler).__name__))
        return sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        opened = self._open_run
        if opened is None:
            super()._save_checkpoint(model, trial)
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._warn_of_readers(opened)
        if not opened.has_saved:
            self._discard_newer(opened)
        step = self.state.global_step
        self._note_best(opened, step)
        text = self._state_text()
        if self.args.should_save:
            opened.folders.make(step, text)
        state = {**self._model_part(opened), **self._training_parts(opened)}
        if extra := self._extra_part(opened):
            state["extra"] = extra
        state["trainer"] = self._trainer_part(opened, text, extra)
        metrics = logged_at(step, self.state.log_history)
        save = opened.ckpt.save(step, state, metrics=metrics, force=True)
        opened.has_saved = True
        opened.saves.append(save)
        if self.weights_before_on_save:
            save.wait("committed")
        if self.args.should_save:
            is_now, finisher = self.weights_before_on_save, opened.finisher
            for folder in self._surplus(opened):
                folder.remove() if is_now else finisher.remove(folder)
            folder = Folder(opened.folders, step)
            finisher.write(folder) if is_now else finisher.hold(save, folder)

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if self._resumed() is None:
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        opened = self._resumed()
        if opened is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = {**self._model_part(opened), **self._training_parts(opened)}
        later = {"rng": "rng" in state, "extra": opened.kept}
        skip = ["trainer", *(name for name, is_there in later.items() if is_there)]
        if not opened.is_same_world and state.pop("loss", None) is not None:
            skip.append("loss")
        opened.loss = state.get("loss")
        opened.restore_chosen(state, skip=skip)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed() is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        opened = self._resumed()
        if opened is None:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None and not self.args.save_only_model:
            opened.restore({"rng": opened.rng}, step=opened.step, only=["rng"])

    def _load_best_model(self) -> None:
        opened, best = self._open_run, self.state.best_model_checkpoint
        step = opened.folders.step_of(best) if opened is not None else None
        if opened is None or step is None:
            super()._load_best_model()
            return
        opened.settle()
        # `late`: the step may be from before other parameters began to train.
        source = None if step in opened.ckpt.steps() else opened.folders.path(step)
        if source is None or opened.folders.holds(step):
            how: dict[str, Any] = {"only": ["model"], "strict": not opened.late, "source": source}
            opened.ckpt.restore(self._model_part(opened), step, **how)
        else:
            log.warning("step %d is the best one, and no level has it any more", step)
            super()._load_best_model()

    # -- what a step holds -----------------------------------------------------------------

    def _resumed(self) -> _OpenRun | None:
        opened = self._open_run
        return opened if opened is not None and opened.step is not None else None

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _model_part(self, opened: _OpenRun) -> dict[str, Any]:
        bare = self._bare_model()
        if opened.model is None:
            opened.model = trained_part(bare, self.model_wrapped, opened.late)
        held = opened.model
        named = bare.named_parameters() if isinstance(held, dict) else ()
        late = {name: each for name, each in named if each.requires_grad and name not in held}
        if late:
            log.warning("began to train, so later steps hold it, too: %s", some([*late]))
            opened.late |= late.keys()
            opened.model |= late
        return {"model": opened.model}

    def _training_parts(self, opened: _OpenRun) -> dict[str, Any]:
        """What only a run that goes on needs."""
        if self.args.save_only_model:
            return {}
        loss = getattr(self, "_tr_loss", None)
        parts = {
            "optimizer": self.optimizer,
            "scheduler": self.lr_scheduler,
            "loss": {
                "sum": torch.zeros((), device=self.args.device) if loss is None else loss,
                "logged": getattr(self, "_globalstep_last_logged", 0),
            },
            "rng": opened.rng,
        }
        if getattr(self.accelerator, "scaler", None) is not None:
            parts["scaler"] = self.accelerator.scaler
        return parts

    def _extra_part(self, opened: _OpenRun) -> dict[str, Any]:
        """What extra_state() names, and the models beside that have changed."""
        if self.args.save_only_model:
            return {}
        changed = opened.beside.changed(opened.kept) if opened.beside else {}
        return {**changed, **self.extra_state()}

    def _trainer_part(self, opened: _OpenRun, text: str, extra: dict[str, Any]) -> dict[str, Any]:
        """On rank 0 only: evaluation times differ between ranks, and any world may resume."""
        if self.args.process_index:
            return {}
        # All names: the next process may begin with any of them frozen.
        held = opened.model if isinstance(opened.model, dict) else ()
        names = {"extra": "\n".join(extra), "late": "\n".join(sorted(held))}
        return {"state": text, "world": self.args.world_size, **names}

    def _state_text(self) -> str:
        """The TrainerState, with the states of the callbacks as they are now."""
        holders = [*self.callback_handler.callbacks, self.control]
        exportable = [each for each in holders if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = TrainerState(
            stateful_callbacks=exportable
        ).stateful_callbacks
        return json.dumps(vars(self.state), sort_keys=True)

    def _note_best(self, opened: _OpenRun, step: int) -> None:
        """Which folder is the best, as the Trainer decides it; its step must not be retired.

        An evaluation that is better, but is not saved, moves only `best_global_step`.
        """
        best, folders = self.state.best_global_step, opened.folders
        if self.args.save_strategy == SaveStrategy.NO:
            return
        if best and (best == step or folders.has(best)):
            self.state.best_model_checkpoint = folders.path(best)
        kept = folders.step_of(self.state.best_model_checkpoint)
        if self.args.should_save and kept not in (None, step) and folders.has(kept):
            folders.hold(kept)

    def _surplus(self, opened: _OpenRun) -> list[Folder]:
        folders, limit = opened.folders, self.args.save_total_limit
        best = folders.step_of(self.state.best_model_checkpoint)
        return [Folder(folders, each) for each in folders.surplus(limit, best, opened.unfinished())]

    def _finish(self, opened: _OpenRun) -> None:
        """Write the weights of every folder that has none. All saves have ended."""
        opened.finisher.finish(write=False)
        for folder in self._surplus(opened) if opened.has_saved else []:
            folder.remove()
        for step in reversed(opened.folders.steps()):
            opened.finisher.write(Folder(opened.folders, step))

    def _begin(self) -> None:
        self.state.train_batch_size = self._train_batch_size  # a resume begins with what fits
        if self._open_run is not None:
            holders = [self, *self.callback_handler.callbacks]
            self._open_run.beside = Beside(holders, self._bare_model(), self.args.world_size)
        if (opened := self._resumed()) is not None:
            self._restore_extra(opened)
            if opened.loss is not None:  # the Trainer has set its sums to zero
                self._tr_loss.copy_(opened.loss["sum"])
                self._globalstep_last_logged = opened.loss["logged"]
                # train() reports the loss of its own steps
                self._total_loss_scalar -= self.accelerator.gather(self._tr_loss).mean().item()

    def _restore_extra(self, opened: _OpenRun) -> None:
        """Here, because callbacks may have made their models when the training began."""
        assert opened.beside is not None
        live = {**opened.beside.models, **self.extra_state()}
        extra = {name: each for name, each in live.items() if name in opened.kept}
        if lost := sorted(opened.kept - extra.keys()):
            log.warning("the step has %s, and nothing here takes it", ", ".join(lost))
        if new := sorted(self.extra_state().keys() - extra.keys()):
            log.warning("the step has no %s, so it begins as the script makes it", ", ".join(new))
        if extra:
            skip = [f"extra.{name}" for name in lost]
            opened.restore({"extra": extra}, step=opened.step, only=["extra"], skip=skip)

    def _export(self, folder: Folder) -> None:
        """What from_pretrained opens, from the committed step into its folder."""
        folders, step = folder.folders, folder.step
        if not folders.has(step) or folders.has_weights(step):
            return
        # A restore would put random generators back.
        whole = load(folder.run, "model", step=step, mapped=True)
        with folders.beside(step) as new:
            self._save(str(new), state_dict=whole)


class _Steps(TrainerCallback):
    """What the trainer does at every step, whether it is saved or not."""

    def __init__(self, trainer: StateholdTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note what trains now, because it may be frozen again at the next save. A model that is
        saved as a whole needs no note."""
        if (opened := self._trainer._open_run) and not isinstance(opened.model, torch.nn.Module):
            self._trainer._model_part(opened)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        opened = self._trainer._open_run
        if opened is not None and opened.ckpt.is_last(state.global_step):
            control.should_save = True


def _no_step(path: str, steps: list[int]) -> StepNotFoundError:
    return StepNotFoundError(
        "this checkpoint has no committed step",
        facts={"checkpoint": path, "steps": ", ".join(map(str, steps)) or "none"},
        hint="resume_from_checkpoint=True takes the newest step. A folder checkpoint-N has "
        "weights for from_pretrained; the optimizer and the rest are in the directory of the "
        "step beside it, so copy the whole run",
    )


# -- doubts ----------------------------------------------------------------------------------------
# Why a training may not go on with the same bits after all, and what to do, in words for the log.
# In each of these cases the Trainer's own resume differs, too, and says nothing.


_PERSISTENT = (
    "from the first epoch after a resume on, dropout will draw other random numbers: new workers "
    "draw a seed, and workers that persist draw none. Leave out "
    "dataloader_persistent_workers=True for the same bits"
)
_MODEL_ONLY = (
    "save_only_model=True: the step has no optimizer and no scheduler, so both are new, and the "
    "random generators do not go on"
)
_FORGETFUL = (
    "the step has the state of {}, and it is not restored. Pass TrainingArguments("
    "restore_callback_states_from_checkpoint=True) to go on with it"
)
_OTHER_ORDER = (
    "{} draws the order of an epoch from a generator that no step has: a resume inside an epoch "
    "takes other samples for the rest of it. Use a sampler that seeds its order in set_epoch()"
)
_FOLDERS = (
    "{}: on_save() is called before checkpoint-N has its weights. If it reads the folder, set "
    "weights_before_on_save = True in a subclass of StateholdTrainer: then each save waits for them"
)


# -- what was logged -------------------------------------------------------------------------------
# The metrics of a step are the numbers that the Trainer has logged at this step. Whatever a
# compute_metrics returns, no save fails because of it. What cannot be a metric is left out.


_FLOAT_BITS = 1024  # greater numbers are not floats


def logged_at(step: int, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers by their names, such as "eval_loss". history: TrainerState.log_history."""
    newest = takewhile(lambda entry: entry.get("step") == step, reversed(history))
    found = {name: value for entry in newest for name, value in entry.items() if name != "step"}
    fitting = [name for name, value in found.items() if is_name(name) and _is_number(value)]
    return {name: float(found[name]) for name in fitting[:NAMES_MAX]}


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and value.bit_length() < _FLOAT_BITS)
