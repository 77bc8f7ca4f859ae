"""save() and resume(): a conversation goes on in another cache with the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from statehold.errors import UsageError
from statehold.kv import (
    PagedEvictionCache,
    PageStore,
    PageVerdict,
    TieredCache,
    identity,
    resume,
    save,
)
from statehold.kv.caches.paged_eviction import value_key_ratio
from support import scripts
from support.caches import (
    LAYERS,
    TOKEN_BYTES,
    config,
    digest,
    filled,
    generated,
    model,
    sequence,
    small_store,
    step,
)
from support.faults import DEADLINE_S, must

pytestmark = pytest.mark.thorough

PAGE_TOKENS = 8
PAGE_BYTES = PAGE_TOKENS * LAYERS * TOKEN_BYTES
WEIGHTS = b"some weights 001"


@pytest.fixture(scope="module")
def llama() -> Any:
    return model()


def opened(path: Path, **options: Any) -> PageStore:
    return small_store(path, page_bytes=PAGE_BYTES, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    with opened(tmp_path / "pages") as made:
        yield made


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40, 45])
def test_the_whole_conversation_comes_back_to_the_bit(
    llama: Any, store: PageStore, tokens: int
) -> None:
    ids = sequence(tokens + 3)
    cache = filled(llama, ids[:, :tokens])
    must(save(cache, ids, store, WEIGHTS) == tokens)
    found = resume(ids, store, WEIGHTS)
    assert found.get_seq_length() == tokens
    for layer, saved in zip(found.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, saved.keys)
        assert torch.equal(layer.values, saved.values)


def test_a_resumed_conversation_goes_on_with_the_same_tokens(llama: Any, tmp_path: Path) -> None:
    first, cache = sequence(40), DynamicCache()
    with opened(tmp_path) as store:
        answered = generated(llama, first, cache)
        assert save(cache, answered, store, WEIGHTS) == answered.shape[1] - 1
    asked = torch.cat([answered, sequence(9, seed=2)], dim=1)
    with opened(tmp_path) as store:
        found = resume(asked, store, WEIGHTS)
        assert found.get_seq_length() == answered.shape[1] - 1
        assert torch.equal(generated(llama, asked, found), generated(llama, asked, cache))


def test_one_token_is_left_to_compute(llama: Any, store: PageStore) -> None:
    for tokens in (16, 19):
        ids = sequence(tokens)
        must(save(filled(llama, ids), ids, store, WEIGHTS) == tokens)
        found = resume(ids, store, WEIGHTS)
        assert found.get_seq_length() == tokens - 1
        assert torch.equal(generated(llama, ids, found), generated(llama, ids, DynamicCache()))


def test_another_conversation_finds_the_beginning_that_it_shares(
    llama: Any, store: PageStore
) -> None:
    ids = sequence(45)
    save(filled(llama, ids), ids, store, WEIGHTS)
    other = ids.clone()
    other[0, 30:] = sequence(15, seed=5)
    assert resume(other, store, WEIGHTS).get_seq_length() == 24  # whole pages
    other[0, 0] += 1
    assert resume(other, store, WEIGHTS).get_seq_length() == 0


def test_a_longer_conversation_adds_its_new_pages_alone(llama: Any, store: PageStore) -> None:
    ids = sequence(60)
    save(filled(llama, ids[:, :40]), ids, store, WEIGHTS)
    before = store.stats()
    assert save(filled(llama, ids), ids, store, WEIGHTS) == 60
    assert store.stats()["stored"] - before["stored"] == 3
    must(save(filled(llama, ids), ids, store, WEIGHTS) == 60)
    assert store.stats()["stored"] - before["stored"] == 3
    assert resume(ids, store, WEIGHTS).get_seq_length() == 59


def test_a_tiered_cache_is_saved_and_filled(llama: Any, store: PageStore, tmp_path: Path) -> None:
    ids = sequence(45)
    with small_store(tmp_path / "tier") as tier:
        cache = TieredCache(llama.config, tier, 0)
        step(llama, ids[:, :40], cache)
        assert save(cache, ids[:, :40], store, WEIGHTS) == 40
        found = resume(ids, store, WEIGHTS, cache=TieredCache(llama.config, tier, 0))
        assert found.get_seq_length() == 40
        assert found.layers_away == list(range(LAYERS))
        assert torch.equal(generated(llama, ids, found), generated(llama, ids, DynamicCache()))


def test_bfloat16_comes_back(store: PageStore) -> None:
    half = model().to(torch.bfloat16)
    ids = sequence(40)
    cache = filled(half, ids)
    save(cache, ids, store, WEIGHTS)
    found = resume([*ids[0].tolist(), 7], store, WEIGHTS)
    assert torch.equal(found.layers[3].values, cache.layers[3].values)


RESUMED = """
import torch
from pathlib import Path
from statehold.kv import resume, save
from support.caches import digest, filled, generated, model, sequence, small_store
llama = model({seed})
ids = sequence(45)
with small_store(Path({path!r}), page_bytes={page_bytes}) as store:
    found = resume(ids, store, digest(llama))
    print(found.get_seq_length(), generated(llama, ids, found).tolist())
"""


@pytest.mark.parametrize(("seed", "hits"), [(0, 40), (1, 0)])
def test_a_second_process_has_the_same_tokens_and_other_weights_no_hits(
    llama: Any, tmp_path: Path, seed: int, hits: int
) -> None:
    ids = sequence(45)
    with opened(tmp_path) as store:
        must(save(filled(llama, ids[:, :40]), ids[:, :40], store, digest(llama)) == 40)
    code = RESUMED.format(seed=seed, path=str(tmp_path), page_bytes=PAGE_BYTES)
    done = scripts.run(["-c", code])
    assert done.returncode == 0, done.stderr
    expected = generated(model(seed), ids, DynamicCache()).tolist()
    assert done.stdout.split("\n")[0] == f"{hits} {expected}"


def test_the_identity_of_a_directory_tells_weights_apart(
    llama: Any, store: PageStore, tmp_path: Path
) -> None:
    ids = sequence(20)
    for name, seed in (("a", 0), ("same", 0), ("other", 1)):
        model(seed).save_pretrained(tmp_path / name)
    save(filled(llama, ids), ids, store, identity(tmp_path / "a", dtype="float32"))
    hits = {
        name: resume(ids, store, identity(tmp_path / name, dtype="float32")).get_seq_length()
        for name in ("same", "other")
    }
    assert hits == {"same": 19, "other": 0}


def test_a_page_that_is_gone_ends_the_prefix(llama: Any, tmp_path: Path) -> None:
    ids = sequence(45)
    with opened(tmp_path) as store:
        save(filled(llama, ids), ids, store, WEIGHTS)
    segment = min(tmp_path.glob("segment-*"))
    raw = bytearray(segment.read_bytes())
    slot = 4096 + -(-PAGE_BYTES // 4096) * 4096
    raw[3 * slot + 5000] ^= 1  # the root, two pages, and in the third one
    segment.write_bytes(raw)
    with opened(tmp_path) as store:
        found = resume(ids, store, WEIGHTS)
        assert store.stats()["bad"] == 1
        assert found.get_seq_length() == 16
        assert torch.equal(generated(llama, ids, found), generated(llama, ids, DynamicCache()))


def test_pages_that_come_late_are_computed_again(llama: Any, store: PageStore) -> None:
    ids = sequence(45)
    save(filled(llama, ids), ids, store, WEIGHTS)
    assert resume(ids, store, WEIGHTS, deadline_s=0.0).get_seq_length() == 0
    assert save(filled(llama, sequence(9, 3)), sequence(9, 3), store, WEIGHTS, deadline_s=0.0) == 0


def test_pages_that_the_store_does_not_take_are_not_promised(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropped:
        def wait(self) -> list[PageVerdict]:
            return [PageVerdict.STORED, PageVerdict.DROPPED, PageVerdict.STORED]

    ids = sequence(24)
    save(filled(llama, sequence(9, 3)), sequence(9, 3), store, WEIGHTS)
    put = PageStore.put

    def second_is_dropped(self: PageStore, keys: Any, pages: Any, **options: Any) -> Any:
        if len(keys) < 3:
            return put(self, keys, pages, **options)
        for at in (0, 2):
            put(self, [keys[at]], [pages[at]]).wait()
        return Dropped()

    monkeypatch.setattr(PageStore, "put", second_is_dropped)
    assert save(filled(llama, ids), ids, store, WEIGHTS) == PAGE_TOKENS
    assert resume(ids, store, WEIGHTS).get_seq_length() == PAGE_TOKENS


def test_pages_have_the_scores_that_save_is_given(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[float]] = []
    put = PageStore.put

    def noted(self: PageStore, keys: Any, pages: Any, **options: Any) -> Any:
        given.append(options.get("scores"))
        return put(self, keys, pages, **options)

    monkeypatch.setattr(PageStore, "put", noted)
    ids = sequence(20)
    cache = filled(llama, ids)
    save(cache, ids, store, WEIGHTS, score="value_key_ratio")
    expected = torch.zeros(2)
    for layer in cache.layers:
        cut = (each[0, :, :16].unflatten(1, (2, 8)) for each in (layer.keys, layer.values))
        expected += value_key_ratio(*cut)
    assert given[1] == pytest.approx(expected.tolist())
    assert len(given[2]) == 1


@pytest.mark.parametrize("wrong", [[], [[1, 2], [3, 4]], ["a"], [-1], [True]])
def test_tokens_that_are_none_are_refused(llama: Any, store: PageStore, wrong: Any) -> None:
    with pytest.raises(UsageError, match="not the tokens"):
        resume(wrong, store, WEIGHTS)
    with pytest.raises(UsageError, match="not the tokens"):
        save(filled(llama, sequence(3)), wrong, store, WEIGHTS)


def test_caches_that_hold_something_else_are_refused(llama: Any, store: PageStore) -> None:
    ids = sequence(40)
    with pytest.raises(UsageError, match="not those of the cache"):
        save(filled(llama, ids), ids[:, :39], store, WEIGHTS)
    with pytest.raises(UsageError, match="not those of the cache"):
        save(DynamicCache(), ids, store, WEIGHTS)
    with pytest.raises(UsageError, match="several sequences"):
        save(filled(llama, sequence(40, batch=2)), ids, store, WEIGHTS)
    evicting = PagedEvictionCache(llama.config, 48)
    step(llama, ids, evicting)
    with pytest.raises(UsageError, match="of this kind is not saved"):
        save(evicting, ids, store, WEIGHTS)
    with pytest.raises(UsageError, match="holds tokens"):
        resume(ids, store, WEIGHTS, cache=filled(llama, ids))


def test_another_layout_or_model_is_refused(llama: Any, store: PageStore, tmp_path: Path) -> None:
    ids = sequence(20)
    save(filled(llama, ids), ids, store, WEIGHTS)
    half = model().to(torch.bfloat16)
    with pytest.raises(UsageError, match="another layout"):
        save(filled(half, ids), ids, store, WEIGHTS)
    with small_store(tmp_path / "tier") as tier:
        other = TieredCache(config(num_hidden_layers=2), tier, 0)
        with pytest.raises(UsageError, match="another model"):
            resume(ids, store, WEIGHTS, cache=other)


def test_a_store_of_small_pages_is_refused(llama: Any, tmp_path: Path) -> None:
    ids = sequence(3)
    with (
        small_store(tmp_path, page_bytes=1500) as store,
        pytest.raises(UsageError, match="holds no token of the model"),
    ):
        save(filled(llama, ids), ids, store, WEIGHTS)


def test_the_cache_lies_where_the_model_is(llama: Any, store: PageStore) -> None:
    ids = sequence(20)
    save(filled(llama, ids), ids, store, WEIGHTS)
    found = resume(ids, store, WEIGHTS, device="meta")
    assert found.get_seq_length() == 19
    assert {each.keys.device.type for each in found.layers} == {"meta"}


OTHER = b"some weights 002"


class Interrupted:
    """Lets something happen in the middle of save(): when it has asked which pages are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: PageStore, act: Any) -> None:
        self.happened = 0
        asked = store.contains

        def contains(keys: Any) -> list[bool]:
            found = asked(keys)
            if not self.happened:
                self.happened += 1
                act()
            return found

        monkeypatch.setattr(store, "contains", contains)


def test_weights_that_come_in_the_middle_of_a_save_find_none_of_its_pages(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sequence(40)
    cache = filled(llama, ids[:, :39])
    another = sequence(9, seed=2)
    save(filled(llama, another), another, store, OTHER)  # its layout is known
    between = Interrupted(monkeypatch, store, lambda: setattr(store, "identity", OTHER))
    save(cache, ids, store, WEIGHTS)
    assert between.happened == 1
    assert resume(ids, store, OTHER).get_seq_length() == 0


def test_conversations_of_two_models_wait_for_each_other(
    llama: Any, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes in the middle of the first one."""
    ids, waits = sequence(40), threading.Event()
    cache = filled(llama, ids[:, :39])

    class Watched:
        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                waits.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    store.conversing = Watched(store.conversing)  # type: ignore[assignment]
    second = threading.Thread(target=save, args=(cache, ids, store, OTHER))

    def come() -> None:
        second.start()
        must(waits.wait(DEADLINE_S))

    Interrupted(monkeypatch, store, come)
    must(save(cache, ids, store, WEIGHTS) == 39)
    second.join(DEADLINE_S)
    for each in (WEIGHTS, OTHER):
        assert resume(ids, store, each).get_seq_length() == 39
