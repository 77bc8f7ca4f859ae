"""Pages of a KV cache on tiers, for serving engines (docs/serving.md).

Importing this package loads neither torch nor transformers; the first use of a cache does.
"""

import importlib
from typing import Any

from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.identity import identity
from statehold.kv.store import PageStore

__all__ = [
    "PageBatch",
    "PageStore",
    "PageVerdict",
    "PagedEvictionCache",
    "TieredCache",
    "identity",
    "resume",
    "save",
]

# For transformers, which the rest of this package does not need.
_CACHES = {
    "PagedEvictionCache": "statehold.kv.caches.paged_eviction",
    "TieredCache": "statehold.kv.caches.tiered",
    "resume": "statehold.kv.caches.conversation",
    "save": "statehold.kv.caches.conversation",
}


def __getattr__(name: str) -> Any:
    if name in _CACHES:
        return getattr(importlib.import_module(_CACHES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
