"""TieredCache: a Cache of transformers whose layers beyond a budget lie in a store of pages.

    update(layer)   pages of the layer, that were asked for one layer ago | newest tokens | new ones
                    -> attention; then layers beyond the budget go, and the next layer is asked for

A layer that has gone is whole pages in the store, in host memory or files, and the newest tokens
here, less than a page. Which layers go is spread evenly over the model, so each has the time of
several others to come.

Invariants: what attention sees is, bit for bit, what a DynamicCache gives. A layer lets go of its
tokens only after the store has them. Pages that the store has lost are an error, never other
tokens. Each page has a key of its own, so no other cache can find it.
Not here: where pages lie (store), a cache for the next process (conversation).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from statehold.errors import StorageError, refused
from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.caches.plain import as_pages, is_plain, plain_layers, views
from statehold.kv.store import PageStore
from statehold.process.warn import logger
from statehold.units import format_bytes, parse_bytes

DEADLINE_S = 60.0
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole part, are spread evenly


@dataclass(slots=True)
class PagesUnderWay:
    """Pages on their way: from a layer to the store, or back. pages: their memory."""

    batch: PageBatch
    keys: list[bytes]
    pages: torch.Tensor


class TieredLayer(DynamicLayer):
    """A layer that may lie in a store. keys, values: the tokens that are here."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, store: PageStore, name: bytes) -> None:
        super().__init__()
        self._store, self._name = store, name
        self._away: list[bytes] = []  # keys of the pages that are in the store
        self._page_tokens = self._page_count = 0
        self._going: PagesUnderWay | None = None
        self._coming: PagesUnderWay | None = None
        self._must_stay = False

    @property
    def nbytes(self) -> int:
        """The memory of the tokens that are here, and not on their way into the store."""
        here = self.keys.nbytes + self.values.nbytes if self.is_initialized else 0
        return here - (self._going.pages.nbytes if self._going else 0)

    @property
    def pages_away(self) -> int:
        """The pages of the layer that are in the store, or on their way there."""
        return len(self._away) + (len(self._going.keys) if self._going else 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens. Returns all of the layer."""
        self.settle()
        super().update(key_states, value_states)  # to those that are here
        return self.whole()

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values. Raises StorageError if the store has lost some."""
        self.settle()
        if not self._away:
            return self.keys, self.values
        pages, both = self._arrived(), (self.keys, self.values)
        sizes = [self._page_tokens * _token_bytes(each) for each in both]
        keys, values = (
            torch.cat([*(self._tokens_in(raw, here) for raw in part), here], dim=2)
            for part, here in zip(pages.split_with_sizes(sizes, dim=1), both, strict=True)
        )
        return keys, values

    # -- to the store ----------------------------------------------------------------------

    def pages_to_go(self) -> int:
        """The whole pages that are here, unless they must stay or are on their way."""
        if self._must_stay or self._going or not (self.is_initialized and self.keys.shape[2]):
            return 0
        if not self._page_tokens:
            nbytes = (self.keys.nbytes + self.values.nbytes) // self.keys.shape[2]  # of a token
            self._page_tokens = self._store.page_bytes // nbytes
            if not self._page_tokens:
                least, got = format_bytes(nbytes), format_bytes(self._store.page_bytes)
                summary = "a page of the store holds no token of a layer"
                raise refused(summary, f"page_bytes of at least {least}", got)
        return int(self.keys.shape[2] // self._page_tokens)

    def begin_to_go(self, room: int) -> None:
        """Begin to put the whole pages that are here, if the store has room for so many."""
        tokens, count = self._page_tokens, self.pages_to_go()
        if count > room:
            return self._stay("it has no room for all pages of the cache")
        parts = [as_pages(each[:, :, : count * tokens], count) for each in (self.keys, self.values)]
        pages = torch.cat(parts, dim=1).cpu()
        first, self._page_count = self._page_count, self._page_count + count
        keys = [self._name + n.to_bytes(8, "little") for n in range(first, self._page_count)]
        batch = self._store.put(keys, views(pages), deadline_s=DEADLINE_S)
        self._going = PagesUnderWay(batch, keys, pages)
        return None

    def settle(self) -> None:
        """Let go of the tokens that the store has by now; those that it does not take stay here."""
        going, self._going = self._going, None
        if going is None:
            return
        verdicts = going.batch.wait()
        is_stored = [each in (PageVerdict.STORED, PageVerdict.THERE) for each in verdicts]
        count = [*is_stored, False].index(False)
        if count < len(going.keys):
            self._stay(f"it has not taken a page: {verdicts[count].value}")
        self._away, self._coming = self._away + going.keys[:count], None
        self.keys, self.values = (
            each[:, :, count * self._page_tokens :].clone() for each in (self.keys, self.values)
        )

    def _stay(self, why: str) -> None:
        if not self._must_stay:
            self._must_stay = True
            logger.warning(
                "a layer of a cache stays in memory, beyond its budget\n  store  %s\n  why    %s",
                self._store.path, why,
            )  # fmt: skip

    # -- from the store --------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin to read what is in the store, if that is not under way."""
        self.settle()
        if self._away and self._coming is None:
            self._coming = self._ask()

    def _ask(self) -> PagesUnderWay:
        nbytes = self._page_tokens * sum(_token_bytes(each) for each in (self.keys, self.values))
        pages = torch.empty((len(self._away), nbytes), dtype=torch.uint8, device="cpu")
        batch = self._store.get(self._away, views(pages), deadline_s=DEADLINE_S)
        return PagesUnderWay(batch, self._away, pages)

    def _arrived(self) -> torch.Tensor:
        """The pages of the layer that are in the store. Raises WaitTimeout, or StorageError."""
        until = time.monotonic() + DEADLINE_S
        while True:
            coming, self._coming = self._coming or self._ask(), None
            verdicts = set(coming.batch.wait())
            if verdicts <= {PageVerdict.HIT}:
                return coming.pages
            if verdicts - {PageVerdict.HIT, PageVerdict.LATE}:
                hint = "compute it again; give the store more capacity, and leave its identity"
                path = self._store.path
                raise StorageError("a store has lost pages of a cache", path=path, hint=hint)
            # Pages that are to be written have all the memory of the store.
            self._store.flush(max(0.0, until - time.monotonic()))

    def _tokens_in(self, raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The keys or the values of a page, from their bytes."""
        shape = (*like.shape[:2], self._page_tokens, like.shape[3])
        return raw.view(like.dtype).view(shape).to(like.device)

    # -- what changes all tokens -----------------------------------------------------------

    def _come_back(self) -> None:
        """All of the layer is here again, until it goes the next time."""
        if self.is_initialized:
            self.keys, self.values = self.whole()
            # Measured again before it goes: in another batch, a token has another size.
            self._away, self._coming, self._page_tokens = [], None, 0

    def get_seq_length(self) -> int:
        """All tokens."""
        return len(self._away) * self._page_tokens + int(super().get_seq_length())

    def reset(self) -> None:
        """Drop all tokens."""
        self.settle()
        self._away, self._coming, self._page_tokens = [], None, 0
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens."""
        self._come_back()
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take other sequences of the batch."""
        self._come_back()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each sequence of the batch several times."""
        self._come_back()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Take some sequences of the batch."""
        self._come_back()
        super().batch_select_indices(indices)


class TieredCache(Cache):
    """A cache for `generate(..., past_key_values=)` that holds so many bytes, and a store the rest.

    In addition to the budget, the layer that is computed, the next one, and one on its way to the
    store are in memory. Layers of windows or states, which do not grow, stay in memory and do not
    count.

    Args:
        config: of the model.
        store: where the other layers lie. It has room for all of them; its `memory` is the tier of
            host memory, and its files are the tier below.
        budget: how many bytes of layers stay here.

    Raises:
        UsageError: an argument makes no sense.
        StorageError: in update(), if the store has lost pages.
        WaitTimeout: in update(), if the storage does not give them.

    Not thread-safe, like every cache of transformers. Close the store after the cache is not used
    any more.
    """

    def __init__(self, config: Any, store: PageStore, budget: int | str) -> None:
        if not isinstance(store, PageStore):
            raise refused("not a store of pages", "a PageStore", store)
        self._store, self._budget = store, parse_bytes(budget)
        name = os.urandom(16)
        layers = [
            TieredLayer(store, name + number.to_bytes(4, "little")) if is_plain(layer) else layer
            for number, layer in enumerate(plain_layers(config))
        ]
        self._tiered = [n for n, layer in enumerate(layers) if isinstance(layer, TieredLayer)]
        self._order = sorted(self._tiered, key=lambda number: -(number * _GOLDEN % 1))
        self._last: TieredLayer | None = None  # that has begun to go
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """The memory of the layers that are here."""
        return int(sum(self.layers[number].nbytes for number in self._tiered))

    @property
    def layers_away(self) -> list[int]:
        """The layers that lie in the store."""
        return [number for number in self._tiered if self.layers[number].pages_away]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Add tokens to a layer. Returns all of it, and has the next one read."""
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        layer = self.layers[layer_idx]
        if isinstance(layer, TieredLayer):
            if layer.pages_away:
                self._move(layer)
            self._make_room()
            if away := self.layers_away:
                self.layers[min((n for n in away if n > layer_idx), default=away[0])].prefetch()
        return found

    def _make_room(self) -> None:
        over = self.nbytes - self._budget
        for number in self._order:
            if over > 0:
                over -= self._move(self.layers[number])

    def _move(self, layer: TieredLayer) -> int:
        """Begin to move a layer to the store. Returns how many bytes go."""
        if not layer.pages_to_go():
            return 0
        if self._last is not None:
            self._last.settle()  # so no more than one layer is on its way
        before, self._last = layer.nbytes, layer
        away = sum(self.layers[number].pages_away for number in self._tiered)
        layer.begin_to_go(self._store.stats()["pages_max"] - away)
        return before - layer.nbytes


def _token_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[0] * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
