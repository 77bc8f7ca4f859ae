"""Flat buckets of gradients on their way through an all_reduce.

Invariants: a bucket that was started is not written before it has come back. Memory that an
operation was given and that has not come back is dropped: the operation may still write there.
Which parameters share a bucket depends on the parameters only, so it is alike on all members.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from statehold.resilience.sums.interface import Pending, Start
from statehold.resilience.sums.sites import Site

BUCKET_BYTES = 25 << 20
FIRST_BYTES = 1 << 20  # so that the first operation begins early

# A gradient, and the number of times that it was changed in place.
_Version = tuple[Tensor | None, int]


class Bucket:
    """Copies of the gradients of a few sites."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self._ends = list(itertools.accumulate(site.numel for site in sites))
        self._memory: Tensor | None = None
        self._pending: Pending | None = None
        self._copied: dict[int, _Version] = {}

    def copy(self, position: int, weight: float) -> None:
        """Take the gradient of a site times `weight`, unless the bucket was started."""
        if self._pending is not None:
            return
        site, into = self.sites[position], self._view(position)
        self._copied[position] = _version(site)
        grad = site.take()
        if grad is None:
            into.zero_()
        else:
            with torch.no_grad():
                torch.mul(grad, weight, out=into)

    @property
    def is_full(self) -> bool:
        return len(self._copied) == len(self.sites)

    @property
    def is_started(self) -> bool:
        return self._pending is not None

    def is_stale(self, position: int) -> bool:
        """Whether the gradient of a site is not the one that was copied."""
        grad, version = self._copied.get(position, (None, -1))
        now, newest = _version(self.sites[position])
        return now is not grad or newest != version

    def start(self, start: Start) -> None:
        assert self._memory is not None, "nothing was copied"
        self._pending = start(self._memory)

    def wait(self) -> None:
        """Until the bucket has come back."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def forget(self) -> None:
        """Be empty again."""
        if self._pending is not None:
            self._memory = None
        self._pending = None
        self._copied.clear()

    def parts(self) -> Iterator[tuple[Site, Tensor]]:
        """What has come back; views of the bucket."""
        for position, site in enumerate(self.sites):
            yield site, self._view(position)

    def _view(self, position: int) -> Tensor:
        if self._memory is None:
            first = self.sites[0]
            self._memory = torch.empty(self._ends[-1], dtype=first.dtype, device=first.device)
        end = self._ends[position]
        return self._memory[end - self.sites[position].numel : end]

    @property
    def nbytes(self) -> int:
        return self._ends[-1] * self.sites[0].dtype.itemsize


def _version(site: Site) -> _Version:
    grad = site.param.grad
    return grad, 0 if grad is None else grad._version


def buckets_of(sites: Sequence[Site]) -> list[Bucket]:
    """The last site comes first, because a backward pass begins with it, more or less."""
    found: list[list[Site]] = []
    room = 0
    for site in reversed(sites):
        nbytes = site.numel * site.dtype.itemsize
        if not found or nbytes > room or _kind(site) != _kind(found[-1][0]):
            room = BUCKET_BYTES if found else FIRST_BYTES
            found.append([])
        found[-1].append(site)
        room -= nbytes
    return [Bucket(each) for each in found]


def _kind(site: Site) -> tuple[torch.dtype, torch.device]:
    return site.dtype, site.device
