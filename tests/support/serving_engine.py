"""A serving engine in miniature: it drives the connector as vLLM does, on both sides.

The keys and values of a token follow from those before it: each block has one right content.
Not here: vLLM (tests/serving has it).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from statehold.kv.store import PageStore
from statehold.kv.vllm import connector
from statehold.kv.vllm.connector import Connector, Plan
from statehold.kv.vllm.opening import PagesOptions, serve
from statehold.process.worker import Worker
from statehold.units import KiB, MiB

TOKENS = 4  # of a block
HEADS, WIDTH, LAYERS, BLOCKS = 2, 8, 3, 32


@dataclass
class Layer:
    """What vLLM knows of a layer: the name of its attention kernel."""

    kernel: str

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.kernel)


class FullAttentionSpec:
    block_size = TOKENS


class MambaSpec(FullAttentionSpec): ...


def group(spec: type = FullAttentionSpec) -> Any:
    names = [f"layers.{at}" for at in range(LAYERS)]
    return SimpleNamespace(kv_cache_spec=spec(), layer_names=names)


def vllm_config(path: Path, ranks: int = 1, **options: object) -> Any:
    given = {"path": str(path), "capacity": 2 * MiB, "memory": 256 * KiB, "identity": "5" * 32}
    given = {**given, "staging": MiB, "buffers": MiB, "deadline_s": 60.0, **options}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=given),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
            rank=0,
            world_size=ranks,
            distributed_executor_backend="mp",
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        speculative_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys(group().layer_names, Layer("CPU_ATTN"))
        ),
        aux_output_config=SimpleNamespace(enabled=False),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        model_config=SimpleNamespace(
            model="m", dtype=torch.float32, quantization=None, max_model_len=64,
            quantization_config=None,
            hf_config=SimpleNamespace(to_json_string=lambda use_diff: "{}"),
        ),
    )  # fmt: skip


def kv_config(*groups: Any, hashed: int = TOKENS, blocks: int = BLOCKS) -> Any:
    groups = groups or (group(),)
    return SimpleNamespace(kv_cache_groups=list(groups), hash_block_size=hashed, num_blocks=blocks)


def hashes(ids: Sequence[int], tokens: int) -> list[bytes]:
    """Of so many tokens each, with all before them."""
    found, before = list[bytes](), b""
    for end in range(tokens, len(ids) + 1, tokens):
        before = hashlib.sha256(before + bytes(ids[end - tokens : end])).digest()
        found.append(before)
    return found


def content(ids: Sequence[int], layer: int, rank: int) -> torch.Tensor:
    """The keys and values of the last token."""
    raw = hashlib.shake_128(bytes([layer, rank, *ids])).digest(HEADS * WIDTH * 4)
    return torch.frombuffer(bytearray(raw), dtype=torch.int32).view(HEADS, WIDTH).float()


class Side(Connector):
    """The connector, with what vLLM's base class has."""

    def bind_connector_metadata(self, plan: Plan | None) -> None:
        self._connector_metadata = plan


class Engine:
    """An engine without memory of its own: what it does not compute is from pages.

    cut: into how many blocks its attention kernel cuts each one.
    """

    def __init__(
        self, path: Path, ranks: int = 1, hashed: int = TOKENS, cut: int = 1, **options: object
    ) -> None:
        self.hashed = hashed
        config = vllm_config(path, ranks, **options)
        self.scheduler, self.workers = Side(), list[Side]()
        self._savers, self._stores = list[Worker](), list[PageStore]()
        self.caches = [
            {name: torch.full((BLOCKS, TOKENS, HEADS, WIDTH), -1.0) for name in group().layer_names}
            for _ in range(ranks)
        ]
        for rank, caches in enumerate(self.caches):
            worker, config = Side(), vllm_config(path, ranks, **options)
            config.parallel_config.rank = rank
            worker.begin(config, kv_config(hashed=hashed))
            kernels = BLOCKS * cut, TOKENS // cut, HEADS, WIDTH
            with self._noting():
                worker.register_kv_caches({n: each.view(kernels) for n, each in caches.items()})
            self.workers.append(worker)
        self.scheduler.begin(config, kv_config(hashed=hashed))
        told = {rank: each.get_handshake_metadata() for rank, each in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata(told)
        self.free = list(range(BLOCKS))
        self.count = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for each in (*self.workers, self.scheduler):
            each.shutdown()

    def request(self, ids: Sequence[int], lora: object = None) -> Any:
        self.count += 1
        made = SimpleNamespace(
            request_id=f"request {self.count}",
            block_hashes=hashes(ids, self.hashed),
            num_tokens=len(ids),
            num_computed_tokens=0,
            lora_request=lora,
            skip_reading_prefix_cache=False,
            ids=list(ids),
        )
        self.scheduler.on_new_request(made)
        return made

    def run(self, ids: Sequence[int], lora: object = None) -> int:
        """Answer a request; returns how many tokens were not computed. Checks what they have."""
        request = self.request(ids, lora)
        loaded = self.ask(request)
        self.step(request, loaded)
        return loaded

    def ask(self, request: Any) -> int:
        while True:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            assert not is_async
            if found is not None:
                return int(found)
            self.empty_step()
            os.sched_yield()  # to the threads of the store

    def empty_step(self) -> None:
        self.execute(SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, kv_connector_block_state=None,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        ), lambda: None)  # fmt: skip

    def step(self, request: Any, loaded: int) -> None:
        """One step that computes the whole prompt, and the end of the request."""
        blocks = [self.free.pop(0) for _ in range(-(-request.num_tokens // TOKENS))]
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: (blocks,)), loaded
        )
        request.num_computed_tokens = request.num_tokens
        new = SimpleNamespace(req_id=request.request_id, num_computed_tokens=loaded)
        state = SimpleNamespace(get_block_ids=lambda _: (blocks,))
        self.execute(SimpleNamespace(
            scheduled_new_reqs=[new], kv_connector_block_state=state,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={request.request_id: request.num_tokens - loaded},
        ), lambda: self.forward(request.ids, blocks, loaded))  # fmt: skip
        self.scheduler.request_finished_all_groups(request, (blocks,))
        self.free += blocks

    def execute(self, output: Any, forward: Any) -> None:
        plan = self.scheduler.build_connector_meta(output)
        for worker in self.workers:
            worker.bind_connector_metadata(plan)
            worker.start_load_kv(None)
        try:
            forward()
        finally:  # as vLLM does
            for worker in self.workers:
                worker.wait_for_save()
                worker.bind_connector_metadata(None)

    def forward(self, ids: Sequence[int], blocks: Sequence[int], loaded: int) -> None:
        for rank, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches.values()):
                for at in range(len(ids)):
                    right = content(ids[: at + 1], layer, rank)
                    place = cache[blocks[at // TOKENS], at % TOKENS]
                    if at >= loaded:
                        place.copy_(right)
                    assert torch.equal(place, right), (at, layer, rank)

    def change(self, weights: str) -> None:
        """The workers get other weights."""
        serve([weights])
        for worker in self.workers:
            worker.weights_changed()

    def saved(self) -> None:
        """All that was saved is in files."""
        for saver in self._savers:
            saver.passed(None)
        for store in self._stores:
            store.flush()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """The threads that save, and the stores, that are made meanwhile."""
        opened = PagesOptions.opened

        def thread(name: str) -> Worker:
            self._savers.append(Worker(name))
            return self._savers[-1]

        def store(*given: Any) -> PageStore:
            self._stores.append(opened(*given))
            return self._stores[-1]

        with (
            mock.patch.object(connector, "Worker", thread),
            mock.patch.object(PagesOptions, "opened", store),
        ):
            yield
