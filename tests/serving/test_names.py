"""What vLLM finds of statehold, and the tier as vLLM's own classes drive it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CHUNKS, CHUNK = 8, 20_000


def test_vllm_finds_all_names_and_can_make_the_classes() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from statehold.kv.vllm.weights import StateholdWeights

    load_general_plugins()
    connector = KVConnectorFactory.get_connector_class_by_name("StateholdConnector")
    tier = SecondaryTierFactory.get_tier_class({"type": "statehold"})
    loader = type(get_model_loader(SimpleNamespace(load_format="statehold")))
    for made in (connector, tier, loader, StateholdWeights):
        assert made.__module__.startswith("statehold.kv.vllm")
        assert not inspect.isabstract(made)
    assert supports_hma(connector)


def config() -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0",), 0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="an engine",
        model=OffloadingModelConfig("a model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def test_a_tier_moves_chunks_for_vllm(tmp_path: Path, weights: Path) -> None:
    import numpy as np
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from statehold.kv.vllm.loader import register

    register()
    given = {
        "type": "statehold", "path": str(tmp_path / "kv"), "capacity": "2MiB", "memory": "1MiB",
        "weights": str(weights), "deadline_s": 60.0,
    }  # fmt: skip
    memory = bytearray(CHUNKS * CHUNK)
    view = memoryview(memory).cast("B", shape=[CHUNKS, CHUNK])
    keys = [make_offload_key(bytes([at]) * 32, 0) for at in range(CHUNKS)]
    right = [bytes([at + 1]) * CHUNK for at in range(CHUNKS)]
    context = ReqContext("request")

    def made(config: Any) -> Any:
        spec = SimpleNamespace(config=config)
        return SecondaryTierFactory.create_secondary_tier(given, view, spec)

    def over(tier: Any) -> Any:
        tier.drain_jobs()
        (found,) = tier.get_finished_jobs()
        return found

    first = config()
    tier = made(first)
    memory[:] = b"".join(right)
    tier.submit_store(TransferJob(1, keys, np.arange(CHUNKS), False, context))
    assert over(tier).success
    tier.shutdown()
    memory[:] = bytes(len(memory))
    tier = made(first)
    assert tier.lookup(keys[0], context) is LookupResult.HIT
    tier.submit_load(TransferJob(2, keys, np.arange(CHUNKS)[::-1], True, context))
    assert over(tier).success
    tier.shutdown()
    assert bytes(memory) == b"".join(reversed(right))
    for other in (
        replace(first, groups=(replace(first.groups[0], tokens_per_block=32),)),
        replace(first, cache=replace(first.cache, blocks_per_chunk=2)),
        replace(first, model=replace(first.model, dtype="float16")),
        replace(first, parallel=replace(first.parallel, world_size=2, tp_size=2)),
        replace(first, groups=(replace(first.groups[0], layer_names=("layers.1",)),)),
        replace(first, kv_cache_layout="HND"),
    ):
        tier = made(other)
        assert tier.lookup(keys[0], context) is LookupResult.MISS, other
        tier.shutdown()
    weights = weights.rename(tmp_path / "other name")
    given["weights"] = str(weights)
    tier = made(first)
    assert tier.lookup(keys[0], context) is LookupResult.HIT
    tier.shutdown()
    (weights / "model.safetensors").write_bytes(bytes(999) + b"1")
    tier = made(first)
    assert tier.lookup(keys[0], context) is LookupResult.MISS
    tier.shutdown()
