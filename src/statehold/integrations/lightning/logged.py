"""What was logged in an epoch that is not over: means over its batches, and the newest values.

Lightning keeps it in the results of the loop, and in three dicts of the Trainer. Callbacks and
schedulers read it at the end of the epoch, and Lightning itself saves none of it.

Owns: the state of both, as plain values and tensors. Results of a rank are those of its batches.
Invariants: a restored result is one that the module has not logged yet. When it logs the name for
the first time, Lightning makes a result of its own arguments, which takes over the restored sums.
Not here: metrics of torchmetrics that no `self.log` was given. Nobody knows when to reset them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

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
    loop._results = _Restored(training=True)
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

    def __init__(self, training: bool) -> None:
        super().__init__(training=training)
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
            count, sums = state["sums"].get(name, (metric._update_count, {}))
            metric._update_count, metric._computed = count, None
            for each, value in sums.items():
                setattr(metric, each, value)
    result.has_reset, result._forward_cache = state["has_reset"], state["newest"]


def _metrics_in(metric: Metric) -> Iterator[tuple[str, Metric]]:
    """A metric, and those that it wraps, by their names in it."""
    return ((name, each) for name, each in metric.named_modules() if isinstance(each, Metric))


def _sums(metric: Metric) -> tuple[int, dict[str, Any]]:
    return metric._update_count, {name: getattr(metric, name) for name in metric._defaults}
