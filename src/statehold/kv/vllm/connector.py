"""StateholdConnector: vLLM's prefix cache goes on in a PageStore, with a GPU and without.

    scheduler  which pages of a prompt are there -> read them into staging -> promise those that
               are right -> plan: staging slots to load, blocks to save
    worker     before the forward: staging -> KV cache; behind it: full blocks -> buffers -> store

A page is one block of one tensor-parallel rank, over all layers: its key is vLLM's hash of the
block and the rank. Staging is memory of the scheduler that the workers of the host map.

Invariants: a page is promised only after its bytes were verified and are in staging, which nobody
else writes to until all ranks have copied them. So a page that is bad, late or missing shortens the
promise, and no request fails; until the pages are there, or their time has passed, the scheduler
asks again, and other requests go on. No call waits for storage. What has no buffer is not saved,
and counted. A block is saved only behind the forward that filled it, and not if that has failed.
Not here: the store (kv/store), what its pages depend on (opening).
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from statehold.errors import refused
from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.page import HEADER_BYTES, IDENTITY_BYTES, whole_blocks
from statehold.kv.store import PageStore
from statehold.kv.tiers import boot, touch
from statehold.kv.vllm.opening import PagesOptions, change, made_when_asked
from statehold.process.warn import logger
from statehold.process.worker import Worker
from statehold.tensors.devices.elements import host_memory
from statehold.units import parse_bytes

# How long pages wait for a place in the store.
PUT_S = 30.0
# How long a step in which no request runs waits for pages. Otherwise vLLM asks again at once, in
# thousands of empty steps, and takes the interpreter from the threads that bring the pages.
EMPTY_STEP_S = 0.005
# Layers whose blocks hold all that the tokens of the block have left behind.
HOLDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# Values of load_format that load the *.safetensors as they are, whatever the options of the loader.
_SAME_FILES = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "statehold"})

W = TypeVar("W", bound="SharedWords")
BlocksOf = Callable[[str], Sequence[int]]  # of a request


# -- what the two sides tell each other ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker tells the scheduler before the first request. current: path of a Current.
    host: tiers.boot()."""

    identity: bytes
    page_bytes: int
    current: str
    host: int


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """Full blocks of a request, in order; after: the hash of the block before the first one."""

    hashes: list[bytes]
    blocks: list[int]
    after: bytes | None


@dataclass(slots=True)
class Plan:
    """What the workers do in a step. loads: a block, and the staging slot of rank 0."""

    number: int
    staging: str
    identity: bytes = b""
    weights: int = 0  # how often they had changed
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[SavedBlocks] = field(default_factory=list)


def key_of(block_hash: bytes, rank: int) -> bytes:
    """The key of a page."""
    return bytes(block_hash) + rank.to_bytes(4, "big")


class SharedWords:
    """Memory that other processes of the host map, and that lives as long as one has it open."""

    def __init__(self, fd: int) -> None:
        self.view = memoryview(mmap.mmap(fd, 0))
        self.words = self.view[:HEADER_BYTES].cast("Q")

    @classmethod
    def made(cls: type[W], nbytes: int = 0, *more: int) -> tuple[W, int]:
        """New memory with so many bytes behind the words, and the descriptor that keeps it."""
        fd = os.memfd_create("statehold-pages", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
        return cls(fd, *more), fd

    @classmethod
    def opened(cls: type[W], path: str, *more: int) -> W:
        """What another process has made."""
        with open(path, "r+b", buffering=0) as file:
            return cls(file.fileno(), *more)


class StagedPages(SharedWords):
    """Slots for pages of so many bytes. words: by rank, the number of the last plan that it needs
    no slot of any more."""

    def __init__(self, fd: int, page_bytes: int) -> None:
        super().__init__(fd)
        self.page_bytes = page_bytes
        self.slots = (self.view.nbytes - HEADER_BYTES) // whole_blocks(page_bytes)

    def page(self, slot: int) -> memoryview:
        """The bytes of a page."""
        at = HEADER_BYTES + slot * whole_blocks(self.page_bytes)
        return self.view[at : at + self.page_bytes]


class Current(SharedWords):
    """The identity of a worker's weights, in memory that the scheduler sees at once.

    An identity is complete before the count says so, and stays until the one after the next.
    """

    @property
    def count(self) -> int:
        """How often the weights have changed."""
        return self.words[0]

    @property
    def identity(self) -> bytes:
        """What pages depend on since then."""
        return bytes(self._of(self.count))

    def change(self, identity: bytes) -> None:
        """The weights are others."""
        self._of(self.count + 1)[:] = identity
        self.words[0] += 1

    def _of(self, count: int) -> memoryview:
        return self.view[self.words.itemsize + count % 2 * IDENTITY_BYTES :][:IDENTITY_BYTES]


# -- the scheduler's side --------------------------------------------------------------------------


@dataclass(slots=True)
class _Asked:
    """Pages of a request, read into staging. slots: by page, of all ranks, one after the other."""

    first: int
    slots: list[int]
    batch: PageBatch
    pages: int | None = None  # how many are right, from the first one on; None: not known yet
    computed: int = 0  # tokens that vLLM had when it was promised pages


class Promises:
    """Which pages a request may count on, and the plans of steps."""

    def __init__(
        self, store: PageStore, staging: StagedPages, path: str, *, ranks: int, tokens: int,
        hashes_a_page: int,
    ) -> None:  # fmt: skip
        self._store, self._staging, self._path = store, staging, path
        self._ranks, self._tokens, self._hashes_a_page = ranks, tokens, hashes_a_page
        # A slot of rank r is behind the one of rank 0.
        # Used last, taken first: its bytes are near, and a page fault for each 4 KiB is over.
        self._free = list(range(0, staging.slots - ranks + 1, ranks))
        self._lent = deque[tuple[int, list[int]]]()  # the number of the plan, slots
        self._asked: dict[str, _Asked] = {}
        self._requests: dict[str, Any] = {}
        self._given_up, self._saved = set[str](), dict[str, int]()
        self._number, self._loads = 1, list[tuple[int, int]]()

    def begin(self, request: Any) -> None:
        """A request has come. Of an adapter, vLLM's hash knows the name and not the weights."""
        if request.lora_request is None:
            self._requests[request.request_id] = request

    def end(self, name: str) -> None:
        """A request has ended, or was given up."""
        self._requests.pop(name, None)
        self._saved.pop(name, None)
        self._given_up.discard(name)
        self._let_go(name)

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens after those that are computed may be loaded; None: ask again later."""
        name = request.request_id
        if name not in self._requests or name in self._given_up:
            return 0
        asked = self._asked.get(name)
        if asked is not None and computed < asked.first * self._tokens:
            self._let_go(name)  # vLLM has lost blocks meanwhile
            asked = None
        asked = asked or self._ask(request, computed // self._tokens)
        if asked is None:
            return 0
        self._asked[name] = asked
        if not self._settle(asked):
            return None
        # One token at least is computed: its logits are the answer's first token.
        end = min((asked.first + (asked.pages or 0)) * self._tokens, request.num_tokens - 1)
        if end <= computed:
            self._given_up.add(name)
            self._let_go(name)
            return 0
        asked.computed = computed
        return int(end - computed)

    def _ask(self, request: Any, first: int) -> _Asked | None:
        """Begin to read the pages that are there, as far as there are slots."""
        keys = self._keys(self._hashes(request, first, request.num_tokens // self._tokens))
        there = self._store.contains(keys[: self._ranks])
        if there and all(there):
            there = self._store.contains(keys)
        loaded = min(self._staging.words[: self._ranks])
        while self._lent and self._lent[0][0] <= loaded:  # all ranks have loaded from these
            self._free.extend(self._lent.popleft()[1])
        count = min([*there, False].index(False) // self._ranks, len(self._free))
        if not count:
            return None
        slots = [self._free.pop() for _ in range(count)]
        pages = [self._staging.page(slot + rank) for slot in slots for rank in range(self._ranks)]
        return _Asked(first, slots, self._store.get(keys[: len(pages)], pages))

    def _settle(self, asked: _Asked) -> bool:
        """Whether it is known which of the pages are right."""
        if asked.pages is None:
            if not asked.batch.is_over():
                return False
            is_right = [verdict is PageVerdict.HIT for verdict in asked.batch.wait()]
            asked.pages = [*is_right, False].index(False) // self._ranks
            self._free.extend(asked.slots[asked.pages :])
            del asked.slots[asked.pages :]
        return True

    def allocated(self, name: str, blocks: Sequence[int], external: int) -> None:
        """vLLM has given the request its blocks. `external` tokens of them come from pages."""
        asked = self._asked.get(name)
        if asked is not None and external:
            first = asked.computed // self._tokens
            end = -(-(asked.computed + external) // self._tokens)
            used = asked.slots[first - asked.first : end - asked.first]
            self._loads += zip(blocks[first:end], used, strict=True)
            self._lent.append((self._number, used))
            asked.slots = [slot for slot in asked.slots if slot not in set(used)]
        self._let_go(name)

    def plan(self, scheduled: Mapping[str, int], blocks_of: BlocksOf, weights: int = 0) -> Plan:
        """The plan of a step. scheduled: the tokens that a request has computed behind it."""
        plan = Plan(self._number, self._path, self._store.identity, weights, self._loads)
        for name, computed in scheduled.items():
            request = self._requests.get(name)
            if request is not None:
                plan.saves += self._saves(request, computed, blocks_of)
        self._number, self._loads = self._number + 1, []
        waiting = [each.batch for each in self._asked.values() if each.pages is None]
        if waiting and not scheduled:
            waiting[0].is_over(EMPTY_STEP_S)
        return plan

    def _saves(self, request: Any, computed: int, blocks_of: BlocksOf) -> list[SavedBlocks]:
        """The blocks that are full behind the step, and not in the store."""
        name = request.request_id
        first = self._saved.get(name, 0)
        hashes = self._hashes(request, first, computed // self._tokens)
        if not hashes:
            return []
        self._saved[name] = first + len(hashes)
        there, ranks = self._store.contains(self._keys(hashes)), self._ranks
        found = list[SavedBlocks]()
        blocks, was_there = blocks_of(name), True
        before = self._hashes(request, first - 1, first)[0] if first else None
        for at, each in enumerate(hashes):
            is_there = all(there[at * ranks : (at + 1) * ranks])
            if not is_there:
                if was_there:
                    found.append(SavedBlocks([], [], before))
                found[-1].hashes.append(each)
                found[-1].blocks.append(blocks[first + at])
            was_there, before = is_there, each
        return found

    def reset(self, identity: bytes | None = None) -> None:
        """From now on no page of before is found. identity: of the new weights; None: nobody says
        what they are, so pages are this engine's own until it starts again."""
        for name in list(self._asked):
            self._let_go(name)
        # What runs has keys and values of before, which no page may have from now on.
        self._requests = {n: r for n, r in self._requests.items() if not r.num_computed_tokens}
        self._saved.clear()
        self._given_up.clear()
        change(self._store, identity or os.urandom(IDENTITY_BYTES))

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _hashes(self, request: Any, first: int, end: int) -> list[bytes]:
        """Of some full blocks of a request; each stands for its tokens and all before them."""
        each = self._hashes_a_page
        return list(map(bytes, request.block_hashes[(first + 1) * each - 1 : end * each : each]))

    def _keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [key_of(each, rank) for each in hashes for rank in range(self._ranks)]

    def _let_go(self, name: str) -> None:
        asked = self._asked.pop(name, None)
        if asked is not None:
            # From now on nobody writes to the slots.
            asked.batch.settle(range(asked.batch.count), PageVerdict.LATE)
            self._free.extend(asked.slots)


# -- the worker's side -----------------------------------------------------------------------------


class WorkerPages:
    """The pages of a worker, between the KV cache and the store."""

    def __init__(
        self, store: PageStore, rows: Sequence[torch.Tensor], rank: int, buffer_bytes: int
    ) -> None:
        self._store, self._rows, self._rank = store, rows, rank
        self.page_bytes, self._device = store.page_bytes, rows[0].device
        is_cuda = self._device.type == "cuda"
        count = max(1, buffer_bytes // self.page_bytes)
        # Touched now: a page fault for each 4 KiB would be part of the first steps.
        self._buffers = torch.zeros(
            (count, self.page_bytes), dtype=torch.uint8, device="cpu", pin_memory=is_cuda
        ).fill_(1)
        self._memory = host_memory(self._buffers)
        # A copy_() of a block of a layer costs half as much again as its bytes.
        self._layers = [host_memory(each) if each.is_cpu else None for each in self._rows]
        self._free, self._guard = deque(range(count)), threading.Lock()
        self._staging: StagedPages | None = None
        self._saver = Worker("statehold-kv-save")
        self._dropped = 0  # pages that had no buffer

    def load(self, plan: Plan) -> None:
        """Copy the pages of a plan to their blocks."""
        if not plan.loads:
            return
        if self._staging is None:
            self._staging = StagedPages.opened(plan.staging, self.page_bytes)
        for block, slot in plan.loads:
            self._move(block, self._staging.page(slot + self._rank), is_load=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._staging.words[self._rank] = plan.number

    def save(self, plan: Plan) -> None:
        """Copy full blocks, as far as there are buffers, and store them later."""
        if plan.identity:
            self.use(plan.identity)
        for save in plan.saves:
            with self._guard:
                count = min(len(save.blocks), len(self._free))
                taken = [self._free.popleft() for _ in range(count)]
            if count < len(save.blocks) and not self._dropped:
                logger.warning("%s: buffers= is too small to save all pages", self._store.path)
            self._dropped += len(save.blocks) - count
            for block, buffer in zip(save.blocks, taken, strict=False):
                self._move(block, self._page(buffer), is_load=False)
            if taken:
                self._later(save, taken)

    def _move(self, block: int, page: memoryview, *, is_load: bool) -> None:
        """Copy a block of all layers from a page, or to it."""
        at = 0
        for rows, memory in zip(self._rows, self._layers, strict=True):
            begin, width = block * rows.stride(0), rows.shape[1]
            part = page[at : at + width]
            if memory is None:
                tensor = torch.frombuffer(part, dtype=torch.uint8)
                to, source = (rows[block], tensor) if is_load else (tensor, rows[block])
                to.copy_(source, non_blocking=True)
            elif is_load:
                memory[begin : begin + width] = part
            else:
                part[:] = memory[begin : begin + width]
            at += width

    def _later(self, save: SavedBlocks, buffers: list[int]) -> None:
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
        keys = [key_of(each, self._rank) for each in save.hashes[: len(buffers)]]
        after = None if save.after is None else key_of(save.after, self._rank)
        identity, until = self._store.identity, time.monotonic() + PUT_S

        def put() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                pages, left_s = list(map(self._page, buffers)), max(0.0, until - time.monotonic())
                with self._guard:
                    if identity != self._store.identity:
                        return
                    batch = self._store.put(keys, pages, after=after, deadline_s=left_s)
                batch.wait()
            finally:
                with self._guard:
                    self._free.extend(buffers)

        self._saver.submit(put)

    def _page(self, buffer: int) -> memoryview:
        return self._memory[buffer * self.page_bytes :][: self.page_bytes]

    def use(self, identity: bytes) -> None:
        """What is saved from now on depends on other weights. What is not in the store yet goes:
        it may take long to come there."""
        if identity != self._store.identity:
            with self._guard:
                change(self._store, identity)

    def stats(self) -> dict[str, int]:
        """Of the store, and of the buffers."""
        return {**self._store.stats(), "no buffer": self._dropped}

    def close(self) -> None:
        """Store what was saved, and close the store."""
        self._saver.close()
        self._store.close()


def rows_of(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """The blocks of a layer's cache as (blocks, bytes): an attention kernel may have cut each of
    them into several. Raises UsageError if they have gaps."""
    cache = cache.view(blocks, -1, *cache.shape[1:])
    block, size = cache[0], cache.element_size()
    if torch.empty_like(block, device="meta").stride() != block.stride():  # without gaps
        summary, got = "the KV cache has a layout that pages cannot hold", cache.stride()
        raise refused(summary, "blocks without gaps", f"strides {got}")
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    shape, strides = (len(cache), block.numel() * size), (cache.stride(0) * size, 1)
    return raw.set_(cache.untyped_storage(), cache.storage_offset() * size, shape, strides)


# -- vLLM's interface ------------------------------------------------------------------------------


class Connector:
    """The methods of vLLM's KVConnectorBase_V1, for either side. version: vLLM's."""

    version: ClassVar[str] = ""

    def begin(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Before all other calls. Raises UsageError for what pages cannot hold, by name."""
        self._config = vllm_config
        self._options = PagesOptions.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._group = check(vllm_config, kv_cache_config)
        self._block_tokens = self._group.kv_cache_spec.block_size
        self._blocks = kv_cache_config.num_blocks
        self._hash_tokens = kv_cache_config.hash_block_size or self._block_tokens
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._promises: Promises | None = None
        self._copies: WorkerPages | None = None
        self._connector_metadata: Plan | None = None  # of the step; vLLM's base class sets it
        self._current: Current | None = None
        self._keeps: int | None = None  # a descriptor
        self._manager: Any = None
        self._weights, self._is_stale, self._is_idle = 0, False, True

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Told]) -> None:
        """What the workers know: the weights that they have loaded, and the layout of pages."""
        told = metadata[min(metadata)]
        if len({each.page_bytes for each in metadata.values()}) != 1:
            got = {rank: each.page_bytes for rank, each in metadata.items()}
            raise refused("the ranks have pages of different sizes", "one size", got)
        if others := [rank for rank, each in metadata.items() if each.host != boot()]:
            raise refused("pages need all ranks on the scheduler's host", "one host", others)
        self._current = Current.opened(told.current)
        store = self._options.opened(told.page_bytes, told.identity)
        slot = whole_blocks(told.page_bytes)
        nbytes = max(1, parse_bytes(self._options.staging) // slot) * slot
        staging, self._keeps = StagedPages.made(nbytes, told.page_bytes)
        touch(staging.view.obj)  # type: ignore[arg-type]
        self._promises = Promises(
            store, staging, f"/proc/{os.getpid()}/fd/{self._keeps}", ranks=self._ranks,
            tokens=self._block_tokens, hashes_a_page=self._block_tokens // self._hash_tokens,
        )  # fmt: skip

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM's own prefix cache: it knows nothing of weights."""
        self._manager = kv_cache_manager

    def _is_current(self) -> bool:
        """Whether what vLLM has found is of the weights that the workers have."""
        if self._promises is None or self._current is None:
            return True
        if self._weights != self._current.count:
            self._weights, self._is_stale = self._current.count, True
            self._promises.reset(self._current.identity)
        if not self._is_stale:
            return True
        # It fails, and warns, while requests run that began with the weights before.
        if self._is_idle:
            self._is_stale = self._manager is not None and not self._manager.reset_prefix_cache()
        return False

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        if self._promises is not None:
            self._promises.begin(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens are in staging. They are loaded before the forward of the step.

        None also if the weights have changed: what vLLM has found itself is of those before.
        """
        if not self._is_current():
            return None, False
        if self._promises is None or request.skip_reading_prefix_cache:
            return 0, False
        return self._promises.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        if self._promises is not None:
            ids = blocks.get_block_ids()[0] if num_external_tokens else ()
            self._promises.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """The plan of a step."""
        if self._promises is None:
            return Plan(0, "")
        new, old = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in new}
        computed.update(zip(old.req_ids, old.num_computed_tokens, strict=True))
        steps = scheduler_output.num_scheduled_tokens
        self._is_idle = not steps
        state = scheduler_output.kv_connector_block_state
        behind = {name: computed[name] + count for name, count in steps.items()}
        return self._promises.plan(behind, lambda name: state.get_block_ids(name)[0], self._weights)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Blocks may go at once: what is saved was copied already."""
        if self._promises is not None:
            self._promises.end(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """vLLM forgets its prefix cache, with reset_connector=True: so are the pages."""
        if self._promises is not None:
            self._promises.reset()
        return True

    # -- worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The tensors of the KV cache, by layer."""
        self._caches = caches = {name: kv_caches[name] for name in self._group.layer_names}
        rank = self._config.parallel_config.rank % self._ranks
        identity = self._identity()
        rows = [rows_of(each, self._blocks) for each in caches.values()]
        nbytes = sum(each.shape[1] for each in rows)
        store, buffers = self._options.opened(nbytes, identity), parse_bytes(self._options.buffers)
        self._copies = WorkerPages(store, rows, rank, buffers)
        self._current, self._keeps = Current.made()
        self._told = Told(identity, nbytes, f"/proc/{os.getpid()}/fd/{self._keeps}", boot())

    def weights_changed(self) -> None:
        """This process serves other weights (opening.serve): no page of before is found."""
        if self._copies is not None and self._current is not None:
            identity = self._identity()
            self._copies.use(identity)
            self._current.change(identity)

    def _identity(self) -> bytes:
        model, load = self._config.model_config, self._config.load_config
        how = [load.load_format, str(load.model_loader_extra_config)]
        # A kernel packs blocks of one shape in its own way, and on a CPU also by its instructions.
        context = self._config.compilation_config.static_forward_context
        can = torch.cpu.get_capabilities() if next(iter(self._caches.values())).is_cpu else {}
        layers = [
            [name, list(each.shape[1:]), list(each.stride()[1:]), str(each.dtype),
             context[name].get_attn_backend().get_name()]
            for name, each in self._caches.items()
        ]  # fmt: skip
        return self._options.identity_of(
            model.model, json.loads(model.hf_config.to_json_string(use_diff=False)),
            kernel=[can.get("architecture"), can.get("amx_tile"), torch.version.hip],
            version=self.version, layers=layers, ranks=self._ranks, tokens=self._block_tokens,
            dtype=str(model.dtype), cache_dtype=self._config.cache_config.cache_dtype,
            quantization=[str(model.quantization), str(model.quantization_config)],
            length=model.max_model_len, loaded=how if how[0] not in _SAME_FILES else None,
        )  # fmt: skip

    def get_handshake_metadata(self) -> Told:
        """For set_xfer_handshake_metadata."""
        return self._told

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Before the forward that uses the pages."""
        if self._copies is not None and self._connector_metadata is not None:
            self._copies.load(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """All layers are saved behind the forward."""

    def wait_for_save(self) -> None:
        """Behind the forward. vLLM also calls this behind one that has failed, while its error is
        on its way: then the blocks hold anything."""
        if self._copies is None or self._connector_metadata is None or self._current is None:
            return
        if sys.exc_info()[0] is None and self._connector_metadata.weights == self._current.count:
            self._copies.save(self._connector_metadata)

    def stats(self) -> Mapping[str, int]:
        """As PageStore.stats(); "no buffer": pages of this worker that were not saved."""
        return self._copies.stats() if self._copies is not None else {}

    def shutdown(self) -> None:
        """Store what was saved, and close."""
        for side in (self._copies, self._promises):
            if side is not None:
                side.close()
        if self._keeps is not None:
            os.close(self._keeps)
        self._copies = self._promises = self._keeps = self._current = None


def check(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The group of layers whose pages are kept. Raises UsageError for what pages cannot hold."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    kinds = {name for group in groups for name in _kinds(group.kv_cache_spec)}
    reasons = {
        f"layers of several kinds: {', '.join(sorted(kinds))}": len(groups) > 1,
        f"layers of the kind {', '.join(sorted(kinds - HOLDS))}": bool(kinds - HOLDS),
        "a model that is cut over pipeline ranks": parallel.pipeline_parallel_size > 1,
        "tokens that are cut over context ranks": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "ranks on several hosts": getattr(parallel, "nnodes", 1) > 1,
        "ranks with a scheduler each": parallel.distributed_executor_backend == "external_launcher"
        and parallel.world_size > 1,
        "a draft model": vllm_config.speculative_config is not None,
        "blocks without hashes": not vllm_config.cache_config.enable_prefix_caching,
        "scales that a forward sets": str(vllm_config.cache_config.cache_dtype).endswith("_head"),
        "routed experts beside answers": vllm_config.aux_output_config.enabled,
    }
    for name in (name for name, is_so in reasons.items() if is_so):
        expected = "full attention in all layers, on one host"
        hint = "leave StateholdConnector out of kv_transfer_config for this model"
        raise refused("pages of this engine cannot be kept", expected, name, hint)
    return groups[0]


def _kinds(spec: Any) -> set[str]:
    inner = getattr(spec, "kv_cache_specs", None)
    return {type(each).__name__ for each in (inner.values() if inner else [spec])}


@functools.cache
def _derived() -> type[Any]:
    from vllm import __version__
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    class StateholdConnector(Connector, KVConnectorBase_V1, SupportsHMA):
        """The connector that vLLM makes, once for each side."""

        version = __version__
        _cache_hit_source = CacheHitSource.DISK
        # A page that is not handed on is computed again.
        requires_kv_delivery = False

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
            self.begin(vllm_config, kv_cache_config)

        def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
            """The tensors of the KV cache, by layer. Raises UsageError beside other connectors."""
            if (whole := get_kv_transfer_group()) is not self:
                raise refused("pages stand beside no connector", "alone", type(whole).__name__)
            super().register_kv_caches(kv_caches)

    return StateholdConnector


__getattr__ = made_when_asked("StateholdConnector", _derived)
