"""TieredCache: the tokens of a DynamicCache, with layers beyond a budget in a store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.cache_utils import DynamicCache

from statehold.errors import StorageError, UsageError
from statehold.kv import PageStore, PageVerdict, TieredCache
from statehold.kv.opened import OpenStore
from support.caches import (
    LAYERS,
    TOKEN_BYTES,
    config,
    generated,
    model,
    sequence,
    small_store,
    step,
)
from support.faults import must


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    with small_store(tmp_path / "pages") as made:
        yield made


@pytest.fixture(scope="module")
def llama() -> Any:
    return model()


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [0, 3 * 60 * TOKEN_BYTES, "1GiB"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_tokens_are_those_of_a_dynamic_cache(
    llama: Any, store: PageStore, budget: int | str, batch: int
) -> None:
    ids = sequence(50, batch=batch)
    cache = TieredCache(llama.config, store, budget)
    found = generated(llama, ids, cache)
    assert torch.equal(found, generated(llama, ids, DynamicCache()))
    assert bool(cache.layers_away) == (budget != "1GiB")


def test_logits_are_equal_to_the_bit_in_every_call(llama: Any, store: PageStore) -> None:
    cache, stock = TieredCache(llama.config, store, 2 * 40 * TOKEN_BYTES), DynamicCache()
    for seed, tokens in enumerate([40, 1, 1, 17, 1, 33, 1]):
        ids = sequence(tokens, seed)
        assert torch.equal(step(llama, ids, cache), step(llama, ids, stock))
        assert cache.get_seq_length() == stock.get_seq_length()
    for layer, other in zip(cache.layers, stock.layers, strict=True):
        keys, values = layer.whole()
        assert torch.equal(keys, other.keys)
        assert torch.equal(values, other.values)


def test_bfloat16_has_the_same_tokens(store: PageStore) -> None:
    half = model().to(torch.bfloat16)
    ids = sequence(50)
    found = generated(half, ids, TieredCache(half.config, store, 0))
    assert torch.equal(found, generated(half, ids, DynamicCache()))


@pytest.mark.parametrize(
    ("kept", "away"), [(0, [0, 1, 2, 3, 4, 5]), (2, [1, 2, 3, 4]), (4, [1, 3])]
)
def test_the_budget_is_kept_and_the_layers_that_go_are_spread(
    llama: Any, store: PageStore, kept: int, away: list[int]
) -> None:
    newest = (LAYERS - kept) * 15 * TOKEN_BYTES
    budget = kept * 96 * TOKEN_BYTES + newest
    cache = TieredCache(llama.config, store, budget)
    for tokens in [80, *[1] * 16]:
        step(llama, sequence(tokens), cache)
        assert cache.nbytes <= budget
    assert cache.layers_away == away
    held = [storage for layer in cache.layers for storage in (layer.keys, layer.values)]
    assert sum(each.untyped_storage().nbytes() for each in held) <= budget + 96 * TOKEN_BYTES


def test_the_next_layer_is_asked_for_before_it_is_needed(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    get, update = PageStore.get, TieredCache.update

    def noted_get(self: PageStore, keys: Any, *arguments: Any, **options: Any) -> Any:
        events.append(("read", int.from_bytes(keys[0][16:20], "little")))
        return get(self, keys, *arguments, **options)

    def noted_update(self: Any, keys: Any, values: Any, layer: int, *rest: Any, **more: Any) -> Any:
        events.append(("update", layer))
        return update(self, keys, values, layer, *rest, **more)

    cache = TieredCache(llama.config, store, 0)
    step(llama, sequence(40), cache)
    monkeypatch.setattr(PageStore, "get", noted_get)
    monkeypatch.setattr(TieredCache, "update", noted_update)
    step(llama, sequence(1), cache)
    expected = [("update", 0)]
    for layer in range(1, LAYERS):
        expected += [("read", layer), ("update", layer)]
    assert events == [*expected, ("read", 0)]


def test_pages_come_from_files_when_memory_is_small(llama: Any, tmp_path: Path) -> None:
    ids = sequence(200)
    with small_store(tmp_path, memory=0) as store:  # as few slots as there may be
        found = generated(llama, ids, TieredCache(llama.config, store, 0), 6)
        stats = store.stats()
        assert stats["memory_pages"] < stats["pages"]
    assert torch.equal(found, generated(llama, ids, DynamicCache(), 6))


def test_pages_that_the_store_has_lost_are_an_error(llama: Any, store: PageStore) -> None:
    cache = TieredCache(llama.config, store, 0)
    step(llama, sequence(40), cache)
    store.identity = b"another identity"
    with pytest.raises(StorageError, match="has lost pages of a cache"):
        step(llama, sequence(1), cache)


def test_layers_stay_when_the_store_has_no_room(
    llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = sequence(200)
    with small_store(tmp_path, capacity="280KiB") as store:
        room = store.stats()["pages_max"]
        must(room < LAYERS * (200 // 16))
        cache = TieredCache(llama.config, store, 0)
        found = generated(llama, ids, cache, 4)
        assert store.stats()["evicted"] == 0
        assert 0 < len(cache.layers_away) < LAYERS
    assert torch.equal(found, generated(llama, ids, DynamicCache(), 4))
    assert "a layer of a cache stays in memory" in caplog.text
    assert "no room for all pages" in caplog.text


def test_layers_stay_when_the_store_drops_their_pages(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Dropped:
        def __init__(self, count: int) -> None:
            self.count = count

        def wait(self) -> list[PageVerdict]:
            return [PageVerdict.STORED, *[PageVerdict.DROPPED] * (self.count - 1)]

    ids = sequence(50)
    put = PageStore.put

    def first_alone(self: PageStore, keys: Any, pages: Any, **options: Any) -> Any:
        put(self, keys[:1], pages[:1], **options).wait()
        return Dropped(len(keys))

    monkeypatch.setattr(PageStore, "put", first_alone)
    found = generated(llama, ids, TieredCache(llama.config, store, 0))
    assert torch.equal(found, generated(llama, ids, DynamicCache()))
    assert "it has not taken a page: dropped" in caplog.text


def test_a_storage_that_fails_leaves_the_pages_in_memory(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def fails(*_: object, **__: object) -> object:
        refused.append(1)
        raise StorageError("pwrite failed", errno=5, path="segment-000000")

    monkeypatch.setattr(OpenStore, "job", fails)
    ids = sequence(50)
    found = generated(llama, ids, TieredCache(llama.config, store, 0))
    assert torch.equal(found, generated(llama, ids, DynamicCache()))
    assert refused


def test_beams_cuts_and_choices_of_sequences_are_those_of_a_dynamic_cache(
    llama: Any, store: PageStore
) -> None:
    cache, stock = TieredCache(llama.config, store, 0), DynamicCache()
    changes: list[Any] = [
        lambda each: each.crop(-7),
        lambda each: each.batch_repeat_interleave(3),
        lambda each: each.reorder_cache(torch.tensor([2, 0, 0])),
        lambda each: each.batch_select_indices(torch.tensor([1])),
        lambda each: each.reset(),
    ]
    batch = 1
    for change in changes:
        ids = sequence(40, batch=batch)
        assert torch.equal(step(llama, ids, cache), step(llama, ids, stock))
        must(cache.layers_away)
        change(cache)
        change(stock)
        assert cache.get_seq_length() == stock.get_seq_length()
        batch = stock.layers[0].keys.shape[0] if stock.get_seq_length() else 1
    ids = sequence(30)
    assert torch.equal(step(llama, ids, cache), step(llama, ids, stock))


def test_layers_with_a_window_stay_in_memory(store: PageStore) -> None:
    torch.manual_seed(0)
    made = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=16,
            eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    ids = sequence(50)
    cache = TieredCache(made.config, store, 0)
    found = generated(made, ids, cache)
    assert torch.equal(found, generated(made, ids, DynamicCache(config=made.config)))
    assert cache.layers_away == [1, 3]


def test_bad_arguments_are_refused(tmp_path: Path, store: PageStore) -> None:
    with pytest.raises(UsageError, match="not a store of pages"):
        TieredCache(config(), tmp_path, 0)
    with pytest.raises(UsageError, match="not a size in bytes"):
        TieredCache(config(), store, "much")
    with pytest.raises(UsageError, match="not a configuration"):
        TieredCache({"layers": 2}, store, 0)


def test_a_page_that_holds_no_token_is_refused(llama: Any, tmp_path: Path) -> None:
    with (
        small_store(tmp_path, page_bytes=TOKEN_BYTES - 1) as store,
        pytest.raises(UsageError, match="holds no token of a layer"),
    ):
        step(llama, sequence(3), TieredCache(llama.config, store, 0))


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, statehold.kv as kv; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'loaded'; "
        "assert not hasattr(kv, 'Nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
