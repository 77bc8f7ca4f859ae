"""PagedEvictionCache: what goes, when it goes, and that its memory goes with it."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from transformers import MistralConfig
from transformers.cache_utils import DynamicCache

from statehold.errors import UsageError
from statehold.kv import PagedEvictionCache
from statehold.kv.caches.paged_eviction import (
    SCORES,
    inverse_key_norm,
    key_difference,
    random_scores,
    streaming,
    value_key_ratio,
)
from support.caches import LAYERS, TOKEN_BYTES, config, filled, generated, model, sequence, step
from support.faults import must
from support.seeds import SEED

PAGE = 4
NAMES = [*SCORES, "random"]


@pytest.fixture(scope="module")
def llama() -> Any:
    return model()


def evicting(of: Any, budget: int, score: Any = "value_key_ratio") -> PagedEvictionCache:
    return PagedEvictionCache(of.config, budget, page_tokens=PAGE, score=score)


def inverted(score: Any) -> Any:
    return lambda keys, values: -score(keys, values)


# -- the sign ------------------------------------------------------------------------------------


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.softmax(queries @ keys.T, dim=-1) @ values


def error_without(score: Any, seed: int) -> float:
    """How far the output of attention moves when half of the groups go, of the lowest scores.

    The keys point away from the queries, as they do in trained models, and have several norms.
    """
    dice = torch.Generator().manual_seed(seed)
    groups, tokens, dim = 16, 4, 32

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice)

    away = torch.nn.functional.normalize(drawn(dim), dim=0)
    norms, sizes = drawn(2, groups, 1, 1).exp()
    keys = norms * (away + 0.1 * drawn(groups, tokens, dim))
    values = sizes * torch.nn.functional.normalize(drawn(groups, tokens, dim), dim=-1)
    queries = -2.0 * away + 0.1 * drawn(8, dim)
    kept = score(keys[None], values[None]).topk(groups // 2).indices
    all_of_it = attended(queries, keys.flatten(0, 1), values.flatten(0, 1))
    rest = attended(queries, keys[kept].flatten(0, 1), values[kept].flatten(0, 1))
    return float((rest - all_of_it).norm() / all_of_it.norm())


def mean_error(score: Any) -> float:
    return sum(error_without(score, seed) for seed in range(50)) / 50


def has_the_sign(score: Any) -> bool:
    """Whether what a score keeps is worth more to attention than what chance keeps."""
    return mean_error(score) < 0.5 * mean_error(random_scores(7))


def test_the_ratio_of_norms_keeps_what_attention_needs() -> None:
    assert has_the_sign(value_key_ratio)
    assert not has_the_sign(inverted(value_key_ratio))
    assert mean_error(inverted(value_key_ratio)) > mean_error(random_scores(7))


def test_scores_of_known_pages() -> None:
    """Two heads, three pages of two tokens, two dims."""
    keys = torch.tensor([[[3.0, 4.0], [3.0, 4.0]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, 2.0]] * 2])
    keys = torch.stack([keys, 3 * keys])
    values = torch.tensor([[[1.0, 0.0]] * 2, [[0.0, 2.0], [0.0, 4.0]], [[8.0, 6.0]] * 2])
    values = torch.stack([values, values])
    ratios = torch.tensor([2 / 20, 6 / 4, 20 / 8])
    torch.testing.assert_close(value_key_ratio(keys, values), ratios)
    torch.testing.assert_close(inverse_key_norm(keys, values), torch.tensor([0.1, 0.5, 0.25]))
    assert streaming(keys, values).tolist() == [0, 1, 2]
    alike = torch.ones(1, 3, 2, 4)
    alike[0, 1] = torch.tensor([1.0, -1.0, 1.0, -1.0])  # the page that differs
    assert key_difference(alike, alike).argmax() == 1
    drawn = random_scores(3)(keys, values)
    assert torch.equal(drawn, random_scores(3)(keys, values))
    assert not torch.equal(drawn, random_scores(4)(keys, values))


# -- what goes -----------------------------------------------------------------------------------


def positions(layer: Any, stock: Any) -> list[int]:
    """Which tokens of a whole layer are kept."""
    kept = torch.cat([keys for keys, _ in layer.pages], dim=2)[0, :, : layer.kept_tokens]
    same = (stock.keys[0][:, :, None] == kept[:, None]).all(-1).all(0)
    assert same.sum(0).tolist() == [1] * layer.kept_tokens
    return same.int().argmax(0).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_keeps_its_ends_and_the_best_tokens(llama: Any, name: str) -> None:
    ids = sequence(50)
    cache, stock = evicting(llama, 24, name), filled(llama, ids)
    step(llama, ids, cache)
    for layer, whole in zip(cache.layers, stock.layers, strict=True):
        kept = positions(layer, whole)
        assert len(kept) == layer.kept_tokens == 20  # the next page has room
        assert kept == sorted(kept)
        assert kept[:PAGE] == [0, 1, 2, 3]
        assert kept[-PAGE:] == [46, 47, 48, 49]
        if name != "random":
            scores = SCORES[name](whole.keys[0].unsqueeze(2), whole.values[0].unsqueeze(2))
            gone = [at for at in range(50) if at not in kept]
            assert scores[kept[PAGE:-PAGE]].min() >= scores[gone].max()


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_full_page_takes_the_place_of_the_page_of_the_lowest_score(llama: Any, name: str) -> None:
    ids = sequence(70)
    cache = evicting(llama, 24, name)
    step(llama, ids[:, :50], cache)
    fell = 0
    for at in range(50, 70):
        before = [list(layer.pages) for layer in cache.layers]
        step(llama, ids[:, at : at + 1], cache)
        for layer, old in zip(cache.layers, before, strict=True):
            gone = [page for page in old if not any(page[0] is new for new, _ in layer.pages)]
            assert len(gone) == (1 if (at - 49) % PAGE == 0 else 0)
            assert layer.pages[0][0] is old[0][0]
            if gone and name != "random":
                full = old if (at - 50) % PAGE else [*old, layer.pages[-1]]
                keys, values = (torch.stack([page[part][0] for page in full], 1) for part in (0, 1))
                scores = SCORES[name](keys, values)[1:-1]
                assert gone[0][0] is full[1 + int(scores.argmin())][0]
                fell += 1
    assert fell == (0 if name == "random" else 5 * LAYERS)


def test_layers_choose_for_themselves(llama: Any) -> None:
    ids = sequence(50)
    cache, stock = evicting(llama, 24), filled(llama, ids)
    step(llama, ids, cache)
    kept = {tuple(positions(*pair)) for pair in zip(cache.layers, stock.layers, strict=True)}
    assert len(kept) > 1


# -- the budget and the memory ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("case", range(25))
def test_the_budget_is_never_exceeded(case: int) -> None:
    dice = random.Random(f"{SEED} {case}")
    page = dice.choice([1, 2, 4, 16])
    budget = page * dice.randrange(3, 9)
    cache = PagedEvictionCache(
        config(num_hidden_layers=3), budget, page_tokens=page, score=dice.choice(NAMES)
    )
    torch.manual_seed(case)
    seen = 0
    for _ in range(40):
        tokens = dice.choice([1, 1, 1, 1, dice.randrange(1, 2 * page + 1), dice.randrange(1, 100)])
        seen += tokens
        for layer in range(3):
            new = torch.randn(1, 2, tokens, 16)
            before = cache.layers[layer].kept_tokens
            keys, _ = cache.update(new, -new, layer)
            assert keys.shape[2] == before + tokens
            assert torch.equal(keys[:, :, before:], new)
            assert cache.layers[layer].kept_tokens <= budget
            assert cache.layers[layer].nbytes <= budget * TOKEN_BYTES
        assert len({each.kept_tokens for each in cache.layers}) == 1
        assert cache.get_seq_length() == seen
        assert cache.get_mask_sizes(1, 0) == (cache.kept_tokens + 1, seen - cache.kept_tokens)
    assert seen > budget


def test_a_page_that_goes_frees_its_memory(llama: Any) -> None:
    cache = evicting(llama, 24)
    step(llama, sequence(50), cache)
    alive = [weakref.ref(each) for layer in cache.layers for page in layer.pages for each in page]
    step(llama, sequence(PAGE - 1, 1), cache)
    gc.collect()
    must(all(each() is not None for each in alive))
    before = cache.nbytes
    step(llama, sequence(1, 2), cache)
    gc.collect()
    assert sum(each() is None for each in alive) == 2 * LAYERS  # keys and values of a page
    assert cache.nbytes == before - LAYERS * PAGE * TOKEN_BYTES
    stored = [each.untyped_storage() for layer in cache.layers for page in layer.pages
              for each in page]  # fmt: skip
    assert len({each.data_ptr() for each in stored}) == len(stored)
    assert sum(each.nbytes() for each in stored) == cache.nbytes == LAYERS * 20 * TOKEN_BYTES


def test_the_prompt_leaves_no_memory_behind(llama: Any) -> None:
    cache = evicting(llama, 24)
    given = []
    for number, layer in enumerate(filled(llama, sequence(400)).layers):
        given += [weakref.ref(each) for each in cache.update(layer.keys, layer.values, number)]
    del layer
    gc.collect()
    assert [each() for each in given] == [None] * (2 * LAYERS)


# -- in a model ------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_budget_that_is_not_reached_changes_no_token(llama: Any, name: str) -> None:
    ids = sequence(30)
    found = generated(llama, ids, evicting(llama, 60, name))
    assert torch.equal(found, generated(llama, ids, DynamicCache()))


def test_attention_sees_the_kept_tokens_at_their_positions(llama: Any) -> None:
    ids, more = sequence(50), sequence(3, 1)
    cache, stock = evicting(llama, 24, "streaming"), filled(llama, ids)
    step(llama, ids, cache)
    kept = positions(cache.layers[0], stock.layers[0])
    by_hand = DynamicCache()
    for number, layer in enumerate(stock.layers):
        by_hand.update(layer.keys[:, :, kept], layer.values[:, :, kept], number)
    expected = step(llama, more, by_hand, position_ids=torch.arange(50, 53)[None])
    torch.testing.assert_close(step(llama, more, cache), expected)
    must(not torch.allclose(expected, step(llama, more, stock), atol=1e-3))


@pytest.mark.thorough
def test_generate_goes_on_for_long(llama: Any) -> None:
    cache = evicting(llama, 24)
    found = generated(llama, sequence(50), cache, 60)
    assert found.shape[1] == 110
    assert cache.get_seq_length() == 109
    assert cache.kept_tokens <= 24
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert torch.equal(generated(llama, sequence(50), cache, 60), found)


# -- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_tokens": 32}, "whole pages"),
        ({"budget_tokens": 50}, "whole pages"),
        ({"budget_tokens": 0}, "not a number of tokens"),
        ({"budget_tokens": 48.0}, "not a number of tokens"),
        ({"budget_tokens": 48, "page_tokens": 0}, "not a number of tokens"),
        ({"budget_tokens": 48, "score": "best"}, "no such score"),
        ({"budget_tokens": 48, "config": None}, "not a configuration"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PagedEvictionCache(**{"config": config(), **options})


def test_layers_with_a_window_are_refused() -> None:
    windowed = MistralConfig(num_hidden_layers=2, sliding_window=64)
    with pytest.raises(UsageError, match="does not hold a layer of this kind"):
        PagedEvictionCache(windowed, 48)


def test_a_score_of_another_shape_is_refused(llama: Any) -> None:
    with pytest.raises(UsageError, match="another shape"):
        step(llama, sequence(50), evicting(llama, 24, lambda keys, values: keys.sum()))


def test_batches_beams_and_cuts_are_refused(llama: Any) -> None:
    cache = evicting(llama, 24)
    with pytest.raises(UsageError, match="holds one sequence"):
        step(llama, sequence(5, batch=2), cache)
    cache.reset()
    step(llama, sequence(5), cache)
    with pytest.raises(UsageError, match="cut back"):
        cache.crop(-1)
    with pytest.raises(UsageError, match="no beams"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(UsageError, match="no beams"):
        cache.reorder_cache(torch.tensor([0, 0]))
    cache.crop(0)
    cache.batch_select_indices(torch.tensor([0]))
    assert not cache.is_croppable
