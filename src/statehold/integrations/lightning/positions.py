"""Where a loader of the training goes on, and what its iterators draw until the first batch.

A step inside an epoch has the iterator of that epoch behind it: `loaders.load` makes one that draws
nothing. After the last batch of an epoch, the next iterator is that of the next epoch, and draws.
Lightning then makes one or two iterators before the first batch. So each of them begins from
the position and the generators of the step, and the last one is as in the run that was killed.

Owns: `_get_iterator` of such a loader until the first batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import SequentialSampler

from statehold.tensors import first_iterator, loaders

__all__ = ["NextEpoch", "Place", "doubts", "goes_on", "shuffle_once"]

_MAKER = "_get_iterator"


class Place(NamedTuple):
    """Where a step was saved. put_back: sets the generators to those of the step."""

    epoch: int
    is_epoch_over: bool
    put_back: Callable[[], None]


def goes_on(loader: Any, position: Any, place: Place) -> NextEpoch | None:
    """Give a loader its position. Returns what has to end() at the first batch, if anything."""
    if place.is_epoch_over and first_iterator.is_supported(loader):
        return NextEpoch(loader, position, place)
    _set_epoch(loader, place.epoch)
    loaders.load(loader, position)
    return None


class NextEpoch:
    """Stands for `_get_iterator` of a loader whose epoch is over."""

    def __init__(self, loader: Any, position: Any, place: Place) -> None:
        self._loader = loader
        self._position = position
        self._place = place
        vars(loader)[_MAKER] = self

    def __call__(self) -> Any:
        loader = self._loader
        self.end()
        _set_epoch(loader, self._place.epoch)
        loaders.load(loader, self._position)
        loader._get_iterator()  # that of the epoch which is over
        _set_epoch(loader, self._place.epoch + 1)
        self._place.put_back()
        iterator = loader._get_iterator()
        vars(loader)[_MAKER] = self
        return iterator

    def end(self) -> None:
        vars(self._loader).pop(_MAKER, None)


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
    if inner is not None and sampler.shuffle and type(inner._sampler).__name__ == "RandomSampler":
        inner._sampler = SequentialSampler(inner._sampler)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Lightning does this only after it has made the iterator."""
    batches: Any = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
