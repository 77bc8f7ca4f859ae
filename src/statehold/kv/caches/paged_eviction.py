"""PagedEvictionCache: a Cache of transformers that drops whole pages, and the scores that choose.

    prompt   first page | tokens of the highest scores, cut into pages | last page
    decode   a page is full, and the pages have too many tokens: the page of the lowest score goes

Each layer chooses for itself, and all layers keep as many tokens. Keys have their rotary position
from the time when they were computed. So a page that goes leaves a gap, and nothing moves.

Invariants: after each call a layer holds at most `budget_tokens`. A page is two tensors of its own,
so its memory is free as soon as it goes. The first page and the newest one never go. The lengths
that transformers sees are those of the whole sequence; only the sizes of masks are those kept.
Not here: pages that lie on tiers (tiered), pages of a store (store).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from statehold.errors import UsageError, refused
from statehold.kv.caches.plain import is_plain, plain_layers

# (keys, values), each [heads, groups, tokens, dim] -> [groups]; the groups of the lowest scores go.
Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PAGE_TOKENS = 16
PAGES_MIN = 3  # the first one, the newest one, and one that may go


# -- scores ----------------------------------------------------------------------------------------


def value_key_ratio(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """|V| / |K|: sums over the tokens of a group, means over the heads. High is kept.

    Why this sign. Attention gives o = sum a_i v_i, with a_i in proportion to exp(q k_i). Without
    token i the output moves by a_i / (1 - a_i) * |v_i - o|. So what a token is worth grows with its
    weight and with |V|. The weight is not known, because the queries come later, but most keys of a
    trained model point away from its queries: q k_i = -c |k_i| with c > 0. Then a_i falls as
    exp(-c |k_i|), and the worth a_i |v_i| grows with |V| and falls with |K|. The tests hold this
    against the exact output: K/V in place of V/K drops what the output needs most.
    """
    return _norms(values) / _norms(keys)


def inverse_key_norm(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """1 / |K|: keys of small norms have the attention."""
    return keys.shape[2] / _norms(keys)


def key_difference(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How far keys point away from their mean (KeyDiff): those that are like all others go."""
    directions = torch.nn.functional.normalize(keys.float(), dim=-1)
    mean = torch.nn.functional.normalize(directions.mean((1, 2), keepdim=True), dim=-1)
    return -(directions * mean).sum(-1).mean((0, 2))


def streaming(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The most recent ones stay, with the first page: attention sinks and a window."""
    return torch.arange(keys.shape[1], device=keys.device, dtype=torch.float32)


def random_scores(seed: int = 0) -> Score:
    """Scores by chance, the same ones for each seed."""
    dice = torch.Generator().manual_seed(seed)

    def score(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.rand(keys.shape[1], generator=dice, device="cpu").to(keys.device)

    return score


SCORES: Mapping[str, Score] = {
    "value_key_ratio": value_key_ratio,
    "inverse_key_norm": inverse_key_norm,
    "key_difference": key_difference,
    "streaming": streaming,
}


def score_named(score: str | Score) -> Score:
    """A score, or the one of a name. Raises UsageError."""
    named = {**SCORES, "random": random_scores()}
    found = score if callable(score) else named.get(score)
    if found is None:
        expected = f"{', '.join(named)}, or a function"
        raise refused("there is no such score of pages", expected, score)
    return found


def scored(score: Score, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A score for each group. Raises UsageError if the function gives something else."""
    scores = score(keys, values)
    if scores.shape != keys.shape[1:2]:
        raise refused("a score of pages has another shape", [*keys.shape[1:2]], [*scores.shape])
    return scores


def _norms(tensors: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = tensors.float().norm(dim=-1)
    return norms.mean(0).sum(-1)


# -- the cache -------------------------------------------------------------------------------------


class EvictingLayer(DynamicLayer):
    """The pages of one layer. pages: the keys and the values of each, [1, heads, tokens, dim]."""

    is_croppable = False  # what went does not come back

    def __init__(self, limit: int, page_tokens: int, score: Score) -> None:
        super().__init__()
        self.pages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._limit, self._page_tokens, self._score = limit, page_tokens, score
        self._seen = self._in_newest = 0

    @property
    def kept_tokens(self) -> int:
        """How many tokens have their keys and values."""
        return max(0, len(self.pages) - 1) * self._page_tokens + self._in_newest

    @property
    def nbytes(self) -> int:
        """The memory of all pages."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.pages)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens. Returns all that attention sees: those kept, and the new ones."""
        if len(key_states) != 1:
            summary = "a cache that evicts pages holds one sequence"
            raise refused(summary, "a batch of 1", len(key_states))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added = key_states.shape[2]
        tokens = self._in_newest
        newest = [(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in self.pages[-1:]]
        seen = *self.pages[:-1], *newest, (key_states, value_states)
        keys, values = (torch.cat(each, dim=2) for each in zip(*seen, strict=True))
        self._seen += added
        if added > self._page_tokens or not self.pages:
            self._cut(keys, values)
        else:
            self._append(key_states, value_states)
            self._evict()
        return keys, values

    def _cut(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the tokens of a prompt that the limit has room for, in new pages."""
        tokens, page = keys.shape[2], self._page_tokens
        if tokens > self._limit:
            scores = scored(self._score, keys[0].unsqueeze(2), values[0].unsqueeze(2))
            best = scores[page:-page].topk(self._limit - 2 * page).indices.sort().values + page
            ends = torch.arange(tokens, device=keys.device)
            kept = torch.cat([ends[:page], best.to(keys.device), ends[-page:]])
            keys, values = keys[:, :, kept], values[:, :, kept]
        self.pages, self._in_newest = [], page
        self._append(keys, values)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        page, done = self._page_tokens, 0
        while done < keys.shape[2]:
            if not self.pages or self._in_newest == page:
                self.pages.append((_empty(keys, page), _empty(values, page)))
                self._in_newest = 0
            at = self._in_newest
            count = min(page - at, keys.shape[2] - done)
            for to, new in zip(self.pages[-1], (keys, values), strict=True):
                to[:, :, at : at + count] = new[:, :, done : done + count]
            done, self._in_newest = done + count, at + count

    def _evict(self) -> None:
        """Drop pages until those that are full have no more tokens than the limit."""
        page = self._page_tokens
        while (full := len(self.pages) - (self._in_newest < page)) * page > self._limit:
            keys, values = (
                torch.stack([tensors[0] for tensors in each], 1)
                for each in zip(*self.pages[:full], strict=True)
            )
            scores = scored(self._score, keys, values)[1 : len(self.pages) - 1]
            del self.pages[1 + int(scores.argmin())]

    # -- what transformers asks ------------------------------------------------------------

    def get_seq_length(self) -> int:
        """The tokens of the sequence, also those that went: positions follow from it."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens attention sees, and how many went."""
        return self.kept_tokens + query_length, self._seen - self.kept_tokens

    def reset(self) -> None:
        """Drop everything."""
        super().reset()
        self.pages, self._seen, self._in_newest = [], 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, except for none: pages went that the shorter sequence would have."""
        if tokens_to_remove:
            raise UsageError("a cache that evicts pages cannot be cut back")

    def offload(self) -> None:
        """Refused."""
        raise UsageError("a cache that evicts pages is not offloaded", hint="take a TieredCache")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused, except for the one sequence that there is."""
        if beam_idx.tolist() != [0]:
            raise UsageError("a cache that evicts pages holds one sequence: no beams")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused, except for once."""
        self.reorder_cache(torch.zeros(repeats, dtype=torch.long, device="cpu"))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused, except for the one sequence that there is."""
        self.reorder_cache(indices.view(-1))


class PagedEvictionCache(Cache):
    """A cache for `generate(..., past_key_values=)` that keeps at most so many tokens of a layer.

    After a prompt, a layer keeps the first page, the newest one, and the tokens of the highest
    scores between them: together one page less than the budget, so the next page has room. When a
    page is full, the page of the lowest score goes. The attention of a prompt sees all of it.
    Prompts have no padding: no cache learns which tokens a mask hides.

    Args:
        config: of the model. All its layers have full attention.
        budget_tokens: what a layer keeps at most; whole pages, at least three.
        page_tokens: the tokens of a page.
        score: value_key_ratio, inverse_key_norm, key_difference, streaming, random; or a function
            of keys and values, each [heads, groups, tokens, dim], that gives [groups].

    Raises:
        UsageError: an argument makes no sense, or a layer has no full attention.
    """

    def __init__(
        self, config: Any, budget_tokens: int, *, page_tokens: int = PAGE_TOKENS,
        score: str | Score = "value_key_ratio",
    ) -> None:  # fmt: skip
        for name, value in (("page_tokens", page_tokens), ("budget_tokens", budget_tokens)):
            if type(value) is not int or value < 1:
                raise refused("not a number of tokens", f"{name} of at least 1", value)
        if budget_tokens % page_tokens or budget_tokens < PAGES_MIN * page_tokens:
            expected = f"a multiple of {page_tokens}, from {PAGES_MIN * page_tokens} on"
            raise refused("a budget of tokens is whole pages", expected, budget_tokens)
        score = score_named(score)
        limit = budget_tokens - page_tokens
        layers = plain_layers(config)
        for number, layer in enumerate(layers):
            if not is_plain(layer):
                summary = f"{type(self).__name__} does not hold a layer of this kind"
                raise refused(summary, "full attention", type(layer).__name__, layer=number)
        super().__init__(layers=[EvictingLayer(limit, page_tokens, score) for _ in layers])

    @property
    def kept_tokens(self) -> int:
        """How many tokens each layer keeps."""
        return int(max(layer.kept_tokens for layer in self.layers))

    @property
    def nbytes(self) -> int:
        """The memory of the pages of all layers."""
        return sum(layer.nbytes for layer in self.layers)


def _empty(like: torch.Tensor, tokens: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:2], tokens, like.shape[3]))
