"""What a Trainer gets back from a step: everything, before the first batch.

Lightning asks for the checkpoint, then for the optimizers, and makes the iterators of the loaders
last. So the generators of random numbers are put back after each of them. When the training begins,
the loops go on from the moment of the save (moments).

Invariants: a checkpoint that Lightning has written is left to the strategy. All ranks take the step
that rank 0 has found. With another number of ranks, a warning names what is not restored.
Not here: which files a path has (checkpoints), where a loader goes on (positions).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning
from lightning.pytorch.strategies import ModelParallelStrategy

from statehold.checkpoint.checkpointer import Checkpointer
from statehold.errors import StepNotFoundError
from statehold.integrations.lightning.checkpoints import Checkpoint, FoundStep
from statehold.integrations.lightning.logged import finish_epoch, give_back
from statehold.integrations.lightning.moments import go_on, put_back_reloaded
from statehold.integrations.lightning.positions import goes_on, shuffle_once
from statehold.integrations.lightning.state import LiveOptimizers, optimizers_of, values
from statehold.reading.load import load
from statehold.tensors.marks import Volatile
from statehold.tensors.rng import Rng

log = logging.getLogger("statehold")

COMMITTED = "step-*/manifest.json"


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
        is_ours, found = self._strategy.broadcast(self._decided(checkpoint_path))
        if not is_ours:
            stock: dict[str, Any] = self._stock["load_checkpoint"](
                checkpoint_path, weights_only=weights_only
            )
            return stock
        if found is None:
            return self._nothing(checkpoint_path)
        self._resumed = found = FoundStep(*found)
        ranks = self._trainer.global_rank, self._trainer.world_size
        checkpoint, self._known = values(found.run, found.step, *ranks)
        if self._trainer.training and self._trainer.is_global_zero:
            self._warn(found.step)
        if found.last_of in checkpoint.get("callbacks", {}):
            checkpoint["callbacks"][found.last_of]["last_model_path"] = str(checkpoint_path)
        if self._known["optimizers"]:
            checkpoint["optimizer_states"] = LiveOptimizers()
        if isinstance(self._strategy, ModelParallelStrategy):
            self._restore_sharded(found)
        else:
            checkpoint["state_dict"] = load(found.run, "model", step=found.step, mapped=True)
        return checkpoint

    def _warn(self, step: int) -> None:
        saved, now = self._known["world"], self._trainer.world_size
        if saved != now:
            log.warning(_OTHER_RANKS, step, saved, now)

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
        log.warning("there is no committed step to resume for %s: beginning", path)
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
            ckpt.restore(state, found.step, only=list(only), strict=strict)

    def _put_back_generators(self) -> None:
        if "rng" in self._known:
            Rng().load_state_dict(self._known["rng"])

    # -- the loaders -----------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loaders of the training get their positions before their iterators are made."""
        if self._trainer.training and hasattr(dataloader, "load_state_dict"):
            shuffle_once(dataloader)
            self._place_loader(dataloader)
        return self._stock["process_dataloader"](dataloader)

    def _place_loader(self, loader: Any) -> None:
        positions = self._known.get("data", [])
        if positions:
            goes_on(loader, positions.pop(0), self._known["epoch"])

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


_OTHER_RANKS = (
    "step %d was saved on %d ranks and is resumed on %d. Not restored: the random generators of "
    "each rank, its position in the data, and its means over the epoch. An epoch that had begun "
    "begins once more"
)
