"""A conversation whose cache outlives its process: save() puts it into a store, resume() finds it.

    root      key: of the identity; what a page looks like: tokens, and for each layer its dtype,
              heads and dims
    page n    key: SHA-256 of the key before it and of its tokens; bytes: for each layer K, then V
    tail      the same, for the tokens behind the last whole page

A page has as many tokens as the store's pages have room for. The key follows from all tokens up to
its last one, so conversations with the same beginning share its pages.

Invariants: what resume() gives was computed from these tokens, under this identity, also if others
give the store another identity meanwhile. A page that is damaged, late or gone ends the prefix, and
nothing else. At least one token is left to compute.
Not here: layers beyond a budget (tiered), weights and layouts by content (identity).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from statehold.errors import UsageError, refused
from statehold.kv.batch import PageVerdict
from statehold.kv.caches.paged_eviction import Score, score_named, scored
from statehold.kv.caches.plain import as_pages, is_plain, views
from statehold.kv.store import PageStore
from statehold.units import format_bytes

FORMAT = 2
DEADLINE_S = 60.0
_ROOT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page looks like. layers: of each its dtype, heads, dim of keys, dim of values."""

    page_tokens: int
    layers: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def of(cls, layers: Sequence[Any], page_bytes: int) -> PageShape:
        """As many tokens as a page has room for. Raises UsageError without room for one."""
        one = cls(1, tuple(_shape(layer, number) for number, layer in enumerate(layers)))
        least = max(_ROOT_BYTES, one.nbytes(1))
        if least > page_bytes:
            summary = "a page of the store holds no token of the model"
            expected = f"page_bytes of at least {format_bytes(least)}"
            raise refused(summary, expected, format_bytes(page_bytes))
        return cls(page_bytes // one.nbytes(1), one.layers)

    def nbytes(self, tokens: int) -> int:
        """Of a page with so many tokens."""
        sizes = (
            int(getattr(torch, dtype).itemsize) * heads * (of_keys + of_values)
            for dtype, heads, of_keys, of_values in self.layers
        )
        return tokens * sum(sizes)

    def encode(self) -> bytes:
        """The root page."""
        runs = [[*layer, len(list(run))] for layer, run in itertools.groupby(self.layers)]
        raw = json.dumps({"tokens": self.page_tokens, "layers": runs}).encode()
        if len(raw) > _ROOT_BYTES:
            raise UsageError("a model has too many kinds of layers for a page of its layout")
        return raw.ljust(_ROOT_BYTES)

    @classmethod
    def decode(cls, raw: torch.Tensor) -> PageShape:
        """What encode() has written: the store has verified it."""
        found = json.loads(bytes(raw.tolist()))
        layers = [tuple(layer) for *layer, count in found["layers"] for _ in range(count)]
        return cls(found["tokens"], tuple(layers))

    def pairs(self, pages: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each layer, from pages that have the bytes of whole tokens."""
        sizes = [len(page) // self.nbytes(1) for page in pages]
        at = 0
        for name, heads, *dims in self.layers:
            dtype, pair = getattr(torch, name), []
            for dim in dims:
                begin, at = at, at + dtype.itemsize * heads * dim
                pieces = [
                    # A copy, because a view needs bytes at a multiple of its dtype.
                    page[begin * n : at * n].clone().view(dtype).view(1, heads, n, dim)
                    for page, n in zip(pages, sizes, strict=True)
                ]
                pair.append(torch.cat(pieces, dim=2))
            yield pair[0], pair[1]


class PageRows:
    """Pages of as many tokens that are saved together: the bytes of each, and its score."""

    def __init__(self, begin: int, tokens: int, count: int, nbytes: int) -> None:
        self._begin, self._tokens, self._count = begin, tokens, count
        self._at = 0
        self.rows = torch.empty((count, nbytes), dtype=torch.uint8, device="cpu")
        self.scores = torch.zeros(count, device="cpu")

    def add(self, keys: torch.Tensor, values: torch.Tensor, score: Score | None) -> None:
        """The tokens of the next layer."""
        end, cut = self._begin + self._tokens * self._count, []
        for whole in (keys, values):
            part = whole[:, :, self._begin : end]
            raw = as_pages(part, self._count)
            self.rows[:, self._at : self._at + raw.shape[1]] = raw
            self._at += raw.shape[1]
            cut.append(part[0].reshape(part.shape[1], self._count, self._tokens, -1))
        if score is not None:
            self.scores += scored(score, cut[0], cut[1]).cpu()


def save(
    cache: Cache, tokens: Sequence[int] | torch.Tensor, store: PageStore, identity: bytes, *,
    score: str | Score | None = None, deadline_s: float = DEADLINE_S,
) -> int:  # fmt: skip
    """Put the cache of a conversation into a store, which takes the identity.

    A thread that saves or resumes another conversation with this store waits meanwhile.

    Pages that the store has already are not written again. The others take memory until the store
    has them. They survive a loss of power after the store's flush(), or a second.

    Args:
        cache: a DynamicCache or a TieredCache that holds one sequence, with full attention alone.
        tokens: of the sequence, at least as many as the cache holds.
        store: its pages have room for at least one token of all layers.
        identity: what the cache depends on (see statehold.kv.identity).
        score: as for a PagedEvictionCache. When a page of the store has to go, those of low scores
            go first.
        deadline_s: how long to wait for the store.

    Returns:
        How many tokens resume() finds.

    Raises:
        UsageError: the cache holds something else, or pages of this identity have another layout.
    """
    ids, count = _ids(tokens), int(cache.get_seq_length())
    ranking = None if score is None else score_named(score)
    if not count or len(ids) < count:
        expected = f"{max(1, count)} tokens or more"
        raise refused("the tokens are not those of the cache", expected, len(ids))
    layout = PageShape.of(cache.layers, store.page_bytes)
    size = layout.page_tokens
    whole, rest = divmod(count, size)
    with store.conversing:
        store.identity = identity
        root = _root(identity)
        if not _has_root(store, root, layout, deadline_s):
            return 0
        keys = _chain(root, ids[:count], size)
        there = [*store.contains(keys), False].index(False)
        runs = {}
        if there < whole:
            runs[there] = PageRows(there * size, size, whole - there, layout.nbytes(size))
        if rest and there <= whole:
            runs[whole] = PageRows(whole * size, rest, 1, layout.nbytes(rest))
        for layer in cache.layers if runs else ():
            is_tiered = hasattr(layer, "whole")
            of_keys, of_values = layer.whole() if is_tiered else (layer.keys, layer.values)
            for run in runs.values():
                run.add(of_keys, of_values, ranking)
        for first, run in runs.items():
            batch = store.put(
                keys[first : first + len(run.rows)], views(run.rows), after=[root, *keys][first],
                scores=run.scores.tolist(), deadline_s=deadline_s,
            )  # fmt: skip
            is_there = [each in (PageVerdict.STORED, PageVerdict.THERE) for each in batch.wait()]
            if not all(is_there):
                return (first + is_there.index(False)) * size
    return count


def resume(
    tokens: Sequence[int] | torch.Tensor, store: PageStore, identity: bytes, *,
    cache: Cache | None = None, device: str | torch.device = "cpu", deadline_s: float = DEADLINE_S,
) -> Cache:  # fmt: skip
    """A cache with the longest beginning of `tokens` that the store has, for generate().

    It is empty if there is nothing. The last token is always left to compute.

    Args:
        tokens: of the whole sequence.
        store: where save() has put pages; it takes the identity.
        identity: that of save().
        cache: an empty one to fill, such as a TieredCache; default: a DynamicCache.
        device: of the model that goes on.
        deadline_s: how long to wait for the store. What comes later is computed again.

    Raises:
        UsageError: the cache is not empty, or has other layers.
    """
    ids, cache = _ids(tokens), DynamicCache() if cache is None else cache
    if cache.get_seq_length():
        summary, got = "a cache that holds tokens cannot resume others", cache.get_seq_length()
        raise refused(summary, "an empty cache", f"{got} tokens")
    with store.conversing:
        store.identity = identity
        root = _root(identity)
        roots = _read(store, [root], _ROOT_BYTES, deadline_s)
        if not len(roots):
            return cache
        layout = PageShape.decode(roots[0])
        if cache.layers and len(cache.layers) != len(layout.layers):
            expected, got = (f"{len(each.layers)} layers" for each in (layout, cache))
            raise refused("the cache is of another model than the pages", expected, got)
        size = layout.page_tokens
        keys = _chain(root, ids[: len(ids) // size * size], size)
        keys = keys[: [*store.contains(keys), False].index(False)]
        pages = [*_read(store, keys, layout.nbytes(size), deadline_s)]
        before = [root, *keys][len(pages)]
        rest = _after(before, ids[len(pages) * size :][: size - 1])
        there = itertools.compress(enumerate(rest, 1), store.contains(rest))
        for count, key in reversed([*there]):
            if tail := [*_read(store, [key], layout.nbytes(count), deadline_s)]:
                pages += tail
                break
        for number, pair in enumerate(layout.pairs(pages) if pages else ()):
            keys_of, values_of = (each[:, :, : len(ids) - 1].to(device) for each in pair)
            if keys_of.shape[2]:
                cache.update(keys_of, values_of, number)
        return cache


# -- small things ----------------------------------------------------------------------------------


def _ids(tokens: Sequence[int] | torch.Tensor) -> list[int]:
    ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
    if len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not ids or not all(type(each) is int and 0 <= each < 1 << 63 for each in ids):
        raise refused("not the tokens of a conversation", "the tokens of one sequence", tokens)
    return ids


def _shape(layer: Any, number: int) -> tuple[str, int, int, int]:
    if not ((is_plain(layer) or hasattr(layer, "whole")) and layer.is_initialized):
        summary, got = "a layer of this kind is not saved", type(layer).__name__
        raise refused(summary, "full attention", got, layer=number)
    batch, heads, _, dim = layer.keys.shape
    if batch != 1:
        raise refused("a cache with several sequences is not saved", "a batch of 1", batch)
    return str(layer.keys.dtype).removeprefix("torch."), heads, dim, layer.values.shape[3]


def _after(before: bytes, ids: Sequence[int]) -> list[bytes]:
    """The keys of the pages that hold the first token, the first two, and so on."""
    chained, keys = hashlib.sha256(before), []
    for each in ids:
        chained.update(struct.pack("<q", each))
        keys.append(chained.digest())
    return keys


def _root(identity: bytes) -> bytes:
    """The key of the root: if the store gets another identity in between, that one has no page of
    this one."""
    return hashlib.sha256(b"statehold conversation %d, %b" % (FORMAT, identity)).digest()


def _chain(root: bytes, ids: Sequence[int], size: int) -> list[bytes]:
    """The keys of the pages of a sequence, the last of which may hold fewer tokens."""
    pages = (ids[begin : begin + size] for begin in range(0, len(ids), size))
    keys = itertools.accumulate(pages, lambda before, page: _after(before, page)[-1], initial=root)
    return [*keys][1:]


def _has_root(store: PageStore, root: bytes, layout: PageShape, deadline_s: float) -> bool:
    """Whether the store has the root page of a layout. Raises UsageError for that of another."""
    if store.put([root], [layout.encode()], deadline_s=deadline_s).wait() == [PageVerdict.STORED]:
        return True
    found = [PageShape.decode(raw) for raw in _read(store, [root], _ROOT_BYTES, deadline_s)]
    if found and found != [layout]:
        summary = "the store has pages of this identity with another layout"
        hint = "name the dtype and all else that differs in identity()"
        raise refused(summary, layout, found[0], hint)
    return bool(found)


def _read(store: PageStore, keys: list[bytes], nbytes: int, deadline_s: float) -> torch.Tensor:
    """The pages up to the first one that the store does not have, a row for each."""
    rows = torch.empty((len(keys), nbytes), dtype=torch.uint8, device="cpu")
    if not keys:
        return rows
    verdicts = store.get(keys, views(rows), deadline_s=deadline_s).wait()
    return rows[: [*(each is PageVerdict.HIT for each in verdicts), False].index(False)]
