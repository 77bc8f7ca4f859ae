"""Where a loader of the training goes on, and what is known to go wrong.

A step has the iterator of its epoch behind it: `loaders.load` makes one that draws nothing. After
the last batch of an epoch, this iterator is used up, and Lightning makes that of the next epoch in
its turn (moments), with the generators of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import SequentialSampler

from statehold.tensors import loaders

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
    if inner is not None and sampler.shuffle and type(inner._sampler).__name__ == "RandomSampler":
        inner._sampler = SequentialSampler(inner._sampler)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Lightning does this only after it has made the iterator."""
    batches: Any = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
