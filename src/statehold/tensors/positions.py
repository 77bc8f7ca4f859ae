"""Positions of torchdata's loaders, for a loader with another number of workers.

torchdata keeps a position in one of two forms, without workers and with a fixed number of them, and
a loader of another number ends at its first batch with an assertion. The samplers are in the
process that trains, whatever the number is, so their part of a position is good for any number.
Invariants: a position is handed over only if it says all: what a dataset keeps for itself belongs
to the workers that had it, and is refused. So is what a sampler cannot take.
Not here: which loaders an object has (loaders).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

_YIELDED, _FINISHED = "_num_yielded", "_iterator_finished"
_SNAPSHOT, _SINCE, _MAIN, _WORKERS = (
    "_snapshot", "_steps_since_snapshot", "_main_snapshot", "_worker_snapshots",
)  # fmt: skip
_COUNT, _STEP, _SEED = "_num_workers", "_snapshot_step", "_base_seed"
_SAMPLER = "_sampler_iter_state"
_COMMON = (
    "_index_sampler_state", _SAMPLER, "_sampler_iter_yielded", "_IterableDataset_len_called",
    "_shared_seed",
)  # fmt: skip
_OF_DATASET = dict.fromkeys(("dataset_state", "fetcher_state"))


class PositionRefused(Exception):
    """A position that the loader cannot take: what it expects, and what is there."""


def fitted(state: Any, loader: Any) -> Any:
    """A state in which each position is one that `loader` takes. Raises PositionRefused."""
    if isinstance(state, Mapping) and (_YIELDED in state or _SNAPSHOT in state):
        return _of_loader(state, loader)
    if type(state) is dict:
        return {key: fitted(each, loader) for key, each in state.items()}
    return [fitted(each, loader) for each in state] if type(state) is list else state


def _of_loader(state: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    snapshot = state.get(_SNAPSHOT, {})
    main = snapshot.get(_MAIN, state)
    saved = main.get(_COUNT, 0)
    _check_sampler(main.get(_SAMPLER), loader)
    if saved == loader.num_workers:
        return state
    own = [state, *snapshot.get(_WORKERS, {}).values()]
    has_own = any(each.get(key) is not None for each in own for key in _OF_DATASET)
    if has_own or state.get(_SINCE) or any(key not in main for key in _COMMON):
        raise PositionRefused(
            f"the position of a loader with num_workers={loader.num_workers}",
            f"one with num_workers={saved}, which a dataset or a snapshot ties to its workers",
        )
    yielded = snapshot.get(_STEP, state.get(_YIELDED))
    position = {key: main[key] for key in _COMMON}
    end = {_FINISHED: state[_FINISHED]}
    if not loader.num_workers:
        return {**position, **_OF_DATASET, _YIELDED: yielded, **end}
    seed = main.get(_SEED, torch.initial_seed() % 2**63)
    workers = range(loader.num_workers)
    handed = {
        _STEP: yielded,
        "_last_yielded_worker_id": loader.num_workers - 1,
        _MAIN: {_COUNT: loader.num_workers, **position, _SEED: seed},
        _WORKERS: {f"worker_{i}": {"worker_id": i, **_OF_DATASET} for i in workers},
    }
    return {_SNAPSHOT: handed, _SINCE: 0, **end}


def _check_sampler(state: Any, loader: Any) -> None:
    """Raise for a state of a sampler, or of its iterator, that this loader's has no place for."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(state, Mapping) or sampler is None:
        return
    forgets = not hasattr(sampler, "load_state_dict")
    draws_anew = inspect.isgeneratorfunction(type(sampler).__iter__) or type(
        sampler
    ).__module__.startswith("torch.utils.data.")
    if ("sampler_state" in state and forgets) or ("sampler_iter_state" in state and draws_anew):
        got = "that of a sampler of another kind, as with another shuffle= or sampler="
        raise PositionRefused(f"the position of a loader with a {type(sampler).__name__}", got)
