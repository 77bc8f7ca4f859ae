"""The moment in a batch at which a step was saved, and what Lightning had to do after it.

    AFTER_BATCH        in on_train_batch_end: everything is still to come
    AFTER_VALIDATION   in on_validation_end: the validation of this batch is done
    AFTER_EPOCH        in on_train_epoch_end: its hooks have been called
    OTHER              anywhere else, such as in an exception: left to Lightning

Owns: the counters of a checkpoint that say this, and `advance` of the loop of an epoch until its
first call; what was logged in an epoch that is not over, as plain values and tensors.
Invariants: what follows the hook happens once, and draws the same numbers. No batch is trained
again.
Not here: when a step is saved and restored (strategy).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

_ADVANCE = "advance"


# -- the moment ------------------------------------------------------------------------------------
# Lightning saves in hooks. After the hook come, in this order: a validation that is due, schedulers
# that look at a metric, the hooks at the end of the epoch, and the iterators of the next epoch.
# Lightning's own resume goes on with the next batch, and leaves out what lies between. Here the
# loops take up the batch where the hook was. No batch is trained in the first call of `advance`,
# because it had been trained before the save.


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
        fit._restarting = fit.epoch_loop.restarting = False
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
        fit._restarting = loop.restarting = False
        loop.val_loop.restarting = is_inside


# -- what was logged -------------------------------------------------------------------------------
# Means over the batches of the epoch, and the newest values. Lightning keeps them in the results of
# the loop, and in three dicts of the Trainer. Callbacks and schedulers read them at the end of the
# epoch, and Lightning itself saves none of it. Results of a rank are those of its batches.
#
# A restored result is one that the module has not logged yet. When it logs the name for the first
# time, Lightning makes a result of its own arguments, which takes over the restored sums.


_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLAIN = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
    "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip


def shown(trainer: Any) -> dict[str, dict[str, Any]]:
    """The newest values by their names, as callbacks, loggers and the progress bar see them."""
    return {name: dict(getattr(trainer._logger_connector, name)) for name in _SHOWN}


def results_of(trainer: Any) -> dict[str, Any]:
    """The results of the training in this epoch, on this rank."""
    return {key: _state(each) for key, each in trainer.fit_loop.epoch_loop._results.items()}


def give_back(trainer: Any, values: dict[str, Any], results: dict[str, Any] | None) -> None:
    """Restore what shown() and results_of() gave; results: None if this rank has none."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    device = trainer.strategy.root_device
    for name, each in values.items():
        getattr(connector, name).update(move_data_to_device(each, device))
    if results is None:
        return
    loop._results = _Restored()
    for key, state in results.items():
        with contextlib.suppress(AttributeError):  # the module has no such metric any more
            result = _made(trainer, move_data_to_device(state, device))
            loop._results.restore(key, result)
    batches, epoch = loop.batch_progress.current, trainer.fit_loop.epoch_progress.current
    if batches.completed and epoch.processed < epoch.ready:
        # Only the first batch of an epoch resets what was logged before.
        connector._first_loop_iter = batches.completed == 1


def finish_epoch(trainer: Any) -> None:
    """What Lightning does after the hooks at the end of an epoch."""
    fit, connector = trainer.fit_loop, trainer._logger_connector
    fit.epoch_progress.current.completed -= 1  # the epoch that is read here
    connector.on_epoch_end()
    fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    fit.epoch_loop._batches_that_stepped -= 1
    connector.update_train_epoch_metrics()
    fit.epoch_loop._batches_that_stepped += 1
    fit.epoch_progress.current.completed += 1


class _Restored(_ResultCollection):
    """Results of which some wait until the module logs them again."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self._waiting: set[str] = set()

    def restore(self, key: str, result: _ResultMetric) -> None:
        super().__setitem__(key, result)
        self._waiting.add(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) and key not in self._waiting

    def __setitem__(self, key: str, result: _ResultMetric) -> None:
        if key in self._waiting:
            self._waiting.remove(key)
            _set(result, _state(self[key]))
        super().__setitem__(key, result)


def _state(result: _ResultMetric) -> dict[str, Any]:
    meta, summed = result.meta, result if result.is_tensor else result.value
    return {
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduce": meta.reduce_fx.__name__,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "newest": result._forward_cache,
        "sums": {name: _sums(each) for name, each in _metrics_in(summed)},
    }


def _made(trainer: Any, state: dict[str, Any]) -> _ResultMetric:
    """A result of a state. Raises AttributeError if the metric of the module is gone."""
    meta = _Metadata(**state["meta"], reduce_fx=state["reduce"])
    meta.sync = _Sync(fn=trainer.strategy.reduce, **state["sync"])
    result = _ResultMetric(meta, state["is_tensor"])
    if not result.is_tensor:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    result.to(trainer.strategy.root_device)
    _set(result, state)
    return result


def _set(result: _ResultMetric, state: dict[str, Any]) -> None:
    summed = result if result.is_tensor else getattr(result, "value", None)
    if summed is not None:  # otherwise the metric of the module has it, which is about to come
        for name, metric in _metrics_in(summed):
            count, sums = state["sums"].get(name, (metric.update_count, {}))
            metric._update_count, metric._computed = count, None
            for each, value in sums.items():
                setattr(metric, each, value)
    result.has_reset, result._forward_cache = state["has_reset"], state["newest"]


def _metrics_in(metric: Metric) -> Iterator[tuple[str, Metric]]:
    """A metric, and those that it wraps, by their names in it."""
    return ((name, each) for name, each in metric.named_modules() if isinstance(each, Metric))


def _sums(metric: Metric) -> tuple[int, dict[str, Any]]:
    return metric.update_count, metric.metric_state
