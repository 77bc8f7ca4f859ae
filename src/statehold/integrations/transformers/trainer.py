"""StateholdTrainer: the Trainer of transformers, whose checkpoints are steps of statehold.

A step holds the model, the optimizer, the scheduler, the scaler, the random generators, the loss
that is not logged yet, and the TrainerState with the callbacks. The Trainer itself finds the
position in the data, from the TrainerState, before it makes the loader. So this comes out of the
step first, the rest after `prepare`, and the generators after the first batches, where the Trainer
restores them.

Invariants: save_total_limit, the best model and the rotation are decided by the Trainer's own rules
over the folders checkpoint-N (folders). Without a run that is open, each method is the Trainer's.
Not here: weights for from_pretrained (exporting), which tensors a step holds (trained).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.checkpoint.save.handle import Save
from statehold.errors import StepNotFoundError, UsageError
from statehold.integrations.trained import trained_part
from statehold.integrations.transformers import doubts
from statehold.integrations.transformers.exporting import Exporter
from statehold.integrations.transformers.folders import Folders
from statehold.integrations.transformers.logged import logged_at
from statehold.reading.load import load
from statehold.tensors.rng import Rng

log = logging.getLogger("statehold")

# The best step is given second names at the save after next, when it is certainly committed.
KEEP_FOR_BEST = 3


class _Damaged(Exception):
    """The step whose position in the data the Trainer has taken is not the one that was
    restored."""


@dataclass
class _Run:
    """What is open while train() runs. step: the step that is resumed, which `source` has."""

    run: str
    ckpt: Checkpointer
    folders: Folders
    exporter: Exporter
    source: Checkpointer
    step: int | None = None
    is_same_world: bool = True
    rng: Rng = field(default_factory=Rng)
    model: Any = None
    loss: dict[str, Any] | None = None
    saves: list[Save] = field(default_factory=list)

    def unfinished(self) -> set[int]:
        """The steps whose saves are under way."""
        self.saves = [save for save in self.saves if not save.done("committed")]
        return {save.step for save in self.saves}

    def settle(self) -> None:
        """Wait until every save is committed."""
        for save in self.saves:
            save.wait("committed")


class StateholdTrainer(Trainer):
    """A Trainer that saves into steps of statehold in `output_dir`.

    All arguments are those of transformers.Trainer.

    Attributes:
        leave_within_s: after SIGTERM or SIGUSR1, all ranks save one more step and exit with code 75
            within so many seconds; None leaves the signals alone.
    """

    leave_within_s: float | None = 25.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_run: _Run | None = None
        self.add_callback(_Steps(self))

    def checkpointer(self, run: str, keep: int | None) -> Checkpointer:
        """Open the run. Override it for levels or other options.

        Args:
            run: the output directory.
            keep: how many steps to keep, by the options of the Trainer. Pass it on.
        """
        return Checkpointer(run, keep=keep)

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
                there is none. The path of a `checkpoint-N` resumes that step.
        """
        self._check_supported()
        run = self._get_output_dir(trial)
        with contextlib.ExitStack() as stack:
            ckpt = stack.enter_context(self.checkpointer(run, self._keep()))
            folders = Folders(run)
            opened = _Run(run, ckpt, folders, Exporter(folders, self._export), source=ckpt)
            self._open_run = opened
            stack.callback(self._close_run)
            self._leave_on_signals(ckpt)
            while True:
                path = self._found(opened, resume_from_checkpoint, stack)
                try:
                    result = super().train(path, trial, *args, **kwargs)
                    break
                except _Damaged:  # on all ranks; the step does not count any more
                    resume_from_checkpoint = True
            opened.settle()
            opened.ckpt.flush()  # weights are read from the run directory
            if self.args.should_save:
                opened.exporter.finish(self._surplus(opened))
            return result

    def _check_supported(self) -> None:
        if self.is_deepspeed_enabled:
            raise UsageError("this Trainer does not save engines of DeepSpeed")
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            log.warning("only the end of the training is pushed to the Hub, not every save")
        if self.args.save_strategy != SaveStrategy.NO:
            for doubt in doubts.at_the_start(self.args):
                log.warning("%s", doubt)

    def _keep(self) -> int | None:
        """How many steps the run keeps: those that have a folder are among them."""
        limit: int | None = self.args.save_total_limit
        if limit is None or limit <= 0:
            return None
        return max(limit, KEEP_FOR_BEST) if self.args.metric_for_best_model else limit

    def _leave_on_signals(self, ckpt: Checkpointer) -> None:
        saves = self.args.save_strategy != SaveStrategy.NO
        is_main = threading.current_thread() is threading.main_thread()
        if saves and is_main and self.leave_within_s is not None:
            ckpt.leave_on(signal.SIGTERM, signal.SIGUSR1, within_s=self.leave_within_s)

    def _close_run(self) -> None:
        opened, self._open_run = self._open_run, None
        if opened is not None:
            opened.exporter.stop()

    # -- which step is resumed -------------------------------------------------------------

    def _found(
        self, opened: _Run, wanted: str | bool | None, stack: contextlib.ExitStack
    ) -> str | None:
        """The folder to resume from; with a step of it, if that is not a stock checkpoint."""
        decided = [self._decided(opened, wanted)]  # by rank 0, for all
        if self.args.world_size > 1:
            broadcast_object_list(decided)
        step, path = decided[0]
        if step is None:
            return path
        newer = [each for each in opened.ckpt.steps() if each > step]
        if step not in opened.ckpt.steps():
            opened.source = stack.enter_context(Checkpointer(opened.folders.path(step)))
        if newer:
            log.warning("step %d is resumed, and %d newer steps are discarded", step, len(newer))
            opened.ckpt._go_on_from(step)
        if self.args.should_save:
            opened.folders.discard_after(step)
        opened.step = step
        for doubt in doubts.at_a_resume(self.args, self.callback_handler.callbacks):
            log.warning("%s", doubt)
        trainer = {"state": "", "world": 0}
        opened.source.restore({"trainer": trainer}, step, only=["trainer"])
        opened.is_same_world = trainer["world"] == self.args.world_size
        opened.folders.make(step, str(trainer["state"]))
        return opened.folders.path(step)

    def _decided(self, opened: _Run, wanted: str | bool | None) -> tuple[int | None, str | None]:
        """The step to resume and None, or None and the folder of a stock checkpoint, if any."""
        ckpt, folders = opened.ckpt, opened.folders
        steps = ckpt.steps()
        if not wanted:
            if steps and self.args.save_strategy != SaveStrategy.NO:
                raise UsageError(
                    "the output directory has steps already",
                    facts={"run": str(self.args.output_dir), "newest step": steps[-1]},
                    hint="train(resume_from_checkpoint=True), or choose another output_dir",
                )
            return None, None
        if wanted is True:
            kept = [step for step in steps if folders.has(step)] or steps
            if kept:
                return kept[-1], None
            out = self.args.output_dir
            # Rank 0 makes the directory, perhaps after this rank has come here.
            stock = get_last_checkpoint(out) if os.path.isdir(out) else None
            if stock and folders.is_stock(stock):
                return None, stock
            log.warning("there is no step to resume in %s: beginning", out)
            return None, None
        step = folders.step_of(str(wanted))
        if step is None or folders.is_stock(str(wanted)):
            return None, str(wanted)
        if step not in steps and not folders.holds(step):
            raise StepNotFoundError(
                "this checkpoint has no committed step",
                facts={"checkpoint": str(wanted), "steps": ", ".join(map(str, steps)) or "none"},
                hint="resume_from_checkpoint=True takes the newest step",
            )
        return step, None

    # -- what the Trainer calls ------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        opened = self._open_run
        if opened is None:
            super()._save_checkpoint(model, trial)
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        step = self.state.global_step
        self._note_best(opened, step)
        text = self._state_text()
        if self.args.should_save:
            opened.folders.make(step, text)
        state = {**self._model_part(), **self._training_parts(opened)}
        state["trainer"] = self._trainer_part(text)
        metrics = logged_at(step, self.state.log_history)
        save = opened.ckpt.save(step, state, metrics=metrics, force=True)
        opened.saves.append(save)
        if self.args.should_save:
            opened.exporter.offer(save, self._surplus(opened))

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if self._resumed() is None:
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        opened = self._resumed()
        if opened is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = {**self._model_part(), **self._training_parts(opened)}
        skip = ["rng"] if "rng" in state else []
        if not opened.is_same_world and state.pop("loss", None) is not None:
            skip.append("loss")
        opened.loss = state.get("loss")
        # Without a step, so that a damaged one is set aside, and the one before it is restored.
        is_newest = opened.source is opened.ckpt
        step = None if is_newest else opened.step
        if opened.source.restore(state, step, skip=[*skip, "trainer"]) != opened.step:
            raise _Damaged

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed() is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        opened = self._resumed()
        if opened is None:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None and not self.args.save_only_model:
            opened.source.restore({"rng": opened.rng}, opened.step, only=["rng"])

    def _load_best_model(self) -> None:
        opened, step = self._open_run, self.state.best_global_step
        if opened is None or opened.folders.step_of(self.state.best_model_checkpoint) != step:
            super()._load_best_model()
            return
        opened.settle()
        model = self._model_part()
        if step in opened.ckpt.steps():
            opened.ckpt.restore(model, step, only=["model"])
            return
        with Checkpointer(opened.folders.path(step)) as held:
            held.restore(model, step, only=["model"])

    # -- what a step holds -----------------------------------------------------------------

    def _resumed(self) -> _Run | None:
        opened = self._open_run
        return opened if opened is not None and opened.step is not None else None

    def _bare_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return model

    def _model_part(self) -> dict[str, Any]:
        opened = self._open_run
        assert opened is not None
        if opened.model is None:
            opened.model = trained_part(self._bare_model(), self.model_wrapped)
        return {"model": opened.model}

    def _training_parts(self, opened: _Run) -> dict[str, Any]:
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

    def _trainer_part(self, text: str) -> dict[str, Any]:
        """On rank 0 only: evaluation times differ between ranks, and any world may resume."""
        is_first = self.args.process_index == 0
        return {"state": text, "world": self.args.world_size} if is_first else {}

    def _state_text(self) -> str:
        """The TrainerState, with the states of the callbacks as they are now."""
        holders = [*self.callback_handler.callbacks, self.control]
        exportable = [each for each in holders if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = TrainerState(
            stateful_callbacks=exportable
        ).stateful_callbacks
        return json.dumps(vars(self.state), sort_keys=True)

    def _note_best(self, opened: _Run, step: int) -> None:
        """Which folder is the best, as the Trainer decides it; its step must not be retired."""
        best = self.state.best_global_step
        if not best or self.args.save_strategy == SaveStrategy.NO:
            return
        if best == step or opened.folders.has(best):
            self.state.best_model_checkpoint = opened.folders.path(best)
        if self.args.should_save and best != step and opened.folders.has(best):
            opened.folders.hold(best)

    def _surplus(self, opened: _Run) -> list[int]:
        best = opened.folders.step_of(self.state.best_model_checkpoint)
        return opened.folders.surplus(self.args.save_total_limit, best, opened.unfinished())

    def _begin(self) -> None:
        """The Trainer has set its sums of the loss to zero; they go on where the step was."""
        opened = self._resumed()
        if opened is None or opened.loss is None:
            return
        self._tr_loss.copy_(opened.loss["sum"])
        self._globalstep_last_logged = opened.loss["logged"]
        # train() reports the loss of its own steps
        self._total_loss_scalar -= self.accelerator.gather(self._tr_loss).mean().item()

    def _export(self, step: int) -> None:
        """What from_pretrained opens, from the committed step into its folder."""
        opened = self._open_run
        assert opened is not None
        run = opened.folders.path(step) if opened.folders.holds(step) else opened.run
        whole = load(
            run, "model", step=step, mapped=True
        )  # a restore would put random generators back
        with opened.folders.beside(step) as new:
            self._save(str(new), state_dict=whole)


class _Steps(TrainerCallback):
    """What the trainer does at every step, whether it is saved or not."""

    def __init__(self, trainer: StateholdTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        opened = self._trainer._open_run
        if opened is not None and opened.ckpt.is_last(state.global_step):
            control.should_save = True
