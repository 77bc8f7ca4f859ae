"""Pages of a KV cache on tiers, for serving engines (docs/serving.md).

Importing this package loads neither torch nor transformers. The first use of a cache, or of
follow(), does.
"""

import importlib
from typing import Any

from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.identity import identity
from statehold.kv.store import PageStore

__all__ = [
    "PageBatch", "PageStore", "PageVerdict", "PagedEvictionCache", "TieredCache", "WorthThePause",
    "follow", "identity", "resume", "save",
]  # fmt: skip

# These need torch or transformers, and the rest of this package does not.
_LATER = {
    "PagedEvictionCache": "statehold.kv.caches.paged_eviction",
    "TieredCache": "statehold.kv.caches.tiered",
    "WorthThePause": "statehold.kv.following",
    "follow": "statehold.kv.following",
    "resume": "statehold.kv.caches.conversation",
    "save": "statehold.kv.caches.conversation",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
