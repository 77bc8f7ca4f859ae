"""StateholdTier: a PageStore below vLLM's own offloading, as a secondary tier.

    {"type": "statehold", "path": "/nvme/kv"}          # in secondary_tiers of TieringOffloadingSpec

vLLM has chunks in host memory, as a memoryview of (chunks, bytes of a chunk). A store job copies
chunks to pages, and a load job pages to chunks. vLLM polls for the jobs that are done.

Invariants: no call waits, except drain_jobs(), and that one until the jobs' time has passed. A load
job names the keys whose pages are right; vLLM computes the others. A key that has failed is a miss
for the rest of its request, so nobody asks for it for ever. After a job was reported, nothing
touches its chunks. After a reset of vLLM's caches while nothing runs, no page of before is found.
Not here: what a page depends on (opening).
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.page import IDENTITY_BYTES
from statehold.kv.store import PageStore
from statehold.kv.vllm.opening import PagesOptions, change, made_when_asked

_GOOD = frozenset({PageVerdict.HIT, PageVerdict.STORED, PageVerdict.THERE})


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    request: str
    keys: list[bytes]
    batch: PageBatch
    is_load: bool
    begun_s: float = field(default_factory=time.monotonic)


class Tier:
    """The methods of vLLM's SecondaryTierManager, over `store` and the chunks of `view`.

    HIT, MISS, Result, Wish: vLLM's values, for a class that derives from vLLM's.
    """

    HIT: ClassVar[Any] = True
    MISS: ClassVar[Any] = False
    Result: ClassVar[Any]
    Wish: ClassVar[Any] = dict

    def begin(self, store: PageStore, view: memoryview) -> None:
        """Before all other calls."""
        self._store, self._chunk_bytes = store, view.nbytes // len(view)
        self._chunks = view.cast("B")
        self._jobs: list[_Job] = []
        self._failed = defaultdict[str, set[bytes]](set)  # by request

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether the page is there, as far as tables in memory know."""
        is_missed = key in self._failed.get(req_context.req_id, ())
        return self.HIT if not is_missed and self._store.contains([bytes(key)])[0] else self.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to copy chunks to pages."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to copy pages to chunks."""
        self._submit(job_metadata, is_load=True)

    def _submit(self, job: Any, *, is_load: bool) -> None:
        keys, size = [bytes(key) for key in job.keys], self._chunk_bytes
        chunks = [self._chunks[int(at) * size :][:size] for at in job.chunk_ids]
        batch = self._store.get(keys, chunks) if is_load else self._store.put(keys, chunks)
        self._jobs.append(_Job(job.job_id, job.req_context.req_id, keys, batch, is_load))

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that are over since the last call."""
        over = [job for job in self._jobs if job.batch.is_over()]
        self._jobs = [job for job in self._jobs if job not in over]
        return [self._finish(job) for job in over]

    def _finish(self, job: _Job) -> Any:
        verdicts = job.batch.wait()
        good = tuple(key for key, each in zip(job.keys, verdicts, strict=True) if each in _GOOD)
        is_whole = len(good) == len(job.keys)
        if job.is_load and not is_whole:
            self._failed[job.request].update(set(job.keys) - set(good))
        return self.Result(
            job_id=job.job_id, success=is_whole,
            successful_keys=good if job.is_load and good and not is_whole else None,
            transfer_time=time.monotonic() - job.begun_s,
            transfer_bytes=len(good) * self._chunk_bytes,
        )  # fmt: skip

    def has_pending_work(self) -> bool:
        """Whether vLLM has to poll although it has no requests."""
        return bool(self._jobs)

    def on_new_request(self, req_context: Any) -> Any:
        """This tier has no wishes."""
        return self.Wish()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget which keys have failed for a request."""
        self._failed.pop(req_context.req_id, None)

    def drain_jobs(self) -> None:
        """Return once no job touches a chunk any more. From then on no page of before is found.

        In vLLM 0.32, only TieringOffloadingManager.reset_cache() calls it, and tells a tier nothing
        else: when the prefix cache is reset with the connector, also by a pause or a sleep. Weights
        may be others then, so pages are this engine's own until it starts again.
        """
        for job in self._jobs:
            job.batch.wait()
        change(self._store, os.urandom(IDENTITY_BYTES))

    def shutdown(self) -> None:
        """Close the store, which writes what it has."""
        for job in self._jobs:
            job.batch.wait()
        self._store.close()


@functools.cache
def _derived() -> type[Any]:
    from vllm import __version__
    from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    class StateholdTier(Tier, SecondaryTierManager):
        """The tier that vLLM makes."""

        medium = Medium.STORAGE
        HIT, MISS = LookupResult.HIT, LookupResult.MISS
        Result, Wish = JobResult, RequestOffloadingContext

        def __init__(
            self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
            backpressure_detector: Any = None, **options: Any,
        ) -> None:  # fmt: skip
            SecondaryTierManager.__init__(
                self, offloading_spec, primary_kv_view, tier_type, backpressure_detector
            )
            found, config = PagesOptions.of(options), offloading_spec.config
            model, layout, view = config.model.name, _layout(config), primary_kv_view
            identity = found.identity_of(model, version=__version__, chunk=layout)
            self.begin(found.opened(view.nbytes // len(view), identity), view)

    return StateholdTier


def _layout(config: Any) -> list[Any]:
    """What of vLLM's OffloadingConfig changes the bytes of a chunk."""
    no_matter = "rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"
    parallel = {n: value for n, value in asdict(config.parallel).items() if n not in no_matter}
    groups = [[each.tokens_per_block, list(each.layer_names)] for each in config.groups]
    return [
        groups, parallel, asdict(config.cache), config.model.dtype, config.kv_cache_layout,
        config.canonical_layout, config.replicated_layout, config.worker_kv_bytes_per_block,
    ]  # fmt: skip


__getattr__ = made_when_asked("StateholdTier", _derived)
