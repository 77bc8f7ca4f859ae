"""The fast sum: plain floating point, reduced while the last backward pass runs.

Autograd adds the gradients of one member in p.grad. The members reduce copies of them, divided by
the number of microbatches, in flat buckets, and copy them back when the step is done. In a
watched pass, a bucket is reduced as soon as all of its gradients have arrived.

Invariants: p.grad stays as it is until `finish`. Members start their buckets in one order, and then
their report. If a gradient has changed since its bucket was started, the report says so, and all
members reduce that bucket once more. Memory is one buffer of the size of all gradients, and one
more for each copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from statehold.errors import InvariantError
from statehold.resilience.sums.interface import Pending, Start
from statehold.resilience.sums.report import Report, fingerprint_of
from statehold.resilience.sums.sites import Site, sites_of
from statehold.tensors.storable import local_of


class FastSum:
    """Sums named parameters' gradients in floating point. See interface.Sum.

    The buckets are copied back into the same memory: if they became p.grad instead, the process
    would get new memory from the kernel in every step, which takes longer than the copy.

    Which parameters are trained is each member's own to say, and may change between steps. So the
    buckets are those of the parameters that all members have trained in the step before: nobody
    sends another length than the others. The report says whether all members train the same ones
    now. If these are others than before, as in the first step, their buckets are reduced after the
    report.

    `reduce` raises what fails in a hook. If the hook raised it, p.grad would have half of a pass. A
    pass that fails leaves a half of its gradients in p.grad: the member repeats all its passes. The
    gradients of the second try then wait for their turn: with the same order of additions the sum
    has the same bits. To keep the gradients of every pass apart would take the memory of a second
    p.grad.
    """

    def __init__(self, params: Iterable[tuple[str, Tensor]], microbatches: int) -> None:
        self._sites = sites_of(params)
        self._microbatches = microbatches
        self._trained: list[Site] = []
        self._agreed: list[Site] = []  # that all members have trained in the step before
        self._buckets: list[Bucket] = []  # of the agreed ones
        self._others: list[Bucket] = []  # of the trained ones, if these are others
        self._hooks: list[RemovableHandle] = []
        self._start: Start | None = None
        self._error: Exception | None = None
        self._reduced: Report | None = None
        self._report = self.finished = Report(microbatches, 0)
        self._copies: dict[int, _GradientCopy] = {}
        self._most_copies = 0
        self._copy: _GradientCopy | None = None
        self._late: _GradientCopy | None = None  # what was repeated before its turn
        self._turn = 0  # its place in the order of the passes

    def begin(self) -> None:
        self._trained = [site for site in self._sites if site.param.requires_grad]
        self._forget()
        self._turn = 0
        self._empty()

    def _empty(self) -> None:
        self._report = self._empty_report()
        self._copies.clear()
        self._copy = self._late = None
        for site in self._sites:
            site.give(None)

    def _empty_report(self) -> Report:
        return Report(self._microbatches, len(self._sites), len(self._buckets))

    def watch(self, start: Start | None, copy: int = 0) -> None:
        self._unhook()
        if copy:
            self._copy = self._copies.setdefault(copy, _GradientCopy(self._empty_report()))
            self._most_copies = max(self._most_copies, len(self._copies))
            self._copy.swap(self._trained)
            return
        if self._turn and self._late is None:
            self._copy = self._late = _GradientCopy(self._report)
            return
        if start is None or self._trained != self._agreed:
            return
        if start != self._start:
            self._forget()
        self._start = start
        self._hooks = [
            site.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._arrived, bucket, position)
            )
            for bucket in self._buckets
            for position, site in enumerate(bucket.sites)
        ]

    def _arrived(self, bucket: Bucket, position: int, _: Tensor) -> None:
        assert self._start is not None
        if self._error is not None:
            return
        try:
            bucket.copy(position, 1 / self._microbatches)
            for each in self._buckets:
                if not each.is_full:
                    return
                if not each.is_started:
                    each.start(self._start)
        except Exception as error:
            self._error = error

    def count(self, index: int, loss: Tensor | None) -> None:
        self._unhook()
        marks = [int(site.param.grad is not None) for site in self._sites]
        report = self._report if self._copy is None else self._copy.report
        report.count(index, None if loss is None else local_of(loss.detach()).item(), marks)
        if self._copy is not None:
            self._copy.swap(self._trained)
            self._copy = None
        if self._report.counted > self._turn:
            self._take_late()

    def _take_late(self) -> None:
        if self._late is not None:
            self._late.add_to(self._trained)
            self._late, self._turn = None, 0

    def stray(self) -> str | None:
        return None

    def abandon(self) -> bool:
        self._unhook()
        for bucket in self._buckets:
            if not bucket.is_started:
                bucket.forget()
        is_of_a_copy = self._copy is not self._late
        self._turn = 0 if is_of_a_copy else max(self._turn, self._report.counted)
        self._empty()
        return False

    def adopt(self, copy: int) -> None:
        adopted = self._copies.pop(copy)
        self._report.add(adopted.report)
        adopted.add_to(self._trained)

    def reduce(self, start: Start) -> None:
        self._unhook()
        self._take_late()
        error = self._error
        if self._start != start or self._reduced is not None:
            self._forget()
        elif error is not None:
            self._forget()
            raise error
        try:
            self._reduced = self._reduce(start)
        except BaseException:
            self._forget()
            raise

    def _reduce(self, start: Start) -> Report:
        for bucket in self._buckets:
            if not bucket.is_started:
                self._fill(bucket)
                bucket.start(start)
        for number, bucket in enumerate(self._buckets):
            self._report.flags[number] = any(map(bucket.is_stale, range(len(bucket.sites))))
        facts = [(site.name, site.numel, site.dtype) for site in self._trained]
        device = self._sites[0].device if self._sites else torch.device("cpu")
        report = self._report.reduced(start, device, fingerprint_of(facts))
        for bucket in self._buckets:
            bucket.wait()
        stale = [self._buckets[number] for number in report.flags.nonzero().flatten().tolist()]
        for bucket in stale:
            bucket.forget()
        if self._trained != self._agreed:
            stale = self._others = buckets_of(self._trained)
        for bucket in stale:
            self._fill(bucket)
            bucket.start(start)
        for bucket in stale:
            bucket.wait()
        return report

    def _fill(self, bucket: Bucket) -> None:
        for position in range(len(bucket.sites)):
            if bucket.is_stale(position):
                bucket.copy(position, 1 / self._microbatches)

    def finish(self) -> None:
        if self._reduced is None:
            raise InvariantError("a step ends that was not reduced")
        given = iter(self._reduced.marks.any(dim=0).tolist())
        has_gradient = {id(site): next(given) for site in self._sites}
        if self._trained != self._agreed:
            self._agreed, self._buckets = self._trained, self._others
        for bucket in self._buckets:
            for site, mean in bucket.parts():
                if has_gradient[id(site)]:
                    site.put(mean)
                else:
                    site.give(None)
        self.finished = self._reduced
        self._forget()

    def _forget(self) -> None:
        """Drop what was copied and reduced; what was counted stays."""
        self._unhook()
        for bucket in self._buckets:
            bucket.forget()
        self._others = []
        self._start = self._error = self._reduced = None

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def announced_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._buckets) * (1 + self._most_copies)

    def state_dict(self) -> dict[str, Any]:
        """Which parameters have buckets."""
        agreed = set(map(id, self._agreed))
        trained = [id(site) in agreed for site in self._sites]
        return {"trained": torch.tensor(trained, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An exact sum has saved something else, so no buckets are agreed on."""
        trained = state["trained"].tolist() if "trained" in state else []
        self._agreed = list(compress(self._sites, trained))
        self._buckets = buckets_of(self._agreed)
        self._report = self._empty_report()


class _GradientCopy:
    """The gradients and the report of a copy, while p.grad has those that count."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._grads: list[Tensor | None] = []

    def swap(self, sites: Sequence[Site]) -> None:
        """Exchange p.grad with the gradients of the copy."""
        grads = self._grads or [None] * len(sites)
        self._grads = [site.param.grad for site in sites]
        for site, grad in zip(sites, grads, strict=True):
            site.param.grad = grad

    def add_to(self, sites: Sequence[Site]) -> None:
        """Add the gradients of the copy to p.grad."""
        for site, grad in zip(sites, self._grads, strict=True):
            if site.param.grad is None:
                site.param.grad = grad
            elif grad is not None:
                with torch.no_grad():
                    site.param.grad += grad


# -- flat buckets on their way ---------------------------------------------------------------------
# A bucket that was started is not written before it has come back. Memory that an
# operation was given and that has not come back is dropped: the operation may still write there.
# Which parameters share a bucket depends on the parameters only, so it is alike on all members.

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
