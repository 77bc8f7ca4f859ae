"""The moment in a batch at which a step was saved, and what Lightning had to do after it.

Lightning saves in hooks. After the hook come, in this order: a validation that is due, schedulers
that look at a metric, the hooks at the end of the epoch, and the iterators of the next epoch.
Lightning's own resume goes on with the next batch, and leaves out what lies between. Here the loops
take up the batch where the hook was, so all of that happens once, and draws the same numbers.

    AFTER_BATCH        in on_train_batch_end: everything is still to come
    AFTER_VALIDATION   in on_validation_end: the validation of this batch is done
    AFTER_EPOCH        in on_train_epoch_end: its hooks have been called
    OTHER              anywhere else, such as in an exception: left to Lightning

Owns: the counters of a checkpoint that say this, and `advance` of the loop of an epoch until its
first call. No batch is trained in that call, because it had been trained before the save.
Not here: means and metrics that the rest of the epoch looks at (logged).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

_ADVANCE = "advance"


class Moment(Enum):
    AFTER_BATCH = "after a batch"
    AFTER_VALIDATION = "after a validation"
    AFTER_EPOCH = "after an epoch"
    OTHER = "other"


def moment_of(fit: dict[str, Any]) -> Moment:
    """The moment of a checkpoint. fit: the state of its fit loop."""
    epoch = fit["epoch_progress"]["current"]
    batch = fit["epoch_loop.batch_progress"]["current"]
    if not epoch["started"] == epoch["ready"] > 0 or not batch["processed"] == batch["ready"] > 0:
        return Moment.OTHER
    if epoch["processed"] == epoch["ready"]:
        is_open = epoch["completed"] == epoch["processed"] - 1
        return Moment.AFTER_EPOCH if is_open else Moment.OTHER
    is_open = batch["completed"] == batch["processed"] - 1
    return Moment.AFTER_BATCH if is_open else Moment.AFTER_VALIDATION


def adjust(fit: dict[str, Any], moment: Moment) -> None:
    """Count as completed what go_on() completes, so that Lightning does not make up for it."""
    if moment is Moment.OTHER:
        return
    is_epoch = moment is Moment.AFTER_EPOCH
    progress = fit["epoch_progress" if is_epoch else "epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]


def reloaded(trainer: Any) -> list[float]:
    """The epochs at which the loaders of the training and of the validation were made last."""
    fit = trainer.fit_loop
    val = fit.epoch_loop.val_loop
    return [float(fit._last_train_dl_reload_epoch), float(val._last_val_dl_reload_epoch)]


def put_back_reloaded(trainer: Any, epochs: list[float]) -> None:
    fit = trainer.fit_loop
    fit._last_train_dl_reload_epoch, fit.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs


def go_on(trainer: Any, moment: Moment, finish_epoch: Callable[[], None]) -> None:
    """Let the loops of a Trainer, which are about to begin, go on from the moment.

    finish_epoch: does what follows the hooks at the end of an epoch.
    """
    fit = trainer.fit_loop
    if moment is Moment.AFTER_EPOCH:
        finish_epoch()
        for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
            loop._restarting = False
        fit._resuming_from_checkpoint = False  # otherwise the next epoch has no new iterator
        return
    _begin_epoch_again(trainer)
    if moment is not Moment.OTHER:
        vars(fit.epoch_loop)[_ADVANCE] = _Trained(fit, moment)


def _begin_epoch_again(trainer: Any) -> None:
    """What callbacks of Lightning set up when an epoch begins, and keep in no state.

    This epoch has begun before the save, so Lightning does not call their hooks again.
    """
    epoch = trainer.current_epoch
    for each in trainer.callbacks:
        if isinstance(each, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = each.get_accumulate_grad_batches(epoch)
        elif isinstance(each, StochasticWeightAveraging) and epoch <= each.swa_end:
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            each.on_train_epoch_start(trainer, trainer.lightning_module)  # averages nothing twice
            for group, rate in zip(trainer.optimizers[0].param_groups, rates, strict=True):
                group["lr"] = rate  # a new scheduler has set its own


class _Trained:
    """Stands for `advance` of the loop of an epoch, whose last batch was trained before."""

    def __init__(self, fit: Any, moment: Moment) -> None:
        self._fit = fit
        self._moment = moment

    def __call__(self, data_fetcher: Any) -> None:
        fit, loop = self._fit, self._fit.epoch_loop
        vars(loop).pop(_ADVANCE)
        is_inside = loop.val_loop.restarted_mid_evaluation
        if self._moment is Moment.AFTER_VALIDATION and not is_inside:
            loop._skip_next_val = True
        # What happens from here on happens for the first time.
        fit._restarting = loop._restarting = False
        loop.val_loop._restarting = is_inside
