"""Pages of a KV cache on tiers, for serving engines (docs/serving.md)."""

from statehold.kv.batch import PageBatch, PageVerdict
from statehold.kv.identity import identity
from statehold.kv.store import PageStore

__all__ = ["PageBatch", "PageStore", "PageVerdict", "identity"]
